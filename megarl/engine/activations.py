"""Keeps what autograd saves of a pass in host memory, copied beside the computation.

Tensors leave the device on one stream and come back on another. On the way out a tensor keeps its
memory until it has left; the computation waits for that only where more is on its way than the
largest two. As the backward pass takes a tensor, the tensors saved just before it, a layer's worth,
start on their way back, so that they arrive while it computes. The host never waits.

On a CPU streams are null objects, and copies are made at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megarl.parallel import mcore

MIN_BYTES = 64 << 10  # smaller ones stay: their copies cost more than their memory


@dataclass(eq=False)
class Saved:
    """Stands for a tensor in autograd's graph.

    device: the tensor until it has left, and from when it was sent for.
    left, back: events after the copies; `back` is None before the second.
    """

    host: Tensor
    left: Any
    before: Saved | None
    device: Tensor | None
    back: Any = None
    used: bool = False


class HostActivations:
    """Keeps the activations of one pass. Parameters, whose gradients megatron-core accumulates
    beside them, and small tensors stay on the device. Values stay the same to the bit."""

    def __init__(self) -> None:
        self._out, self._in = torch.cuda.Stream(), torch.cuda.Stream()
        self._leaving: deque[Saved] = deque()
        self._largest = 0
        self._last: Saved | None = None

    @contextmanager
    def of(self, block: nn.Module) -> Iterator[None]:
        """Takes what autograd saves in `block`, which is called inside, once."""
        with ExitStack() as inside:

            def begin(*_: Any) -> None:
                inside.enter_context(saved_tensors_hooks(self._pack, self._unpack))

            def end(*_: Any) -> None:
                inside.close()

            hooks = block.register_forward_pre_hook(begin), block.register_forward_hook(end)
            try:
                yield
            finally:
                self._last = None
                for hook in hooks:
                    hook.remove()

    def close(self) -> None:
        """Ends the pass: what was sent for has come before its memory is given to others."""
        torch.cuda.current_stream().wait_stream(self._in)

    def _pack(self, tensor: Tensor) -> Tensor | Saved:
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, nn.Parameter):
            return tensor
        if not tensor.is_floating_point() or tensor.nbytes < MIN_BYTES:
            return tensor.detach()
        now, tensor = torch.cuda.current_stream(), tensor.detach()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._out.wait_stream(now)
        with torch.cuda.stream(self._out):
            host.copy_(tensor, non_blocking=True)
        self._last = Saved(host, self._out.record_event(), self._last, tensor)
        self._leaving.append(self._last)
        self._largest = max(self._largest, tensor.nbytes)
        while sum(each.host.nbytes for each in self._leaving) > 2 * self._largest:
            gone = self._leaving.popleft()
            now.wait_event(gone.left)
            gone.device = None
        return self._last

    def _unpack(self, packed: Tensor | Saved) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        now = torch.cuda.current_stream()
        self._send_for(packed, now)
        packed.used = True
        coming, before = 0, packed.before
        while before is not None and coming < self._largest:
            if not before.used:
                self._send_for(before, now)
                coming += before.host.nbytes
            before = before.before
        tensor = packed.device
        assert tensor is not None
        if packed.back is not None:  # else it had not left
            now.wait_event(packed.back)
            packed.device = packed.back = None
        return tensor

    def _send_for(self, saved: Saved, now: Any) -> None:
        if saved.device is not None:
            return
        # memory of the computing stream, once that is done with who had it before
        saved.device = torch.empty_like(saved.host, device=mcore.device())
        self._in.wait_stream(now)
        with torch.cuda.stream(self._in):
            saved.device.copy_(saved.host, non_blocking=True)
        saved.back = self._in.record_event()
