"""Replaces torch's CUDA calls on a machine without CUDA: these are the patches of
megarl.parallel.cpu_backend (which lists them all) that are about torch itself."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

from megarl.parallel import cpu_memory

_CPU = torch.device("cpu")


def patch(target: Any, **attrs: Any) -> None:
    """Sets these attributes of `target`, a module or a class."""
    for name, value in attrs.items():
        setattr(target, name, value)


def nothing(*_: Any, **__: Any) -> None:
    """Takes any arguments and returns None."""
    return None


class NullEvent:
    """Replaces torch.cuda.Event where everything has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    record = wait = synchronize = nothing

    def query(self) -> bool:
        """Returns True: all work before the event is done."""
        return True

    def elapsed_time(self, _other: NullEvent) -> float:
        """Returns 0.0 ms, whatever happened between the events."""
        return 0.0


class NullStream:
    """Replaces torch.cuda.Stream where ordering always holds. All of them are the same stream."""

    device = _CPU
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    wait_stream = wait_event = synchronize = nothing

    def record_event(self, event: NullEvent | None = None) -> NullEvent:
        """Returns `event`, or a new one; there is nothing to record."""
        return event or NullEvent()

    def query(self) -> bool:
        """Returns True: all work of the stream is done."""
        return True

    def __enter__(self) -> NullStream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NullStream)

    def __hash__(self) -> int:
        return 0


def p1_current_device() -> None:
    """Makes torch.cuda.current_device() return the CPU device in place of an index."""
    patch(torch.cuda, current_device=lambda: _CPU)


def p2_streams_and_memory() -> None:
    """Makes torch.cuda's streams, events and ranges null objects, and its memory counters 0 bytes:
    work on a CPU is synchronous."""
    null = NullStream()
    silent = "synchronize empty_cache set_device set_stream ipc_collect reset_peak_memory_stats"
    for name in silent.split():
        # one function per name: torch._dynamo keys its rules by function and refuses duplicates
        patch(torch.cuda, **{name: lambda *_, **__: None})
    counters = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved"
    patch(torch.cuda, **{name: lambda *_, **__: 0 for name in counters.split()})
    patch(
        torch.cuda,
        Stream=NullStream,
        Event=NullEvent,
        current_stream=lambda *_, **__: null,
        default_stream=lambda *_, **__: null,
        stream=lambda s: contextlib.nullcontext(s),
        get_device_capability=lambda *_, **__: (0, 0),
    )
    for name in ("range_push", "range_pop"):
        patch(torch.cuda.nvtx, **{name: lambda *_, **__: None})


def p3_tensor_placement() -> None:
    """Keeps tensors on the CPU despite device="cuda", device indices, .cuda() and pin_memory."""

    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            is_index = isinstance(device, int) and not isinstance(device, bool)
            if is_index or str(device).startswith("cuda"):
                kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return wrapper

    # torch.device("meta") as a context knows factories by identity, cached at its first use:
    # let it see the real ones, or models built under it (from_pretrained) get uninitialised buffers
    _device_constructors()
    factories = "tensor zeros ones empty full arange empty_like zeros_like ones_like"
    for name in factories.split():
        patch(torch, **{name: on_cpu(getattr(torch, name))})
    patch(
        torch.Tensor,
        cuda=lambda self, *_, **__: self,
        pin_memory=lambda self, *_, **__: self,
        record_stream=nothing,
    )
    patch(torch.nn.Module, cuda=lambda self, *_, **__: self)


def p4_tensor_type() -> None:
    """megatron.core.optimizer sorts parameters by `param.type()` among torch.cuda names."""
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)  # type: ignore[union-attr]

    patch(torch.Tensor, type=type_)


def p5_torch_random_state() -> None:
    """torch.manual_seed calls torch.cuda.manual_seed_all, so seeding goes to the generator."""

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    patch(torch.cuda, manual_seed=manual_seed, manual_seed_all=nothing)
    for module in (torch.cuda, torch.cuda.random):
        patch(module, get_rng_state=get_state, set_rng_state=set_state)


def p14_large_tensors() -> None:
    """Faulting a large tensor in page by page costs more than a pass over it. torch reads the
    variable before it allocates the first tensor."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    cpu_memory.keep_freed()
