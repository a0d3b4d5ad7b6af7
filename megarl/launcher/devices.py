"""Finds this host's GPUs, and refuses what cannot work on them.

This process does not import torch.
"""

from __future__ import annotations

import os
import subprocess
import sys

from megarl.config.errors import ConfigError
from megarl.config.recipes import GRPOConfig
from megarl.config.transports import Requirements
from megarl.config.turns import takes_turns
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
                "server.extra_args=['--mem-fraction-static','0.3'], and leave the trainers the "
                "rest; or have them use the GPUs in turn with server.release_memory=true"
            ]
        )
    if cfg.cluster.container:  # whose interpreters are not here
        return
    on_gpus = placement.trainers[0].gpus is not None and bool(placement.servers)
    python = os.path.abspath(cfg.server.python) if cfg.server.python else sys.executable
    if on_gpus and streamed and sglang and python != os.path.abspath(sys.executable):
        check_nccl(sys.executable, cfg.server.python)


def check_nccl(ours: str, theirs: str) -> None:
    """Raises ConfigError unless torch has one NCCL version in both interpreters."""
    pipe = subprocess.PIPE
    asked = [
        subprocess.Popen(
            [python, "-c", _ASK_NCCL],
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for python in (ours, theirs)
    ]
    try:
        own, other = (_answer(*pair) for pair in zip((ours, theirs), asked, strict=True))
    finally:
        for process in asked:
            process.kill()
            process.wait()
    if own != other:
        raise ConfigError(
            [
                f"server.python={theirs} has NCCL {other} and the trainers' {ours} has NCCL "
                f"{own}: NCCL connects equal versions only; install one torch in both, or use "
                "weight_sync.type=disk"
            ]
        )


def _answer(python: str, process: subprocess.Popen[str]) -> str:
    try:
        out, error = process.communicate(timeout=ASK_TIMEOUT)
    except subprocess.TimeoutExpired:
        out, error = "", f"no answer within {ASK_TIMEOUT:g} s"
    if process.returncode != 0 or not out.strip():
        why = (error.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        raise ConfigError([f"{python}: cannot tell the NCCL version of its torch: {why}"])
    return out.strip().splitlines()[-1]
