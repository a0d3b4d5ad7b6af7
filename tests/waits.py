"""Counts on a CPU where a program would wait for a GPU.

    with pretend_device() as device:
        engine = make_engine(...)       # whatever it puts on the device counts as there
        step(engine)
        device.take()                   # forgets what a first step alone does
        step(engine)
        for place, times in device.take().items(): ...

Inside, the engine's device is the CPU with an index, DEVICE. A tensor that is made or moved there
has its storage noted, and so has everything that is computed from one; what is moved back to the
host is a copy. Attributes and numbers are those of the CPU.

A wait is a Place with the kind of what waits:

item          .item(), int(), float(), bool() of a tensor; a number taken from one by an operation
tolist, numpy, cpu (.cpu(), .to("cpu") and copies into host memory that are not pinned)
nonzero, mask (an index of bools), masked_select, repeat_interleave (without output_size), unique,
equal, bincount
synchronize   of a device, a stream or an event
copy          to the device, that is waited for: .to(device), of an index in host memory, of numbers
              (torch.tensor(..., device=))
pageable      a copy to the device by non_blocking=True out of memory that is not pinned: it is
              staged by the host, and where it is large waits for what the device does before
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megarl
import megarl.parallel.mcore  # before megatron

import megatron.core

DEVICE, HOST = torch.device("cpu", 0), torch.device("cpu")
PAGEABLE = "pageable"
_ROOTS = {  # of the packages whose lines count, by name
    "megarl/": os.path.join(Path(megarl.__file__).resolve().parent, ""),
    "megatron/core/": os.path.join(Path(megatron.core.__file__).resolve().parent, ""),
}
_TORCH = os.path.join(Path(torch.__file__).resolve().parent, "")
_STAND_INS = ("megarl/parallel/cpu_patches.py",)  # they act for the lines that call them
_OPS = {
    "_local_scalar_dense": "item",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "repeat_interleave": "repeat_interleave",
    "_unique": "unique",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "unique_dim_consecutive": "unique",
    "equal": "equal",
    "bincount": "bincount",
}
_FACTORIES = "tensor as_tensor zeros ones empty full arange empty_like zeros_like ones_like"


class Place(NamedTuple):
    """A line that waits: of megarl or megatron-core the innermost, of a test its own."""

    kind: str
    file: str  # from "megarl" or "megatron" on
    function: str
    line: int

    @property
    def name(self) -> str:
        return f"{self.file}:{self.function}"


class Device:
    """Knows which storages are on the device and which are pinned, and has counted the waits."""

    def __init__(self) -> None:
        self.places: Counter[Place] = Counter()
        self._there: dict[int, StorageWeakRef] = {}
        self._pinned: dict[int, StorageWeakRef] = {}

    def take(self) -> Counter[Place]:
        """Returns the waits since the last call."""
        places, self.places = self.places, Counter()
        return places

    def has(self, x: Any) -> bool:
        """Returns whether a tensor is on the device."""
        return torch.is_tensor(x) and x.untyped_storage()._cdata in self._there

    def put(self, x: torch.Tensor) -> torch.Tensor:
        """Notes that a tensor is on the device."""
        storage = x.untyped_storage()
        # the reference keeps the number from being given to another storage
        self._there[storage._cdata] = StorageWeakRef(storage)
        return x

    def on_host(self, x: torch.Tensor) -> torch.Tensor:
        self._there.pop(x.untyped_storage()._cdata, None)
        return x

    def pin(self, x: torch.Tensor) -> torch.Tensor:
        out = x.clone() if torch.is_tensor(x) else x
        storage = out.untyped_storage()
        self._pinned[storage._cdata] = StorageWeakRef(storage)
        return out

    def is_pinned(self, x: torch.Tensor) -> bool:
        return x.untyped_storage()._cdata in self._pinned

    def wait(self, kind: str) -> None:
        self.places[_place(kind)] += 1

    def copies(self, source: Any, non_blocking: bool) -> None:
        """Counts a copy from the host to the device, unless it goes by itself."""
        if not non_blocking:
            self.wait("copy")
        elif not self.is_pinned(source):
            self.wait(PAGEABLE)

    def moved(
        self, x: torch.Tensor, to: torch.device | None, non_blocking: bool
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Counts a tensor's way to a device; returns what puts the result there."""
        before, after = self.has(x), self.has(x) if to is None else to == DEVICE
        if before and not after:
            self.wait("cpu")
        if after and not before:
            self.copies(x, non_blocking)

        def arrive(out: torch.Tensor) -> torch.Tensor:
            if before == after:
                return out
            if out.untyped_storage()._cdata == x.untyped_storage()._cdata:
                out = out.clone()
            return self.put(out) if after else self.on_host(out)

        return arrive


_real = cache(os.path.realpath)
_HERE = _real(__file__)


def _place(kind: str) -> Place:
    frame, outer = sys._getframe(2), None
    while frame is not None:
        code, name = frame.f_code, _real(frame.f_code.co_filename)
        ours = next((p + name[len(r) :] for p, r in _ROOTS.items() if name.startswith(r)), None)
        if ours is not None and not ours.startswith(_STAND_INS):
            return Place(kind, ours, code.co_name, frame.f_lineno)
        if outer is None and name != _HERE and not name.startswith(_TORCH):
            outer = Place(kind, Path(name).name, code.co_name, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    assert outer is not None
    return outer


class _Calls(TorchFunctionMode):
    """Sees what torch is asked for from Python: where tensors go, and what leaves them."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.own: dict[Any, Callable[..., Any]] = {
            torch.Tensor.device.__get__: self._device,  # type: ignore[attr-defined]
            torch.Tensor.to: self._to,
            torch.Tensor.cpu: self._cpu,
            torch.Tensor.tolist: self._leaves("tolist"),
            torch.Tensor.numpy: self._leaves("numpy"),
            torch.Tensor.__array__: self._leaves("numpy"),
            # torch asks for the method by its name, and would get what replaces it (P4) twice
            torch.Tensor.type: lambda _, *args, **kw: torch._C.TensorBase.type(*args, **kw),
            torch.Tensor.is_pinned: lambda func, x, *_, **__: device.is_pinned(x),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if own := self.own.get(func):
            return own(func, *args, **kwargs)
        if kwargs.get("device") is None:
            return func(*args, **kwargs)
        to = torch.device(kwargs.pop("device"))
        out = func(*args, **kwargs, device=HOST if to.type == "cpu" else to)
        if torch.is_tensor(out) and to == DEVICE:
            self.device.put(out)
        elif torch.is_tensor(out) and not (args and self.device.has(args[0])):
            self.device.on_host(out)
        return out

    def _device(self, func: Any, x: torch.Tensor, *_: Any) -> torch.device:
        return DEVICE if self.device.has(x) else func(x)

    def _to(self, func: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        to: torch.device | None = None
        given = list(args)
        for i, arg in enumerate(given):
            if torch.is_tensor(arg):
                to, given[i] = DEVICE if self.device.has(arg) else HOST, arg
            elif isinstance(arg, torch.device | str):
                to = torch.device(arg)
                given[i] = HOST if to.type == "cpu" else to
        if kwargs.get("device") is not None:
            to = torch.device(kwargs["device"])
            kwargs["device"] = HOST if to.type == "cpu" else to
        arrive = self.device.moved(x, to, bool(kwargs.get("non_blocking")))
        return arrive(func(x, *given, **kwargs))

    def _cpu(self, func: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.device.moved(x, HOST, False)(func(x, *args, **kwargs))

    def _leaves(self, kind: str) -> Callable[..., Any]:
        def call(func: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.device.has(x):
                self.device.wait(kind)
            return func(x, *args, **kwargs)

        return call


class _Operations(TorchDispatchMode):
    """Sees every operation, those of a backward pass too: what it makes of tensors on the device is
    there, and some operations wait."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, device = kwargs or {}, self.device
        tensors = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
        there = [x for x in tensors if device.has(x)]
        name = func.overloadpacket.__name__
        if name in ("copy_", "_copy_from") and len(args) > 1:
            self._copy(args[0], args[1], bool(kwargs.get("non_blocking") or args[2:] == (True,)))
            return func(*args, **kwargs)
        if there:
            self._wait(name, args, kwargs)
        out = func(*args, **kwargs)
        if there:
            known = {x.untyped_storage()._cdata for x in tensors}
            for x in tree_leaves(out):
                if torch.is_tensor(x) and x.untyped_storage()._cdata not in known:
                    device.put(x)
        return out

    def _copy(self, into: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        before, after = self.device.has(source), self.device.has(into)
        if before and not after and not (non_blocking and self.device.is_pinned(into)):
            self.device.wait("cpu")
        if after and not before and source.ndim:  # a number goes with the kernel
            self.device.copies(source, non_blocking)

    def _wait(self, name: str, args: Any, kwargs: Any) -> None:
        kind = _OPS.get(name)
        if kind == "repeat_interleave" and kwargs.get("output_size") is not None:
            kind = None
        if kind:
            self.device.wait(kind)
        if name in ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"):
            self._index([i for i in args[1] if i is not None], args[2] if args[2:] else None)
        elif name in ("index_select", "gather", "embedding", "scatter", "scatter_add", "index_add"):
            for x in args:
                if torch.is_tensor(x) and not self.device.has(x):
                    self.device.copies(x, False)  # an error on a GPU; a copy at the least

    def _index(self, indices: list[torch.Tensor], values: Any) -> None:
        fills = torch.is_tensor(values) and values.numel() == 1 and not self.device.has(values)
        for index in indices:
            if not self.device.has(index):
                self.device.copies(index, False)
            elif index.dtype in (torch.bool, torch.uint8) and not fills:
                self.device.wait("mask")


@contextlib.contextmanager
def pretend_device() -> Iterator[Device]:
    """Counts waits inside, also those of threads that start inside. Engines and their batches are
    made inside; what was made before is in host memory."""
    import megarl.parallel.mcore as mcore
    from megarl.parallel import worlds

    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    device = Device()
    run = threading.Thread.run

    def run_counted(self: threading.Thread) -> None:
        with _Operations(device), _Calls(device):
            run(self)

    def cuda(x: torch.Tensor, *_: Any, non_blocking: bool = False, **__: Any) -> torch.Tensor:
        return x.to(DEVICE, non_blocking=non_blocking)

    def waits(*_: Any, **__: Any) -> None:
        device.wait("synchronize")

    def to_host(x: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """P8's: on a GPU the sizes go into pinned memory, and the dispatcher waits for them."""
        if torch.is_tensor(x):
            x = device.on_host(x.clone())
        return x.numpy() if as_numpy and torch.is_tensor(x) else x

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (mcore, "device", lambda: DEVICE),
            (worlds, "device", lambda: DEVICE),
            (torch.cuda, "current_device", lambda: DEVICE),
            (torch.cuda, "synchronize", waits),
            (torch.cuda.Stream, "synchronize", waits),
            (torch.cuda.Event, "synchronize", waits),
            (torch.Tensor, "cuda", cuda),
            (torch.Tensor, "pin_memory", lambda x, *_, **__: device.pin(x)),
            (threading.Thread, "run", run_counted),
            (moe_utils, "maybe_move_tensor_to_cpu", to_host),
            (token_dispatcher, "maybe_move_tensor_to_cpu", to_host),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        for name in _FACTORIES.split():
            make = _factory(getattr(torch, name), device)
            stack.enter_context(mock.patch.object(torch, name, make))
        # what these two do on a GPU; torch is the only global of theirs that is read
        stack.enter_context(_acts_as(worlds.pinned, lambda tensor: tensor.pin_memory()))
        stack.enter_context(_acts_as(worlds.to_device, _to_device))
        stack.enter_context(_Operations(device))
        stack.enter_context(_Calls(device))
        yield device


def _to_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory().to(torch.cuda.current_device(), non_blocking=True)


@contextlib.contextmanager
def _acts_as(function: Any, other: Any) -> Iterator[None]:
    """Has a function do what another does, under whatever names modules imported it."""
    code, function.__code__ = function.__code__, other.__code__
    try:
        yield
    finally:
        function.__code__ = code


def _factory(make: Callable[..., Any], device: Device) -> Callable[..., Any]:
    """Returns a factory of torch that knows DEVICE by CUDA's names, and pinned memory. No mode sees
    what torch.tensor reads."""

    def call(*args: Any, **kwargs: Any) -> Any:
        to, pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
        if (isinstance(to, int) and not isinstance(to, bool)) or str(to).startswith("cuda"):
            to = kwargs["device"] = DEVICE
        if make.__name__ in ("tensor", "as_tensor"):
            if torch.is_tensor(args[0]):  # moves it, or copies
                out = args[0].to(**{k: v for k, v in kwargs.items() if k in ("dtype", "device")})
                return out.clone() if make.__name__ == "tensor" else out
            for x in tree_leaves(args[0]):
                if device.has(x):
                    device.wait("item")
            if to == DEVICE:
                device.copies(args[0], False)
                return device.put(make(*args, **kwargs | {"device": HOST}))
        out = make(*args, **kwargs)
        return device.pin(out) if pinned else out

    return call
