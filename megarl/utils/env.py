"""Reads what a process has to compute with, and sets what it wants before torch is imported:
environment variables, the timeout of collectives, warnings.

Every variable is a default: what the user has set stays.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import random
import re
import secrets
import socket
import threading
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

log = logging.getLogger(__name__)

CGROUPS = Path("/sys/fs/cgroup")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # one per running kernel
JOB_TOKEN = "MEGARL_JOB_TOKEN"  # what a job's own processes share
# set where a launcher has started a process's workers: group=host:port,... at which it meets them;
# empty when it has
CONTROLS = "MEGARL_CONTROLLER"
# whose warnings a user of megarl can do nothing about
_LIBRARIES = ("megatron", "torchdata", r"torch\.distributed")
_collective_seconds = 1800.0
_making = threading.Lock()


def set_trainer_defaults(
    env: MutableMapping[str, str], *, servers: Sequence[str] = (), block_fp8: bool = False
) -> None:
    """Sets the defaults of a process that torchrun or the launcher started. servers: host:port.
    block_fp8: an engine multiplies in FP8 by blocks."""
    world = int(env.get("WORLD_SIZE", "1"))
    # forked reward workers and tokenizers' own threads do not mix
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    # megatron-core overlaps TP communication by the order in which kernels are queued
    env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if block_fp8:  # Transformer Engine's scales are powers of two, those of FP8 servers are not
        env.setdefault("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    set_nccl_default(env)
    local = int(env.get("LOCAL_WORLD_SIZE", str(world)))
    set_threads_default(env, processes=local)
    if local == world:
        set_loopback_default(env, servers=servers)


def prefer_flash_attention(env: MutableMapping[str, str]) -> None:
    """Puts torch's flash attention before cuDNN's, unless the user has set the order.

    From torch 2.11 on, torch prefers cuDNN on Hopper and Blackwell. cuDNN builds a plan for every
    new shape, and micro-batches, prompts and decoded tokens have new shapes all the time. torch
    reads the variable at its first attention call.
    """
    env.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")


def attention_problems(env: Mapping[str, str]) -> list[str]:
    """Returns a line for each switch of Transformer Engine that megatron-core refuses, as it sets
    them itself. It asserts so in building any model, and names an option that megarl lacks."""
    why = "megatron-core sets it itself; unset it (attention=sdpa does without Transformer Engine)"
    names = (f"NVTE_{kind}_ATTN" for kind in ("FLASH", "FUSED", "UNFUSED"))
    return [f"{name}={env[name]}: {why}" for name in names if env.get(name, "1") != "1"]


def set_nccl_default(env: MutableMapping[str, str]) -> None:
    """Turns NCCL's cuMem off, for trainers and servers alike, as SGLang does where it is unset.
    NCCL by itself has it on, and two processes of one host that differ cannot open each other's
    buffers.
    """
    env.setdefault("NCCL_CUMEM_ENABLE", "0")


def set_sglang_defaults(env: MutableMapping[str, str]) -> None:
    """Sets the defaults of an SGLang server. With FP8 weights it would compile DeepGEMM's kernels
    for all counts of tokens before it is healthy: minutes on a new machine."""
    env.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "false")
    env.setdefault("SGLANG_JIT_DEEPGEMM_FAST_WARMUP", "true")


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch's names, the newer first
_SEGMENTS = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


def allocator_settings(env: Mapping[str, str]) -> str:
    """Returns the user's settings of torch's allocator, "" if there are none."""
    return next(filter(None, map(env.get, _ALLOCATOR)), None) or ""


def without_expandable_segments(settings: str) -> str:
    """Returns the settings of torch's allocator with expandable segments turned off."""
    return _SEGMENTS.sub("expandable_segments:False", settings)


def set_memory_saver_defaults(env: MutableMapping[str, str]) -> None:
    """Sets what an SGLang server needs that releases its memory. Its allocator cannot release
    expandable segments, in which trainers may well keep theirs: they are turned off for it, under
    both of torch's names, with a line in the log."""
    env.setdefault("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")  # graphs are released and kept
    # trainers hold some of the same GPUs when a server starts again
    env.setdefault("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "false")
    env.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "false")
    for name in _ALLOCATOR:
        if (fixed := without_expandable_segments(env.get(name, ""))) != env.get(name, ""):
            env[name] = fixed
            log.info("servers that release memory get %s=%s", name, env[name])


def set_threads_default(env: MutableMapping[str, str], *, processes: int) -> None:
    """Shares this host's cores among `processes` that compute at the same time: those of a kind in
    a synchronous run, where trainers and servers take turns, and all of an asynchronous one.
    """
    if processes > 1:  # one process gets them all without being told
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // processes)))


def cores(*, cgroups: Path = CGROUPS) -> int:
    """Returns how many CPU cores this process may run on, at least 1: those that its affinity and
    the quota of its container leave it."""
    count = len(os.sched_getaffinity(0))
    quota, period = (_first(cgroups / "cpu.max") + ["max", "max"])[:2]
    if quota == "max":  # not of version 2
        quota = "".join(_first(cgroups / "cpu/cpu.cfs_quota_us"))
        period = "".join(_first(cgroups / "cpu/cpu.cfs_period_us"))
    if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
        count = min(count, max(1, int(quota) // int(period)))
    return count


def memory_bytes(*, cgroups: Path = CGROUPS) -> int:
    """Returns the memory that processes may have: the machine's, or what their container leaves."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = "".join(_first(cgroups / file))
        if limit.isdecimal():
            total = min(total, int(limit))
    return total


def _first(file: Path) -> list[str]:
    """Returns the words of a file, [] where it cannot be read."""
    try:
        return file.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        return []


def set_loopback_default(env: MutableMapping[str, str], *, servers: Sequence[str] = ()) -> None:
    """Has gloo use `lo` where every peer is on this host: else it resolves the host's name, which
    containers often cannot."""
    if all(is_loopback(_host(a)) for a in servers) and has_interface("lo"):
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")


def is_loopback(host: str) -> bool:
    """Returns whether `host` is this machine's loopback, by name or number, without a look-up."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _host(address: str) -> str:
    return address.removeprefix("http://").rpartition(":")[0].strip("[]")


def machine() -> str:
    """Returns one name for each running kernel."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def is_here(address: str) -> bool:
    """Tells whether host:port is on this machine, as a loopback address is on every machine."""
    host = _host(address)
    if is_loopback(host):
        return True
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as s:
            s.bind(where)  # only addresses of this machine's interfaces can be bound
    except OSError:
        return False
    return True


def address_towards(host: str) -> str:
    """Returns this machine's address on the interface that routes to `host`. No packet is sent."""
    if is_loopback(host):
        return "127.0.0.1"
    family, kind, proto, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as s:
        s.connect(where)
        return str(s.getsockname()[0])


def free_port(host: str = "127.0.0.1", port: int = 0) -> int:
    """Returns a TCP port that was free a moment ago: `port`, or any for 0. Raises RuntimeError
    where it is taken: another server at our port would pass for ours."""
    # a server listens only when it has imported everything; until then the system would give a port
    # of its own range, which begins here, to any socket
    candidates = [port] if port else random.SystemRandom().sample(range(20000, 32768), k=20)
    for candidate in candidates:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            try:
                s.bind((host, candidate))
            except OSError as e:
                error = e
                continue
            return candidate
    raise RuntimeError(f"port {candidate} of {host} cannot be listened at: {error}") from error


def has_interface(name: str) -> bool:
    """Tells whether this machine has a network interface of this name."""
    return name in [interface for _, interface in socket.if_nameindex()]


def uses_gpus(env: Mapping[str, str], *, torch_version: str | None = None) -> bool:
    """Returns whether trainers compute on GPUs: MEGARL_DEVICE decides, else torch's build."""
    if choice := env.get("MEGARL_DEVICE"):
        return choice != "cpu"
    from importlib.metadata import version  # here, as its import takes as long as many checks

    return not (torch_version or version("torch")).endswith("+cpu")


def visible_gpus(
    env: Mapping[str, str], *, devices: Path = Path("/dev"), torch_version: str | None = None
) -> list[str]:
    """Returns names for CUDA_VISIBLE_DEVICES, none where torch would use none of the GPUs."""
    if not uses_gpus(env, torch_version=torch_version):
        return []
    if "CUDA_VISIBLE_DEVICES" in env:
        return [d for d in env["CUDA_VISIBLE_DEVICES"].split(",") if d not in ("", "-1")]
    return [str(i) for i, _ in enumerate(devices.glob("nvidia[0-9]*"))]


def collective_timeout() -> float:
    """Returns the seconds that a collective may wait for its peers."""
    return _collective_seconds


def set_collective_timeout(seconds: float) -> None:
    """Bounds the collectives of groups that are made from now on, those of torch.distributed's
    world with them."""
    global _collective_seconds
    _collective_seconds = seconds


def job_token() -> str | None:
    """Returns the job's token, None where the environment has none."""
    return os.environ.get(JOB_TOKEN) or None


def ensure_job_token() -> str:
    """Returns the job's token, the same to all threads, and puts a new one into the environment
    where there is none."""
    with _making:
        token = job_token()
        if token is None:
            token = os.environ[JOB_TOKEN] = secrets.token_hex(16)
        return token


def quiet_libraries() -> None:
    """Hides UserWarning, FutureWarning and DeprecationWarning raised in those libraries' code.

    Entry points call it, never an import: in a user's own program warnings are the user's to set.
    """
    for library in _LIBRARIES:
        for kind in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=kind, module=library)
