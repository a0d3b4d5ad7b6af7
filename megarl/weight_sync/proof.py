"""Remembers with what slices over NCCL have passed, in a file for each machine.

`benchmarks/first_day.py slices` writes it, and `weight_sync.options.sharded=auto` sends slices over
NCCL where all that it names is still the same.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

DRIVER = Path("/proc/driver/nvidia/version")


def proof_file() -> Path:
    """Returns where this machine's proof is, or would be."""
    # pathlib would refuse a user without a home, as containers have
    cache = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(cache, "megarl", f"slices_over_nccl_{platform.node()}.json")


def write_proof(device: torch.device, server: str) -> Path:
    """Notes that slices have passed here, and returns where. server: the version that the server
    gives, SGLang's or megarl's."""
    file = proof_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(_facts(device, server), indent=1) + "\n")
    return file


def why_unproved(device: torch.device, servers: Iterable[str]) -> str:
    """Returns why slices are not known to pass from this device to servers of these versions, ""
    where they are."""
    proved = dict[str, str]()
    with suppress(OSError, ValueError, TypeError):  # also one that is half written
        proved |= json.loads(proof_file().read_text())
    for server in servers:
        for name, here in _facts(device, server).items():
            if proved.get(name) != here:
                what = f"slices over NCCL have not passed on {platform.node()} with {name} {here}"
                has = f"{proof_file()} has {proved.get(name)}"
                return f"{what} ({has}); `python benchmarks/first_day.py slices` tries them"
    return ""


def _facts(device: torch.device, server: str) -> dict[str, str]:
    """Returns what a proof holds for: of all of them, another value is another machine."""
    facts = {"card": "none", "driver": "none", "NCCL": "none"}
    if device.type == "cuda":
        facts["card"] = torch.cuda.get_device_name(device)
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    with suppress(OSError):
        facts["driver"] = DRIVER.read_text().partition("\n")[0]
    return facts | {"torch": torch.__version__, "server": server}
