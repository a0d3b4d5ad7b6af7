"""Saves and restores the random states of this rank: python, numpy, torch and megatron-core's
tracker."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from megarl.parallel import mcore

from megatron.core.tensor_parallel.random import (  # isort: skip
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)


def rng_state() -> dict[str, Any]:
    """Returns the state of everything that draws numbers on this rank. The engine must be in scope,
    for its tracker."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": dict(get_cuda_rng_tracker().get_states()),
    }
    if mcore.on_cuda():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Puts back what `rng_state` gave, on the same kind of device."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if mcore.on_cuda():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])


def reseed(seed: int) -> None:
    """Seeds all of them, as at a start: alike on every rank, the tracker's by coordinates."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
