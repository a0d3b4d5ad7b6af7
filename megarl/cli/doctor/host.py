"""Looks at one host: files, ports, credentials, environment."""

from __future__ import annotations

import netrc
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.cli.doctor.peers import FAIL, OK, WARN, Finding
from megarl.config.check_data import looks_like_hub_name
from megarl.config.recipe_engines import engines, model_path, smallest_world_size, trained_engines
from megarl.config.recipes import BaseConfig, GRPOConfig, sources
from megarl.config.servers import server_addresses
from megarl.models.hf_config import parse_hf_config
from megarl.models.value_model import language_model
from megarl.planning.memory import parameters
from megarl.planning.shapes import find_shapes
from megarl.utils.env import attention_problems, free_port
from megarl.utils.http import HttpError, call_json, split_address

GB = 1e9
PROBE = 128 << 20  # bytes that are written and read
SLOW_SAVE = 600.0  # seconds of a checkpoint that are worth a warning
SHM = 1 << 30  # bytes of shared memory that NCCL and data workers can need
CHECKPOINT = 14  # bytes of a parameter: fp32 weights and two moments, bf16 weights
MODEL = 2
HEALTH_TIMEOUT = 5.0  # seconds


def gpus_here() -> int:
    """Returns the number of GPUs of this host."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


# files


def place_findings(cfg: BaseConfig, cards: Path) -> Iterator[Finding]:
    """Yields findings about the file root: whether it can be written to, its room and its speed."""
    name, root = "file root", Path(cfg.fileroot).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
        rate = _write_rate(root)
    except OSError as e:
        fix = "make room there, or set another fileroot"
        yield Finding(FAIL, name, f"{root} cannot be written to: {e}", fix)
        return
    yield Finding(OK, name, f"{root} can be written to")
    numel = _trained_parameters(cfg, cards)
    if numel is None:
        yield Finding(WARN, "disk space", "not known: the model's shapes are not here", "see model")
        return
    yield _space(cfg, root, numel)
    seconds = CHECKPOINT * numel / rate
    said = f"{rate / GB:.2f} GB/s by one process: a checkpoint of {CHECKPOINT * numel / GB:,.1f} GB"
    if seconds <= SLOW_SAVE:
        yield Finding(OK, "disk speed", f"{said} takes {seconds:,.0f} s at most")
        return
    yield Finding(
        WARN,
        "disk speed",
        f"{said} takes up to {seconds:,.0f} s",
        "ranks write side by side, so look at the storage's whole bandwidth; raise "
        "recover.freq_secs, keep recover.async_save=true",
    )


def _space(cfg: BaseConfig, root: Path, numel: int) -> Finding:
    """Compares the room with the checkpoints and models that are kept, and one in the making."""
    checkpoints = (cfg.recover.keep_last + 1) * CHECKPOINT if cfg.recover.mode == "auto" else 0
    models = (cfg.saver.keep_last + cfg.saver.keep_best + 2) * MODEL
    need, free = (checkpoints + models) * numel, shutil.disk_usage(root).free
    text = f"{free / GB:,.0f} GB free, {need / GB:,.0f} GB needed for what the recipe keeps"
    if free >= need:
        return Finding(OK, "disk space", text)
    fix = "make room, lower recover.keep_last or saver.keep_last, or set another fileroot"
    return Finding(FAIL, "disk space", text, fix)


def _write_rate(root: Path) -> float:
    """Returns the bytes/s that one process writes, to the disk and not just to memory."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=root) as file:
        begun = time.monotonic()
        for _ in range(PROBE // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return PROBE / (time.monotonic() - begun)


def _trained_parameters(cfg: BaseConfig, cards: Path) -> int | None:
    total = 0
    for name in trained_engines(cfg):
        try:
            raw = find_shapes(model_path(cfg, name), cards)
            total += parameters(parse_hf_config(language_model(raw), name))[0]
        except ValueError:
            return None
    return total


def memory_findings() -> Iterator[Finding]:
    """Yields a finding about shared memory, which NCCL and loaders use inside a host."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return
    size = shutil.disk_usage(shm).total
    text = f"{size / GB:.1f} GB in /dev/shm"
    fix = "give the container more: --shm-size=16g, or --ipc=host"
    status = OK if size >= SHM else WARN
    yield Finding(status, "shared memory", text, fix)


# ports


def port_findings(cfg: BaseConfig, env: Mapping[str, str]) -> Iterator[Finding]:
    """Yields findings about the ports of the job: servers', the master's, running servers'."""
    servers = cfg.server.count if isinstance(cfg, GRPOConfig) else 0
    try:
        for _ in range(min(servers, 8) + 1):
            free_port()
        yield Finding(OK, "ports", "ports from 20000 to 32767 can be listened at")
    except RuntimeError as e:
        fix = "end what listens there (ss -ltnp), or ask the administrator"
        yield Finding(FAIL, "ports", str(e), fix)
    port = env.get("MASTER_PORT", "")
    if port.isdecimal() and "TORCHELASTIC_RUN_ID" not in env and env.get("RANK", "0") == "0":
        yield _master_port(int(port))
    addresses = server_addresses(cfg.rollout) if isinstance(cfg, GRPOConfig) else []
    for address in addresses:
        yield _server(address)


def _master_port(port: int) -> Finding:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port))
        except OSError as e:
            fix = "set MASTER_PORT to a free one, the same on every host"
            return Finding(FAIL, "master port", f"MASTER_PORT={port}: {e}", fix)
    return Finding(OK, "master port", f"MASTER_PORT={port} is free")


def _server(address: str) -> Finding:
    name = f"server {address}"
    try:
        split_address(address)
        call_json("GET", address, "/health", timeout=HEALTH_TIMEOUT)
    except (HttpError, OSError, ValueError) as e:
        fix = "start it, open the port between the hosts, or mend rollout.addresses"
        return Finding(FAIL, name, f"does not answer /health: {e}", fix)
    return Finding(OK, name, "is healthy")


# credentials


def credential_findings(cfg: BaseConfig, env: Mapping[str, str]) -> Iterator[Finding]:
    """Yields findings about accounts elsewhere that the recipe needs: W&B's and the hub's."""
    if cfg.stats_logger.wandb.mode == "online":
        yield _wandb(env)
    wanted = {n: model_path(cfg, n) for n in engines(cfg) if _is_hub_name(model_path(cfg, n))}
    for data in sources(cfg).values():
        if data.path and _is_hub_name(data.path):
            wanted.setdefault(data.path, data.path)
    for path in dict.fromkeys(wanted.values()):
        yield _hub(path, env)


def _is_hub_name(path: str) -> bool:
    return "/" in path and not Path(path).exists() and looks_like_hub_name(path)


def _wandb(env: Mapping[str, str]) -> Finding:
    if env.get("WANDB_API_KEY"):
        return Finding(OK, "W&B", "WANDB_API_KEY is set")
    try:
        if netrc.netrc().authenticators("api.wandb.ai"):
            return Finding(OK, "W&B", "~/.netrc has a login")
    except (OSError, netrc.NetrcParseError):
        pass  # the same as none
    fix = "export WANDB_API_KEY on every host, or set stats_logger.wandb.mode=offline"
    return Finding(FAIL, "W&B", "stats_logger.wandb.mode=online and no key", fix)


def _hub(path: str, env: Mapping[str, str]) -> Finding:
    from huggingface_hub import get_token, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    name = f"hub {path}"
    try:
        cached = any(repo.repo_id == path for repo in scan_cache_dir().repos)
    except CacheNotFound:
        cached = False
    if cached:
        return Finding(OK, name, "is in the cache")
    fix = f"hf download {path} on storage that all hosts share (HF_HOME), and name its directory"
    if env.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return Finding(FAIL, name, "not in the cache, and HF_HUB_OFFLINE is set", fix)
    if get_token() is None:
        text = "is to be downloaded, without a token: enough for public files alone"
        return Finding(WARN, name, text, f"export HF_TOKEN, or {fix}")
    return Finding(OK, name, "is to be downloaded at the start, with a token")


# environment


def environment_findings(cfg: BaseConfig, env: Mapping[str, str], gpus: int) -> Iterator[Finding]:
    """Yields findings about GPUs and about variables of NCCL, Transformer Engine and CUDA."""
    yield _gpus(cfg, env, gpus)
    for problem in attention_problems(env):
        yield Finding(FAIL, "Transformer Engine", problem, "unset it")
    found = [Finding(WARN, "NCCL", *pair) for pair in _nccl_warnings(cfg, env)]
    shown = " ".join(f"{k}={v}" for k, v in sorted(env.items()) if k.startswith("NCCL_"))
    yield from found or [Finding(OK, "NCCL", shown or "no variable is set")]


def _gpus(cfg: BaseConfig, env: Mapping[str, str], gpus: int) -> Finding:
    need = smallest_world_size(cfg)
    if env.get("MEGARL_DEVICE") == "cpu" or not gpus:
        why = "MEGARL_DEVICE=cpu" if env.get("MEGARL_DEVICE") == "cpu" else "this host has none"
        sglang = isinstance(cfg, GRPOConfig) and cfg.server.type == "sglang"
        fix = "run megarl doctor on the cluster's hosts: srun --ntasks-per-node=1 megarl doctor ..."
        return Finding(WARN if sglang else OK, "GPUs", f"{why}; training runs on the CPU", fix)
    text = f"{gpus} here; the layouts take a multiple of {need} trainer ranks"
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and len([d for d in visible.split(",") if d]) < gpus:
        fix = "unset CUDA_VISIBLE_DEVICES where the job should have all of them"
        return Finding(WARN, "GPUs", f"{text}; CUDA_VISIBLE_DEVICES={visible} hides some", fix)
    return Finding(OK, "GPUs", text)


def _nccl_warnings(cfg: BaseConfig, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields (what is unusual, the fix)."""
    slow = {
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NET_GDR_LEVEL": "0",
    }
    for name, value in slow.items():
        if env.get(name) == value:
            yield f"{name}={value}: a fast way between GPUs is off", f"unset {name}"
    if env.get("NCCL_CUMEM_ENABLE", "0") != "0":
        text = "NCCL_CUMEM_ENABLE=1: SGLang servers turn it off, and cannot open such buffers"
        yield text, "unset it, or set it for trainers and servers alike"
    interface = env.get("NCCL_SOCKET_IFNAME", "").lstrip("^=").split(",")[0]
    names = [name for _, name in socket.if_nameindex()]
    excluded = env.get("NCCL_SOCKET_IFNAME", "").startswith("^")
    if interface and not excluded and not any(n.startswith(interface) for n in names):
        text = f"NCCL_SOCKET_IFNAME={interface}: this host has {', '.join(names)}"
        yield text, "name an interface that every host has"
    connections = env.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if connections != "1" and any(e.parallel.tp > 1 for e in engines(cfg).values()):
        text = f"CUDA_DEVICE_MAX_CONNECTIONS={connections}: tensor parallelism overlaps with 1 only"
        yield text, "unset it"
