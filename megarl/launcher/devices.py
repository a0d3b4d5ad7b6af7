"""Finds this host's GPUs, and refuses what cannot work on them.

This process does not import torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from megarl.config.errors import ConfigError
from megarl.config.recipes import GRPOConfig
from megarl.config.servers import takes_turns
from megarl.config.weight_sync import Requirements
from megarl.launcher.job import SERVER
from megarl.launcher.placement import Placement

ASK_TIMEOUT = 180.0  # seconds an interpreter may take to import torch
_ASK_NCCL = "import torch; print(*torch.cuda.nccl.version(), sep='.')"


def check_devices(cfg: GRPOConfig, placement: Placement, needs: Requirements) -> None:
    """Raises ConfigError where trainers and the launcher's servers cannot work as they are placed.
    needs: those of the transport of weights.
    """
    streamed = needs.process_group
    if placement.shared and streamed:
        raise ConfigError(
            [
                f"weight_sync.type={cfg.weight_sync.type}: too few GPUs are visible, so servers "
                "and trainers would share some, and NCCL cannot connect two processes on one GPU; "
                "use weight_sync.type=colocated or disk, or a smaller --nproc or server.count"
            ]
        )
    sglang = cfg.server.type == "sglang"
    bounded = any(a.startswith("--mem-fraction") for a in cfg.server.arguments)
    if placement.shared and sglang and not bounded and not takes_turns(cfg):
        raise ConfigError(
            [
                "servers and trainers share GPUs, and SGLang keeps most of a GPU's memory from its "
                "start to its end: say how much with "
                "server.options.mem_fraction_static=0.3, and leave the trainers the "
                "rest; or have them use the GPUs in turn with server.release_memory=true"
            ]
        )
    if cfg.cluster.container:  # whose interpreters are not here
        return
    on_gpus = placement.trainers[0].gpus is not None and bool(placement.servers[SERVER])
    python = os.path.abspath(cfg.server.python) if cfg.server.python else sys.executable
    if on_gpus and streamed and sglang and python != os.path.abspath(sys.executable):
        check_nccl(sys.executable, cfg.server.python)


def check_nccl(ours: str, theirs: str) -> None:
    """Raises ConfigError unless torch has one NCCL version in both interpreters."""
    with ThreadPoolExecutor() as pool:
        own, other = pool.map(_nccl_version, (ours, theirs))
    if own != other:
        raise ConfigError(
            [
                f"server.python={theirs} has NCCL {other} and the trainers' {ours} has NCCL "
                f"{own}: NCCL connects equal versions only; install one torch in both, or use "
                "weight_sync.type=disk"
            ]
        )


def _nccl_version(python: str) -> str:
    command = [python, "-c", _ASK_NCCL]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT,
            check=True,
        )
        return done.stdout.strip().splitlines()[-1]
    except (OSError, subprocess.SubprocessError, IndexError) as e:
        why = (str(getattr(e, "stderr", None) or e).strip().splitlines() or ["no output"])[-1]
        raise ConfigError([f"{python}: cannot tell the NCCL version of its torch: {why}"]) from e
