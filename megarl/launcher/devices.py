"""Which GPUs of this host the trainers get and which the servers. Found without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from megarl.config.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Values of CUDA_VISIBLE_DEVICES, None where there are no GPUs. `shared`: they overlap."""

    trainers: str | None
    servers: tuple[str | None, ...]
    shared: bool = False


def visible_gpus(
    env: Mapping[str, str], *, devices: Path = Path("/dev"), torch_version: str | None = None
) -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES; empty where torch would use none of them."""
    if env.get("MEGARL_DEVICE") == "cpu" or (torch_version or version("torch")).endswith("+cpu"):
        return []
    if "CUDA_VISIBLE_DEVICES" in env:
        return [d for d in env["CUDA_VISIBLE_DEVICES"].split(",") if d not in ("", "-1")]
    return [str(i) for i, _ in enumerate(devices.glob("nvidia[0-9]*"))]


def share_out(gpus: Sequence[str], *, trainers: int, servers: int, server_tp: int) -> Devices:
    """The first GPUs to the trainers, `server_tp` further ones to each server.

    Where there are too few for both, servers go round the trainers' GPUs.
    """
    if not gpus:
        return Devices(trainers=None, servers=(None,) * servers)
    if trainers > len(gpus):
        raise ConfigError(
            [f"{trainers} trainer processes need as many GPUs and {len(gpus)} are visible"]
        )
    if server_tp > len(gpus):
        raise ConfigError([f"server.tp={server_tp}: {len(gpus)} GPUs are visible"])
    shared = trainers + servers * server_tp > len(gpus)
    first = [trainers + i * server_tp for i in range(servers)]
    return Devices(
        trainers=",".join(gpus[:trainers]),
        servers=tuple(
            ",".join(gpus[(start + j) % len(gpus)] for j in range(server_tp)) for start in first
        ),
        shared=shared,
    )
