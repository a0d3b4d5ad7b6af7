"""Moves parts of an engine's memory (api/engine.py's PARTS) off the device and back, under the feet
of everything that refers to them.

A parameter, its slice in the data-parallel buffer, the optimizer's shard of it: many tensors look
at few storages. So storages are moved, not tensors: their bytes go to host memory and the storage
shrinks to nothing; later it grows back and every tensor is valid again.

An onload may run behind the next pass: the copies run on a stream of their own, in the order of the
pass, and each module waits for its own weights before its first use of them.

On a CPU the bytes go to another place of the same memory. Nothing is gained, but the code is the
same, and so is the error of whoever uses what is away.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from megarl.api.engine import PARTS
from megarl.engine import optimizer
from megarl.engine.setup import EngineState
from megarl.models.build import drop_copies
from megarl.observability.logging import get_logger
from megarl.parallel import mcore

log = get_logger(__name__)


def check_parts(parts: Sequence[str]) -> tuple[str, ...]:
    """Returns `parts` in the order of PARTS. Raises ValueError for one that does not exist, and for
    a bare string."""
    if isinstance(parts, str) or not set(parts) <= set(PARTS):
        raise ValueError(f"parts={parts!r}: give a tuple of some of {PARTS}")
    return tuple(p for p in PARTS if p in parts)


# what is away, each with its host copy, or with its size where nothing is kept
_Parked = list[tuple[torch.UntypedStorage, torch.Tensor | int]]
_Pair = tuple[torch.Tensor, torch.Tensor]  # bytes on the device, bytes on the host
Copy = Callable[[], None]
Wait = Callable[[], object]


class ParkedStorages:
    """Keeps named groups of storages, each in device memory or away from it.

    Host memory holds one copy of what is away, pinned where the device is a GPU.
    """

    def __init__(self) -> None:
        self._away: dict[str, _Parked] = {}
        self._copies: dict[int, torch.Tensor] = {}  # storage -> its copy, still good

    def __contains__(self, name: str) -> bool:
        return name in self._away

    def park(
        self,
        name: str,
        tensors: Iterable[torch.Tensor],
        *,
        keep: bool = True,
        but_not: Iterable[torch.Tensor] = (),
        release: bool = True,
    ) -> int:
        """Gives up the device memory of `tensors`, but for what they share with `but_not`; returns
        the bytes.

        Without `keep` (gradients between steps) the numbers are lost, and zeros come back. Without
        `release` the memory stays this process's. What `remember` has is not copied again."""
        assert name not in self._away, f"{name} is parked already"
        seen = {storage._cdata for storage in _storages(but_not, set())}
        parked: _Parked = []
        copied = False
        for storage in _storages(tensors, seen):
            copy = self._copies.pop(storage._cdata, None) if keep else None
            if keep and copy is None:
                copy, copied = _to_host(storage), True
            parked.append((storage, storage.nbytes() if copy is None else copy))
        self._away[name] = parked  # all of it is on the host, so none of it can be lost
        freed = sum(storage.nbytes() for storage, _ in parked)
        _empty(parked)
        if release or copied:
            _synchronize()
        if release:
            torch.cuda.empty_cache()
        return freed

    def remember(self, name: str) -> None:
        """Keeps the host copies of a group that is away, also when it is back: its numbers do not
        change until it is parked again."""
        copies = ((s, c) for s, c in self._away[name] if isinstance(c, torch.Tensor))
        self._copies |= {storage._cdata: copy for storage, copy in copies}

    def restore(self, name: str) -> int:
        """Brings a group back to device memory; returns the bytes taken."""
        taken, copies = self.pieces(name)
        for copy in copies:
            copy()
        _synchronize()
        return taken

    @contextmanager
    def readable(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Has those of `tensors` that are away be their copies in host memory inside, for reading.
        What is not kept stays away."""
        copies = {s._cdata: c for group in self._away.values() for s, c in group}
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            for t in tensors:
                copy = copies.get(t.untyped_storage()._cdata)
                if isinstance(copy, torch.Tensor):
                    own.append((t, t.data))
                    whole = torch.empty(0, dtype=t.dtype)
                    place = int(t.storage_offset()), t.shape, t.stride()
                    t.data = whole.set_(copy.untyped_storage(), *place)
            yield
        finally:
            for t, data in reversed(own):
                t.data = data

    def pieces(
        self, name: str, order: Iterable[Sequence[torch.Tensor]] = ()
    ) -> tuple[int, list[Copy]]:
        """Takes device memory for a group again. Returns its bytes, and the copies that fill it:
        the first of what belongs to no member of `order`, then one for each of these, which are
        tensors of the group. Where there is too little memory it raises RuntimeError, and the group
        stays away."""
        parked = self._away[name]
        try:
            for storage, content in parked:
                storage.resize_(content if isinstance(content, int) else content.numel())
        except RuntimeError as error:
            _empty(parked)
            for storage, _ in parked:  # who changes the numbers next may not ask for a copy
                self._copies.pop(storage._cdata, None)
            error.add_note(f"({name!r} of the engine stays where it is, in host memory)")
            raise
        del self._away[name]
        pairs: dict[int, _Pair] = {}
        for storage, content in parked:
            if isinstance(content, int):
                _bytes(storage).zero_()
            else:
                pairs[storage._cdata] = _bytes(storage), content
        taken = sum(storage.nbytes() for storage, _ in parked)
        return taken, [partial(_copy, cut) for cut in _cut(pairs, order)]


def _cut(pairs: dict[int, _Pair], order: Iterable[Sequence[torch.Tensor]]) -> Iterator[list[_Pair]]:
    """Yields what is in no tensor of `order`, then what is in the tensors of each member that was
    in none before, such as a tied weight. pairs: by storage."""
    members: list[list[_Pair]] = []
    spans: dict[int, set[tuple[int, int]]] = {storage: set() for storage in pairs}
    for tensors in order:
        members.append([])
        for t in tensors:
            storage = t.untyped_storage()._cdata
            begin = int(t.storage_offset()) * t.element_size()
            span = begin, begin + t.nbytes
            if storage in pairs and span not in spans[storage]:
                spans[storage].add(span)
                members[-1].append(_part(pairs[storage], *span))
    rest = []
    for storage, pair in pairs.items():
        edges = [0, *(edge for span in sorted(spans[storage]) for edge in span), len(pair[0])]
        gaps = zip(edges[::2], edges[1::2], strict=True)
        rest += [_part(pair, begin, end) for begin, end in gaps if begin < end]
    yield rest
    yield from members


def _part(pair: _Pair, begin: int, end: int) -> _Pair:
    return pair[0][begin:end], pair[1][begin:end]


def _empty(parked: _Parked) -> None:
    """Gives up the device memory of storages, after what the stream still does with it."""
    for storage, _ in parked:
        storage.resize_(0)


def _copy(pairs: Iterable[_Pair]) -> None:
    """Copies the second of each pair to the first."""
    for there, here in pairs:
        there.copy_(here, non_blocking=True)


def _to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    host = torch.empty(
        storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda"
    )
    return host.copy_(_bytes(storage), non_blocking=True)


def _storages(tensors: Iterable[torch.Tensor], seen: set[int]) -> Iterator[torch.UntypedStorage]:
    """Yields every non-empty storage of the engine's device once, and adds it to `seen`."""
    for t in tensors:
        storage = t.untyped_storage()
        on_device = storage.device.type == mcore.device().type
        if on_device and storage.nbytes() and storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def other_bytes_in_use(own: int) -> int | None:
    """Returns what is taken of this rank's device besides `own` bytes: contexts, communicators,
    workspaces, kernels' caches, of all processes on it. None on a CPU."""
    if not mcore.on_cuda():
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free - own


def memory_in_use() -> int:
    """Returns the bytes of this process in device memory: tensors, or on a CPU all that is
    resident."""
    if mcore.on_cuda():
        return torch.cuda.memory_allocated()
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def optimizer_tensors(whole: Any) -> Iterator[torch.Tensor]:
    """Yields main parameters and states of a megatron optimizer, chained or not; of None none."""
    for inner in optimizer.parts(whole):
        torch_optimizer = inner.optimizer
        if torch_optimizer is None:  # this rank holds no parameter of that kind
            continue
        # one that keeps a part on the CPU consists of several
        for each in (torch_optimizer, *getattr(torch_optimizer, "sub_optimizers", ())):
            for group in each.param_groups:
                yield from group["params"]
        for state in torch_optimizer.state.values():
            yield from (v for v in state.values() if torch.is_tensor(v))


def gradient_tensors(chunks: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yields the data-parallel wrappers' gradient buffers."""
    for chunk in optimizer.wrappers(chunks):
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


# ---- an onload behind a pass --------------------------------------------------------------------


def copy_stream() -> Callable[[Copy], Wait]:
    """Returns what begins a copy after those before it, and returns what waits for it: on a stream
    beside the caller's, which a wait holds up, not the caller. On a CPU it makes the copy at once.

    The memory is of the caller's stream, and given up only after the copy was waited for there. So
    the allocator need not know of this stream (Tensor.record_stream); of pinned host memory it does
    know, by the copies themselves.
    """

    def at_once(copy: Copy) -> Wait:
        copy()
        return lambda: None

    if not mcore.on_cuda():
        return at_once
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # who used the memory before

    def on_stream(copy: Copy) -> Wait:
        with torch.cuda.stream(stream):
            copy()
            event = stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(event)

    return on_stream


class Onload:
    """Holds copies under way, and the hooks by which modules wait for them.

    copies: (module, copy) in the order in which they are made; the module waits for the copy before
    every forward pass, until `finish`.
    """

    def __init__(self, copies: Iterable[tuple[nn.Module | None, Copy]]) -> None:
        begin = copy_stream()
        self._waits: list[Wait] = []
        self._hooks: list[Any] = []
        for module, copy in copies:
            wait = begin(copy)
            self._waits.append(wait)
            if module is not None:
                hook = partial(_wait_before, wait)
                self._hooks.append(module.register_forward_pre_hook(hook, prepend=True))

    def finish(self) -> None:
        """Waits for all copies and removes the hooks."""
        try:
            for wait in self._waits:
                wait()
        finally:
            for hook in self._hooks:
                hook.remove()


def _wait_before(wait: Wait, module: nn.Module, args: Any) -> None:
    wait()


def units(module: nn.Module) -> Iterator[tuple[nn.Module, list[torch.Tensor]]]:
    """Yields the modules of a model that a pass calls one after the other, each with its
    parameters: embedding, layers, final norm, head."""
    yield module, list(module.parameters(recurse=False))
    for child in module.children():
        if isinstance(child, nn.ModuleList):  # its members are called, not the list
            for member in child:
                yield member, list(member.parameters())
        elif any(isinstance(below, nn.ModuleList) for below in child.children()):
            yield from units(child)
        else:
            yield child, list(child.parameters())


class Memory:
    """Keeps which parts of an engine are on the device and which are away. With `offload` in the
    engine's config the weights rest in host memory."""

    def __init__(self, state: EngineState) -> None:
        self._built = state
        self._parked = ParkedStorages()
        self._onload: Onload | None = None

    def require(self, what: str, parts: Sequence[str], *, behind: bool = False) -> None:
        """Waits for what is on its way; with `behind` not, for a pass whose modules do. Raises
        RuntimeError if `what` would meet a part that is away."""
        if parts and not behind:
            self.arrive()
        if away := tuple(part for part in parts if part in self._parked):
            raise RuntimeError(f"{what} needs {away}, which are offloaded; call onload({away})")

    def offload(
        self, parts: Sequence[str], *, keep: bool = True, release: bool = True
    ) -> dict[str, int]:
        """Gives up the device memory of `parts`; returns bytes by part, and in use before and
        after. Without `keep` their numbers are lost, without `release` the memory is not handed to
        other processes; layers' quantised copies of weights go with any part. Collective: weights
        that the last step has not gathered are made whole first. Raises ValueError for a part that
        does not exist."""
        parts = tuple(p for p in check_parts(parts) if p not in self._parked)
        self.arrive()
        before, freed = memory_in_use(), {}
        if "params" in parts:
            optimizer.gather_params(self._built.chunks)
        if parts:
            drop_copies(self._built.chunks)
        for part in parts:
            owned = [t for p in PARTS[: PARTS.index(part)] for t in self._tensors(p)]
            freed[part] = self._parked.park(
                part,
                self._tensors(part),
                keep=keep and part != "grads",
                but_not=owned,
                release=release,
            )
        return self._moved("offload", freed, before)

    def onload(self, parts: Sequence[str], *, behind: bool = False) -> dict[str, int]:
        """Brings back those of `parts` that are away; returns bytes by part, and in use before and
        after. With `behind` their bytes arrive later, those of weights in the order of a pass."""
        self.arrive()
        before = memory_in_use()
        back = [p for p in check_parts(parts) if p in self._parked]
        if not behind:
            return self._moved("onload", {p: self._parked.restore(p) for p in back}, before)
        taken: dict[str, int] = {}
        copies: list[tuple[nn.Module | None, Copy]] = []
        try:
            for part in back:
                models = self._built.models if part == "params" else []
                modules = [unit for model in models for unit in units(model)]
                taken[part], of_part = self._parked.pieces(part, [params for _, params in modules])
                # what belongs to no module comes first: who waits for a copy waits for those before
                copies += zip([None, *(module for module, _ in modules)], of_part, strict=True)
        finally:  # also where there is too little memory for a later part
            self._onload = Onload(copies)
        return self._moved("onload", taken, before)

    def arrive(self) -> None:
        """Waits for what is on its way."""
        onload, self._onload = self._onload, None
        if onload is not None:
            onload.finish()

    @contextmanager
    def at_hand(self, *, behind: bool = False, changes: bool = False) -> Iterator[None]:
        """Brings weights that rest in host memory (`offload` of the config) to the device for one
        pass, with `behind` while it runs. Unless the caller `changes` them, those in host memory
        stay good, and nothing is copied back."""
        resting = self._built.config.offload and "params" in self._parked
        if resting:
            if not changes:
                self._parked.remember("params")
            self.onload(("params",), behind=behind)
        try:
            yield
        finally:
            if resting:
                self.offload(("params",), release=False)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Has weights and optimizer state that are away be read where they rest, in host memory,
        for a checkpoint: it takes no device memory, and brings nothing back."""
        self.arrive()
        if "optimizer" in self._parked:  # before the first step it is made on the device, as others
            optimizer.materialize_state(self._built.optimizer)
        with self._parked.readable([*self._tensors("params"), *self._tensors("optimizer")]):
            yield

    def occupied(self) -> dict[str, int]:
        """Returns the bytes of each part that are on the device now; what parts share counts
        once."""
        seen: set[int] = set()
        return {p: sum(s.nbytes() for s in _storages(self._tensors(p), seen)) for p in PARTS}

    def _moved(self, verb: str, moved: dict[str, int], before: int) -> dict[str, int]:
        after = memory_in_use()
        each = ", ".join(f"{part} {n / 1e6:.1f} MB" for part, n in moved.items()) or "nothing"
        log.debug("%s: %s; in use %.1f -> %.1f MB", verb, each, before / 1e6, after / 1e6)
        return {**moved, "in_use_before": before, "in_use_after": after}

    def _tensors(self, part: str) -> list[torch.Tensor]:
        b = self._built
        if part == "params":
            return [*b.params.values(), *b.average.values()]
        if part == "grads":
            return list(gradient_tensors(b.chunks))
        return list(optimizer_tensors(b.optimizer))
