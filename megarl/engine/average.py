"""Keeps a moving average of another model's weights in fp32, beside parameters of less.

A step of an average changes a weight by a hundredth of a small difference, which bf16 would round
away. The average is what a checkpoint holds; the parameters are its rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megarl.engine.setup import EngineState


def begin(state: EngineState) -> None:
    """Makes the average of parameters that are not in fp32 out of them, unless it is there. It
    rests in host memory where the engine's weights do (`offload`)."""
    if state.average:
        return
    for name, param in state.params.items():
        if param.dtype != torch.float32:
            state.average[name] = _at_rest(state, param.detach().float())


def end(state: EngineState) -> None:
    """Drops the average."""
    state.average.clear()


@torch.no_grad()
def round_off(state: EngineState) -> None:
    """Sets the parameters to their average, where there is one."""
    for name, values in state.average.items():
        state.params[name].copy_(values)


@contextmanager
def in_place(state: EngineState) -> Iterator[None]:
    """Has the parameters be their average in fp32 inside, for a checkpoint; what they are then
    loaded with becomes the average (`round_off` then makes it the parameters)."""
    rounded = {name: state.params[name].data for name in state.average}
    for name, values in state.average.items():
        state.params[name].data = values.to(rounded[name].device)
    try:
        yield
    finally:
        for name, data in rounded.items():
            state.average[name].copy_(state.params[name].data)
            state.params[name].data = data


def _at_rest(state: EngineState, values: torch.Tensor) -> torch.Tensor:
    return values.cpu() if state.config.offload else values
