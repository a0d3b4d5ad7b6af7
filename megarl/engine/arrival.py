"""Brings parked bytes back to the device while a pass runs, in the order in which it needs them.

A pass over L layers can begin as soon as the first layer is there. The copies run beside the
computation, on a stream of their own or, on a CPU, in a thread; a module waits for its own weights
before its first use of them, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import nn

from megarl.models.names import unwrap
from megarl.parallel import mcore

Copy = Callable[[], None]


class Lane(Protocol):
    """Runs copies one after the other, beside the caller."""

    def begin(self, copy: Copy) -> Callable[[], object]:
        """Begins a copy after those before it; returns what waits for it."""

    def close(self) -> None:
        """Gives up the lane, whose copies are made."""


class StreamLane:
    """Copies on a CUDA stream; a wait holds up the caller's stream, not the caller.

    The memory is of the caller's stream, and given up only after the arrival was waited for there.
    So the allocator need not know of this stream (Tensor.record_stream); of pinned host memory it
    does know, by the copies themselves.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())  # who used the memory before

    def begin(self, copy: Copy) -> Callable[[], object]:
        """Begins a copy on the stream; returns what has the current stream wait for it."""
        with torch.cuda.stream(self._stream):
            copy()
            event = self._stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(event)

    def close(self) -> None:
        """Does nothing: the stream goes with the lane."""


class ThreadLane:
    """Copies in a thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="megarl onload")

    def begin(self, copy: Copy) -> Callable[[], object]:
        """Queues a copy; returns what waits for it, and raises what it raised."""
        return self._pool.submit(copy).result

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown()


class Arrival:
    """Holds copies under way, and the hooks by which modules wait for them.

    pieces: (module, copy) in the order in which they are made; the module waits for the copy before
    every forward pass, until `finish`.
    """

    def __init__(self, pieces: Iterable[tuple[nn.Module | None, Copy]]) -> None:
        self._lane: Lane = StreamLane() if mcore.on_cuda() else ThreadLane()
        self._waits: list[Callable[[], object]] = []
        self._hooks: list[Any] = []
        for module, copy in pieces:
            wait = self._lane.begin(copy)
            self._waits.append(wait)
            if module is not None:
                self._hooks.append(module.register_forward_pre_hook(_waiting(wait), prepend=True))

    def finish(self) -> None:
        """Waits for all copies and removes the hooks."""
        try:
            for wait in self._waits:
                wait()
        finally:
            for hook in self._hooks:
                hook.remove()
            self._lane.close()


def _waiting(wait: Callable[[], object]) -> Callable[[nn.Module, Any], None]:
    def hook(module: nn.Module, args: Any) -> None:
        wait()

    return hook


def units(chunks: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, list[torch.Tensor]]]:
    """Yields the modules of a rank's chunks that a pass calls one after the other, each with its
    parameters: embedding, layers, final norm, head."""
    for chunk in chunks:
        yield from _units(unwrap(chunk))


def _units(module: nn.Module) -> Iterator[tuple[nn.Module, list[torch.Tensor]]]:
    yield module, list(module.parameters(recurse=False))
    for child in module.children():
        if isinstance(child, nn.ModuleList):  # its members are called, not the list
            for member in child:
                yield member, list(member.parameters())
        elif any(isinstance(below, nn.ModuleList) for below in child.children()):
            yield from _units(child)
        else:
            yield child, list(child.parameters())
