"""Looks at one host: the configuration, its models, versions, files, ports, accounts."""

from __future__ import annotations

import netrc
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from megarl.config.check import check_config
from megarl.config.check_data import looks_like_hub_name
from megarl.config.earlier_run import check_run_dir
from megarl.config.errors import ConfigError
from megarl.config.recipe_engines import engines, model_path, smallest_world_size, trained_engines
from megarl.config.recipes import BaseConfig, GRPOConfig, sources
from megarl.config.servers import server_addresses
from megarl.models.hf_config import check_layout, parse_hf_config
from megarl.models.value_model import language_model
from megarl.planning.memory import parameters
from megarl.planning.shapes import find_shapes
from megarl.trainer.named import check_tokenizer
from megarl.trainer.preflight import check_models
from megarl.utils.env import attention_problems, free_port
from megarl.utils.http import HttpError, call_json, split_address

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
TIMEOUT = 60.0  # seconds another interpreter may take to name a version
HEALTH_TIMEOUT = 5.0  # seconds
_ABSENT = ("no such directory", "no such file")  # words of problems that `model` reports
_OFF = "a fast way between GPUs is off"
# (variable, value, what is wrong with it)
_VARIABLES = (
    ("NCCL_IB_DISABLE", "1", _OFF),
    ("NCCL_P2P_DISABLE", "1", _OFF),
    ("NCCL_SHM_DISABLE", "1", _OFF),
    ("NCCL_NET_GDR_LEVEL", "0", _OFF),
    ("NCCL_CUMEM_ENABLE", "1", "SGLang servers turn it off, and cannot open such buffers"),
)


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


def this_host(cfg: BaseConfig, cards: Path) -> Host:
    """Returns this host for a recipe."""
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return Host(cfg=cfg, env=os.environ, gpus=gpus, cards=cards)


def findings(host: Host) -> Iterator[Finding]:
    """Yields what there is to say about a host."""
    for check in CHECKS:
        yield from check(host)


def _verdict(good: bool, name: str, text: str, fix: str, *, bad: str = FAIL) -> Finding:
    return Finding(OK if good else bad, name, text, fix)


def _problem(name: str, text: str) -> Finding:
    """Returns the finding of an error "what is wrong; how to mend it"."""
    what, _, fix = text.partition("; ")
    return Finding(FAIL, name, what, fix)


# configuration and models


def configuration(host: Host) -> Iterator[Finding]:
    """Looks for problems of the configuration itself and of its run directory."""
    problems: list[str] = []
    for check in (check_config, check_run_dir):
        try:
            check(host.cfg)
        except ConfigError as e:
            problems += [p for p in e.problems if not any(words in p for words in _ABSENT)]
    yield from (_problem("configuration", problem) for problem in problems)
    if not problems:
        yield Finding(OK, "configuration", "is sound")


def models(host: Host) -> Iterator[Finding]:
    """Looks whether models are here, fit their layouts and have room for every token of their
    tokenizer."""
    paths = {name: model_path(host.cfg, name) for name in engines(host.cfg)}
    for name, path in paths.items():
        try:
            m = parse_hf_config(language_model(find_shapes(path, host.cards)), path)
            check_layout(m, engines(host.cfg)[name].parallel)
        except ValueError as e:
            yield _problem(f"{name} layout", str(e))
        else:
            text = f"{m.family} with {m.num_layers} layers fits its layout"
            yield Finding(OK, f"{name} layout", text)
    absent = {path for path in paths.values() if not Path(path).is_dir()}
    for path in sorted(absent):
        text = f"{path} is not a directory here, so its tokenizer was not looked at"
        fix = f"hf download {path} --local-dir DIR on storage that all hosts share, and name DIR"
        yield Finding(WARN if "/" in path else FAIL, "model", text, fix)
    if absent:
        return
    try:
        check_models(host.cfg)
        check_tokenizer(host.cfg)
    except ConfigError as e:
        yield from (_problem("tokenizer and model", problem) for problem in e.problems)
    else:
        text = "every token has its row in the models' vocabularies"
        yield Finding(OK, "tokenizer and model", text)


# versions


def versions(host: Host) -> Iterator[Finding]:
    """Compares packages with what megarl needs and with what its tests run with."""
    for name in ("torch", "megatron-core", "transformers"):
        yield _version(name, _installed(name))
    if host.gpus and (installed := _installed("transformer-engine")):
        yield _version("transformer-engine", installed)
    elif host.gpus:
        text = "not installed: attention is torch's, and there is no FP8"
        fix = "pip install --no-build-isolation 'transformer_engine[pytorch]', against this torch"
        yield Finding(WARN, "transformer-engine", text, fix)
    if host.rl and host.rl.server.type == "sglang" and host.rl.server.count:
        python = host.rl.server.python
        yield _version("sglang", _sglang_of(python) if python else _installed("sglang"))


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _sglang_of(python: str) -> str | None:
    """Returns the version of SGLang that another interpreter has."""
    code = "from importlib.metadata import version; print(version('sglang'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _version(name: str, installed: str | None) -> Finding:
    low, high = TESTED[name]
    if installed is None:
        fix = f"pip install {name}=={high}, or name an interpreter that has it (server.python)"
        return Finding(FAIL, name, "not installed", fix)
    # what megarl's own installation asks for, where it is no mere directory on the path
    requirements = map(Requirement, requires("megarl") or () if _installed("megarl") else ())
    needed = next((r for r in requirements if r.name == name and not r.marker), Requirement(name))
    if not needed.specifier.contains(installed):
        return Finding(FAIL, name, f"{installed}: megarl needs {needed}", f"pip install '{needed}'")
    tested = Version(low).release <= Version(installed).release <= Version(high).release
    fix = f"where something fails, take {name}=={high} and say so in an issue"
    return _verdict(tested, name, f"{installed}; tests run with {low} to {high}", fix, bad=WARN)


# environment


def environment(host: Host) -> Iterator[Finding]:
    """Looks at GPUs, and at variables of NCCL, Transformer Engine and CUDA."""
    yield _gpus(host)
    for problem in attention_problems(host.env):
        yield Finding(FAIL, "Transformer Engine", problem, "unset it")
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


# files


def shared_memory(host: Host) -> Iterator[Finding]:
    """Looks at shared memory, which NCCL and loaders use inside a host."""
    if Path("/dev/shm").is_dir():
        size = shutil.disk_usage("/dev/shm").total
        fix = "give the container more: --shm-size=16g, or --ipc=host"
        text = f"{size / GB:.1f} GB in /dev/shm"
        yield _verdict(size >= SHM, "shared memory", text, fix, bad=WARN)


def file_root(host: Host) -> Iterator[Finding]:
    """Looks whether the file root can be written to, at its room and its speed."""
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
        shapes = {n: find_shapes(model_path(cfg, n), host.cards) for n in trained_engines(cfg)}
        trained = [parse_hf_config(language_model(raw), n) for n, raw in shapes.items()]
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
    size = CHECKPOINT * numel
    text = f"{rate / GB:.2f} GB/s by one process: {size / rate:,.0f} s for a checkpoint at most"
    fix = "ranks write side by side, so look at the storage's whole bandwidth; raise "
    fix += "recover.freq_secs, keep recover.async_save=true"
    yield _verdict(size / rate <= SLOW_SAVE, "disk speed", text, fix, bad=WARN)


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


# ports and servers


def ports(host: Host) -> Iterator[Finding]:
    """Looks at the ports of the job: servers', the master's, and at servers that run."""
    try:
        for _ in range(min(host.rl.server.count if host.rl else 0, 8) + 1):
            free_port()
        yield Finding(OK, "ports", "ports from 20000 to 32767 can be listened at")
    except RuntimeError as e:
        fix = "end what listens there (ss -ltnp), or ask the administrator"
        yield Finding(FAIL, "ports", str(e), fix)
    port, env = host.env.get("MASTER_PORT", ""), host.env
    if port.isdecimal() and "TORCHELASTIC_RUN_ID" not in env and env.get("RANK", "0") == "0":
        yield _master_port(int(port))
    for address in server_addresses(host.rl.rollout) if host.rl else []:
        yield _server(address)


def _master_port(port: int) -> Finding:
    text = f"MASTER_PORT={port}"
    try:
        free_port("", port)
    except RuntimeError as e:
        fix = "set MASTER_PORT to a free one, the same on every host"
        return Finding(FAIL, "master port", f"{text}: {e}", fix)
    return Finding(OK, "master port", f"{text} is free")


def _server(address: str) -> Finding:
    name = f"server {address}"
    try:
        split_address(address)
        call_json("GET", address, "/health", timeout=HEALTH_TIMEOUT)
    except (HttpError, OSError, ValueError) as e:
        fix = "start it, open the port between the hosts, or mend rollout.addresses"
        return Finding(FAIL, name, f"does not answer /health: {e}", fix)
    return Finding(OK, name, "is healthy")


# accounts


def accounts(host: Host) -> Iterator[Finding]:
    """Looks at accounts elsewhere that the recipe needs: W&B's and the hub's."""
    if host.cfg.stats_logger.wandb.mode == "online":
        yield _wandb(host.env)
    paths = [model_path(host.cfg, name) for name in engines(host.cfg)]
    paths += [data.path for data in sources(host.cfg).values()]
    for path in dict.fromkeys(paths):
        if "/" in path and not Path(path).exists() and looks_like_hub_name(path):
            yield _hub(path, host.env)


def _wandb(env: Mapping[str, str]) -> Finding:
    try:
        login = netrc.netrc().authenticators("api.wandb.ai")
    except (OSError, netrc.NetrcParseError):
        login = None
    fix = "export WANDB_API_KEY on every host, or set stats_logger.wandb.mode=offline"
    key = bool(env.get("WANDB_API_KEY") or login)
    return _verdict(key, "W&B", "a key is set" if key else "online, and there is no key", fix)


def _hub(path: str, env: Mapping[str, str]) -> Finding:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cached = any(repo.repo_id == path for repo in scan_cache_dir().repos)
    except CacheNotFound:
        cached = False
    offline = env.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    text = "not in the cache, and HF_HUB_OFFLINE is set" if offline else "will be downloaded"
    fix = f"hf download {path} on storage that all hosts share (HF_HOME), and name its directory; "
    fix += "HF_TOKEN is needed where it is not public"
    text = "is in the cache" if cached else text
    return _verdict(cached, f"hub {path}", text, fix, bad=FAIL if offline else WARN)


CHECKS = (configuration, models, versions, environment, shared_memory, file_root, ports, accounts)
