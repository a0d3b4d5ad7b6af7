"""Looks whether a host, or a whole cluster, is ready for a recipe.

    megarl doctor X.yaml                                        (this host)
    srun --ntasks-per-node=1 megarl doctor X.yaml               (every host of a Slurm allocation)
    torchrun --nnodes N ... -m megarl.cli doctor X.yaml         (every host)

A line for each thing: OK, WARN or FAIL, with the fix. It makes the checks of a start, but for data
and code, and looks at versions, GPUs and NCCL's environment, the file root (room, speed, and on
several hosts whether they really share it), the master's port, servers, W&B's key. It writes 128
MiB into the file root and removes them. On several hosts each writes its findings there, too, and
the first host prints them all. The exit status is 1 where something FAILs, 2 where the
configuration cannot be read.
"""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.version import Version

from megarl.cli import CommandParser
from megarl.config.errors import ConfigError
from megarl.config.recipe_engines import (
    engines,
    model_path,
    server_addresses,
    smallest_world_size,
    trained_engines,
)
from megarl.config.recipes import BaseConfig, GRPOConfig
from megarl.launcher.plan import sglang_version
from megarl.models.hf_config import language_model, parse_hf_config
from megarl.planning.job import find_shapes
from megarl.planning.memory import parameters
from megarl.trainer.preflight import check_recipe, check_tokenizer
from megarl.utils.env import free_port
from megarl.utils.files import write_whole
from megarl.utils.http import call_json

OK, WARN, FAIL = "OK", "WARN", "FAIL"
# oldest and newest version in CI, by package: those of constraints/ and the Makefile
TESTED = {
    "torch": ("2.13.0", "2.13.0"),
    "megatron-core": ("0.16.1", "0.19.2"),
    "transformers": ("5.19.0", "5.23.0"),
    "transformer-engine": ("2.2.0", "2.20.2"),
    "sglang": ("0.5.23", "0.5.23"),
}
GB = 1e9
PROBE = 128 << 20  # bytes that are written
SLOW_SAVE = 600.0  # seconds of a checkpoint that are worth a warning
SHM = 1 << 30  # bytes of shared memory that NCCL and data workers can need
CHECKPOINT = 14  # bytes of a parameter: fp32 weights and two moments, bf16 weights
MODEL = 2
HEALTH_TIMEOUT = 5.0  # seconds
STALE = 600.0  # seconds: an older file of findings is an earlier doctor's
_OFF = "a fast way between GPUs is off"
# (variable, value, what is wrong with it)
_VARIABLES = (
    ("NCCL_IB_DISABLE", "1", _OFF),
    ("NCCL_P2P_DISABLE", "1", _OFF),
    ("NCCL_SHM_DISABLE", "1", _OFF),
    ("NCCL_NET_GDR_LEVEL", "0", _OFF),
    ("NCCL_CUMEM_ENABLE", "1", "SGLang servers turn it off, and cannot open such buffers"),
)


# by the variable with the tasks of a job: two that name the job, this host's number, the number of
# hosts, the task's number on its host
_JOBS = {
    "WORLD_SIZE": "MASTER_ADDR MASTER_PORT GROUP_RANK GROUP_WORLD_SIZE LOCAL_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_JOB_ID SLURM_STEP_ID SLURM_NODEID SLURM_STEP_NUM_NODES "
    "SLURM_LOCALID",
}


@dataclass(frozen=True)
class Finding:
    """Says how one thing is: `status` OK, WARN or FAIL, what was looked at, what was found, and how
    to mend it."""

    status: str
    name: str
    text: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Host:
    """Holds what is looked at: a recipe, and the host's variables and number of GPUs. cards: a
    directory with the config.json of models that are not here."""

    cfg: BaseConfig
    env: Mapping[str, str]
    gpus: int
    cards: Path

    @property
    def rl(self) -> GRPOConfig | None:
        """Returns the recipe where it generates."""
        return self.cfg if isinstance(self.cfg, GRPOConfig) else None


def main(argv: Sequence[str] | None = None) -> int:
    """Examines what `argv` names and returns the exit status. Raises ConfigError where the
    configuration cannot be read, or the variables of a job are incomplete."""
    parser = CommandParser("doctor", __doc__)
    parser.option("wait", float, "seconds to wait for the other hosts' findings (120)", 120.0)
    args, cfg = parser.recipe(argv)
    place = this_place(os.environ)
    if place is not None and not place.speaks:
        return 0
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    host = Host(cfg=cfg, env=os.environ, gpus=gpus, cards=args.config.parent / "models")
    findings = [finding for check in CHECKS for finding in check(host)]
    root = Path(cfg.fileroot).absolute()
    if place is None:
        text = "not looked at: this is one host; under srun or torchrun every host writes there"
        findings.append(Finding(OK, "shared storage", text))
    else:
        try:
            tell(place, root, findings)
            if place.node:
                return int(any(f.status == FAIL for f in findings))
            findings = merged(gather(place, root, args.wait))
        except OSError as e:
            fix = "set fileroot to a directory that every host can write to"
            findings.append(Finding(FAIL, "shared storage", f"{root}: {e.strerror}", fix))
    _print(findings)
    return int(any(f.status == FAIL for f in findings))


def _print(findings: Sequence[Finding]) -> None:
    width = max(len(f.name) for f in findings) + 2
    for f in findings:
        print(f"{f.status:5}{f.name:{width}}{f.text}")
        if f.fix and f.status != OK:
            print(f"{'':{width + 5}}fix: {f.fix}")
    print(", ".join(f"{sum(f.status == s for f in findings)} {s}" for s in (OK, WARN, FAIL)))


# one host


def _verdict(good: bool, name: str, text: str, fix: str, *, bad: str = FAIL) -> Finding:
    return Finding(OK if good else bad, name, text, fix)


def _tried(
    name: str, good: str, check: Callable[..., Any], *args: Any, fix: str = ""
) -> Iterator[Finding]:
    """Yields `good`, or what check(*args) raises: "what is wrong; how to mend it" where no
    `fix` is given."""
    try:
        check(*args)
    except ConfigError as e:
        problems = e.problems
    except (OSError, RuntimeError, ValueError) as e:
        problems = (str(e),)
    else:
        yield Finding(OK, name, good)
        return
    for problem in problems:
        text, _, own_fix = (problem, "", fix) if fix else problem.partition("; ")
        yield Finding(FAIL, name, text, own_fix)


def recipe(host: Host) -> Iterator[Finding]:
    """Makes the checks of a start that read neither data nor code. A model of the hub that is not
    here is a warning: a start downloads it."""
    size = smallest_world_size(host.cfg)
    text = f"rules, models and run directory are sound, for {size} trainer process(es)"
    for finding in _tried("recipe", text, check_recipe, host.cfg, size):
        yield replace(finding, status=WARN) if finding.fix.startswith("download") else finding
    yield from _tried("tokenizer", "its files are here", check_tokenizer, host.cfg)


def versions(host: Host) -> Iterator[Finding]:
    """Compares installed packages with the versions that megarl's tests use."""
    installed = {name: _installed(name) for name in ("torch", "megatron-core", "transformers")}
    if host.gpus:
        installed["transformer-engine"] = _installed("transformer-engine")
    if host.rl and host.rl.server.type == "sglang" and host.rl.server.count:
        installed["sglang"] = sglang_version(host.rl.server.python or sys.executable)
    for name, number in installed.items():
        low, high = TESTED[name]
        if number is None:
            fix = f"pip install {name}=={high}"
            if name == "sglang":
                fix += ", or name an interpreter that has it (server.python)"
            absent = WARN if name == "transformer-engine" else FAIL  # torch's attention does, too
            yield Finding(absent, name, "not installed", fix)
            continue
        tested = Version(low).release <= Version(number).release <= Version(high).release
        fix = "where something fails, try a version of the tests that its neighbours allow"
        yield _verdict(tested, name, f"{number}; tests run with {low} to {high}", fix, bad=WARN)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def environment(host: Host) -> Iterator[Finding]:
    """Looks at GPUs, and at variables of NCCL and CUDA."""
    yield _gpus(host)
    warnings = list(_nccl_warnings(host))
    yield from warnings
    if not warnings:
        shown = " ".join(f"{k}={v}" for k, v in sorted(host.env.items()) if k.startswith("NCCL_"))
        yield Finding(OK, "NCCL", shown or "no variable is set")


def _gpus(host: Host) -> Finding:
    if host.env.get("MEGARL_DEVICE") == "cpu" or not host.gpus:
        sglang = host.rl is not None and host.rl.server.type == "sglang"
        fix = "run megarl doctor on the cluster's hosts: srun --ntasks-per-node=1 megarl doctor ..."
        text = "none, or MEGARL_DEVICE=cpu; training runs on the CPU"
        return _verdict(not sglang, "GPUs", text, fix, bad=WARN)
    need = smallest_world_size(host.cfg)
    text = f"{host.gpus} here; the layouts take a multiple of {need} trainer ranks"
    visible = host.env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and len([d for d in visible.split(",") if d]) < host.gpus:
        fix = "unset CUDA_VISIBLE_DEVICES where the job should have all of them"
        return Finding(WARN, "GPUs", f"{text}; CUDA_VISIBLE_DEVICES={visible} hides some", fix)
    return Finding(OK, "GPUs", text)


def _nccl_warnings(host: Host) -> Iterator[Finding]:
    env = host.env
    for name, value, why in _VARIABLES:
        if env.get(name) == value:
            yield Finding(WARN, "NCCL", f"{name}={value}: {why}", f"unset {name}")
    interface = env.get("NCCL_SOCKET_IFNAME", "^").removeprefix("=").split(",")[0]
    names = [name for _, name in socket.if_nameindex()]
    if interface[:1] != "^" and not any(name.startswith(interface) for name in names):
        text = f"NCCL_SOCKET_IFNAME={interface}: this host has {', '.join(names)}"
        yield Finding(WARN, "NCCL", text, "name an interface that every host has")
    connections = env.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if connections != "1" and any(e.parallel.tp > 1 for e in engines(host.cfg).values()):
        text = f"CUDA_DEVICE_MAX_CONNECTIONS={connections}: tensor parallelism overlaps with 1 only"
        yield Finding(WARN, "NCCL", text, "unset it")


def files(host: Host) -> Iterator[Finding]:
    """Looks at shared memory, and at the file root: whether it can be written to, its room and its
    speed."""
    if Path("/dev/shm").is_dir():  # NCCL and loaders use it inside a host
        size = shutil.disk_usage("/dev/shm").total
        fix = "give the container more: --shm-size=16g, or --ipc=host"
        text = f"{size / GB:.1f} GB in /dev/shm"
        yield _verdict(size >= SHM, "shared memory", text, fix, bad=WARN)
    cfg, root = host.cfg, Path(host.cfg.fileroot).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
        rate = _write_rate(root)
    except OSError as e:
        fix = "make room there, or set another fileroot"
        yield Finding(FAIL, "file root", f"{root} cannot be written to: {e}", fix)
        return
    yield Finding(OK, "file root", f"{root} can be written to")
    try:
        shapes = [find_shapes(model_path(cfg, n), host.cards) for n in trained_engines(cfg)]
        trained = [parse_hf_config(language_model(raw), "model") for raw in shapes]
    except ValueError:
        yield Finding(WARN, "disk space", "not known: the model's shapes are not here", "see model")
        return
    numel = sum(parameters(model)[0] for model in trained)
    # what is kept, and one in the making
    checkpoints = (cfg.recover.keep_last + 1) * CHECKPOINT if cfg.recover.mode == "auto" else 0
    saves = (cfg.saver.keep_last + cfg.saver.keep_best + 2) * MODEL
    need, free = (checkpoints + saves) * numel, shutil.disk_usage(root).free
    text = f"{free / GB:,.0f} GB free, {need / GB:,.0f} GB needed for what the recipe keeps"
    fix = "make room, lower recover.keep_last or saver.keep_last, or set another fileroot"
    yield _verdict(free >= need, "disk space", text, fix)
    seconds = CHECKPOINT * numel / rate
    text = f"{rate / GB:.2f} GB/s by one process: {seconds:,.0f} s for a checkpoint at most"
    fix = "ranks write side by side, so look at the storage's whole bandwidth; raise "
    fix += "recover.freq_secs, keep recover.async_save=true"
    yield _verdict(seconds <= SLOW_SAVE, "disk speed", text, fix, bad=WARN)


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


def services(host: Host) -> Iterator[Finding]:
    """Looks at the master's port, at servers that run, and at W&B's key."""
    port, env = host.env.get("MASTER_PORT", ""), host.env
    if port.isdecimal() and "TORCHELASTIC_RUN_ID" not in env and env.get("RANK", "0") == "0":
        fix = "set MASTER_PORT to a free one, the same on every host"
        yield from _tried("master port", f"{port} is free", free_port, "", int(port), fix=fix)
    fix = "start it, open the port between the hosts, or mend rollout.addresses"
    addresses: list[str] = []
    if host.rl:
        with contextlib.suppress(OSError):  # `recipe` says that the file of addresses is missing
            addresses = server_addresses(host.rl.rollout)
    for address in addresses:
        ask = partial(call_json, "GET", address, "/health", timeout=HEALTH_TIMEOUT)
        yield from _tried(f"server {address}", "is healthy", ask, fix=fix)
    if host.cfg.stats_logger.wandb.get("mode") == "online":
        try:
            login = netrc.netrc().authenticators("api.wandb.ai")
        except (OSError, netrc.NetrcParseError):
            login = None
        fix = "export WANDB_API_KEY on every host, or set stats_logger.wandb.mode=offline"
        key = bool(env.get("WANDB_API_KEY") or login)
        yield _verdict(key, "W&B", "a key is set" if key else "online, and there is no key", fix)


CHECKS = (recipe, versions, environment, files, services)


# several hosts: each writes below the file root, and the first one reads it all


@dataclass(frozen=True, kw_only=True)
class Place:
    """Says which of a job's `hosts` hosts this process is on. job: what tells the job from others.
    speaks: true of one process of each host."""

    job: str
    node: int
    hosts: int
    speaks: bool


def this_place(env: Mapping[str, str]) -> Place | None:
    """Returns this process's place among several hosts, from torchrun's variables or srun's; None
    where it is alone. Raises ConfigError for variables that are incomplete."""
    for tasks, text in _JOBS.items():
        if int(env.get(tasks, "1")) == 1:
            continue
        names = text.split()
        if missing := [name for name in names if name not in env]:
            why = f"{tasks} is set and {', '.join(missing)} is not"
            raise ConfigError(f"{why}: use torchrun or srun")
        first, second, node, hosts, local = (env[name] for name in names)
        job = f"{first}-{second}"
        return Place(job=job, node=int(node), hosts=int(hosts), speaks=local == "0")
    return None


def tell(place: Place, root: Path, findings: Sequence[Finding]) -> None:
    """Writes this host's findings where the first host reads them. Raises OSError."""
    folder = _folder(place, root)
    folder.mkdir(parents=True, exist_ok=True)
    about = {"host": socket.gethostname(), "findings": [asdict(f) for f in findings]}
    write_whole(folder / f"{place.node}.json", json.dumps(about))


def gather(place: Place, root: Path, wait: float) -> list[tuple[str, list[Finding]]]:
    """Returns the findings of all hosts by their names, and removes the files. Waits `wait` seconds
    at most; a finding of the first host says which hosts did not come. Raises OSError."""
    folder, deadline = _folder(place, root), time.monotonic() + wait
    files = [folder / f"{node}.json" for node in range(place.hosts)]
    oldest = files[place.node].stat().st_mtime - STALE  # by the storage's own clock
    while True:
        absent = [f for f in files if not f.exists() or f.stat().st_mtime < oldest]
        if not absent or time.monotonic() >= deadline:
            break
        time.sleep(0.2)
    by_host: list[tuple[str, list[Finding]]] = []
    for file in (f for f in files if f not in absent):
        about = json.loads(file.read_text(encoding="utf-8"))
        by_host.append((about["host"], [Finding(**f) for f in about["findings"]]))
    shutil.rmtree(folder, ignore_errors=True)
    text, fix = f"{root}: {place.hosts} hosts wrote their findings", ""
    if absent:
        names = ", ".join(f"host {f.stem}" for f in absent)
        text = f"{root} on {by_host[0][0]}, host 0, got no findings of {names} within {wait:g} s"
        fix = "set fileroot to a directory that every host mounts at this path, see whether the "
        fix += "doctor started there, or raise --wait"
    by_host[0][1].append(_verdict(not absent, "shared storage", text, fix))
    return by_host


def _folder(place: Place, root: Path) -> Path:
    return root / f".megarl_doctor_{re.sub(r'[^a-zA-Z0-9.]+', '-', place.job)}"


def merged(by_host: Sequence[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """Returns the findings of all hosts in the order of the first, equal ones once; one that not
    all hosts share names its hosts."""
    hosts: dict[Finding, list[str]] = {}
    for host, findings in by_host:
        for finding in findings:
            hosts.setdefault(finding, []).append(host)
    order = {name: i for i, name in enumerate(dict.fromkeys(f.name for f in hosts))}
    shown = []
    for finding, names in hosts.items():
        where = "" if len(names) == len(by_host) else f"{', '.join(dict.fromkeys(names))}: "
        shown.append(replace(finding, text=where + finding.text))
    return sorted(shown, key=lambda f: order[f.name])
