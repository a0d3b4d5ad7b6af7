"""Gives processes on other machines their environment, and finds where others reach this one."""

from __future__ import annotations

import fcntl
import fnmatch
import ipaddress
import json
import os
import socket
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

from megarl.config.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]
LOOPBACK = "127.0.0.1"
Resources = dict[str, float]
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
# what processes of a cluster get of the environment that a job is started from
FORWARDED = """
PATH LD_LIBRARY_PATH PYTHONPATH VIRTUAL_ENV HOME USER LANG LC_* TMPDIR MEGARL_* OMP_* MKL_*
CUDA_HOME CUDA_DEVICE_* CUDA_LAUNCH_* NCCL_* GLOO_* NVTE_* TORCH_* PYTORCH_* TRITON_* SGLANG_*
HF_* HUGGING_FACE_* TRANSFORMERS_* TOKENIZERS_* WANDB_* UCX_* FI_* *_proxy *_PROXY SSL_CERT_*
REQUESTS_CA_BUNDLE
"""
# what a process keeps of its scheduler's environment
_KEPT = (
    "SLURM*",
    "PMI*",
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "NVIDIA_*",
    "PATH",
    "HOME",
    "USER",
    "TMPDIR",
    "RAY_*",
    "KUBERNETES_*",
)


def forwarded(env: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """Returns the variables of `env` that processes on a cluster get; `more` are further names or
    patterns."""
    patterns = (*FORWARDED.split(), *more)
    return {k: env[k] for k in sorted(env) if any(fnmatch.fnmatchcase(k, p) for p in patterns)}


def write_environment(path: Path, env: Mapping[str, str]) -> None:
    """Writes variables, the job's token among them, for the user's eyes only."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as f:
        json.dump(dict(env), f, indent=1)


def take_environment(path: Path) -> None:
    """Makes the variables of the JSON file `path` this process's environment, with those that its
    scheduler set."""
    given = json.loads(path.read_text(encoding="utf-8"))
    for name in list(os.environ):
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in _KEPT):
            del os.environ[name]
    os.environ.update(given)


def node_address(interface: str = "") -> str:
    """Returns the IPv4 address at which other nodes reach this one: that of the interface, else of
    the host's name, else of the route to elsewhere. Raises ConfigError where there is none."""
    if interface:
        return _interface_address(interface)
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = LOOPBACK
    if ipaddress.ip_address(address).is_loopback:  # as /etc/hosts often has it
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            try:
                s.connect(("192.0.2.1", 9))  # nothing is sent; the system chooses the interface
            except OSError as e:
                raise ConfigError(
                    ["this node has no address that others reach: name its cluster.interface"]
                ) from e
            address = s.getsockname()[0]
    return address


def _interface_address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(s.fileno(), _GET_ADDRESS, request)
        except OSError as e:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                [f"cluster.interface={interface}: no IPv4 address here; there are {known}"]
            ) from e
    return socket.inet_ntoa(answer[20:24])


def described(resources: Resources) -> str:
    """Returns resources as text, like GPU 8, CPU 1."""
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items())
