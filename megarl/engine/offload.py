"""Moves parts of an engine's memory (api/engine.py's PARTS) off the device and back, under the feet
of everything that refers to them.

A parameter, its slice in the data-parallel buffer, the optimizer's shard of it: many tensors look
at few storages. So storages are moved, not tensors: their bytes go to host memory and the storage
shrinks to nothing; later it grows back and every tensor is valid again.

On a CPU the bytes go to another place of the same memory. Nothing is gained, but the code is the
same, and so is the error of whoever uses what is away.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megarl.api.engine import PARTS
from megarl.engine import optimizer
from megarl.engine.setup import EngineState
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


class ParkedStorages:
    """Keeps named groups of storages, each in device memory or away from it.

    Host memory holds one copy of what is away, pinned where the device is a GPU.
    """

    def __init__(self) -> None:
        self._away: dict[str, _Parked] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._away

    def park(
        self,
        name: str,
        tensors: Iterable[torch.Tensor],
        *,
        keep: bool = True,
        but_not: Iterable[torch.Tensor] = (),
    ) -> int:
        """Gives up the device memory of `tensors`, but for what they share with `but_not`; returns
        the bytes.

        Without `keep` (gradients between steps) the numbers are lost, and zeros come back."""
        assert name not in self._away, f"{name} is parked already"
        seen = {storage._cdata for storage in _storages(but_not, set())}
        parked: _Parked = []
        freed = 0
        for storage in _storages(tensors, seen):
            freed += storage.nbytes()
            parked.append((storage, _to_host(storage) if keep else storage.nbytes()))
            storage.resize_(0)  # in the order of the stream, so after the copy
        self._away[name] = parked
        _synchronize()
        torch.cuda.empty_cache()
        return freed

    def restore(self, name: str) -> int:
        """Brings a group back to device memory; returns the bytes taken."""
        taken = 0
        for storage, content in self._away.pop(name):
            if isinstance(content, int):
                storage.resize_(content)
                _bytes(storage).zero_()
            else:
                storage.resize_(content.numel())
                _bytes(storage).copy_(content, non_blocking=True)
            taken += storage.nbytes()
        _synchronize()
        return taken


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


def memory_in_use() -> int:
    """Returns the bytes of this process in device memory: tensors, or on a CPU all that is
    resident."""
    if mcore.on_cuda():
        return torch.cuda.memory_allocated()
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def optimizer_tensors(whole: Any) -> Iterator[torch.Tensor]:
    """Yields main parameters and states of a megatron optimizer, chained or not."""
    for inner in optimizer.parts(whole):
        torch_optimizer = inner.optimizer
        if torch_optimizer is None:  # this rank holds no parameter of that kind
            continue
        # one that keeps a part on the CPU consists of several
        for each in getattr(torch_optimizer, "sub_optimizers", [torch_optimizer]):
            for group in each.param_groups:
                yield from group["params"]
        for state in torch_optimizer.state.values():
            yield from (v for v in state.values() if torch.is_tensor(v))


def gradient_tensors(chunks: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yields the data-parallel wrappers' gradient buffers."""
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


class Memory:
    """Keeps which parts of an engine are on the device and which are away. With `offload` in the
    engine's config the weights rest in host memory."""

    def __init__(self, state: EngineState) -> None:
        self._built = state
        self._parked = ParkedStorages()

    def require(self, what: str, parts: Sequence[str]) -> None:
        """Raises RuntimeError if `what` would meet a part that is away."""
        if away := tuple(part for part in parts if part in self._parked):
            raise RuntimeError(f"{what} needs {away}, which are offloaded; call onload({away})")

    def offload(self, parts: Sequence[str]) -> dict[str, int]:
        """Gives up the device memory of `parts`; returns bytes by part, and in use before and
        after. Collective: weights that the last step has not gathered are made whole first. Raises
        ValueError for a part that does not exist."""
        parts = tuple(p for p in check_parts(parts) if p not in self._parked)
        before, freed = memory_in_use(), {}
        if "params" in parts:
            optimizer.gather_params(self._built.chunks)
        for part in parts:
            owned = [t for p in PARTS[: PARTS.index(part)] for t in self._tensors(p)]
            freed[part] = self._parked.park(
                part, self._tensors(part), keep=part != "grads", but_not=owned
            )
        return self._moved("offload", freed, before)

    def onload(self, parts: Sequence[str]) -> dict[str, int]:
        """Brings back those of `parts` that are away; returns bytes by part, and in use before and
        after."""
        before = memory_in_use()
        taken = {p: self._parked.restore(p) for p in check_parts(parts) if p in self._parked}
        return self._moved("onload", taken, before)

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Brings weights that rest in host memory (`offload` of the config) to the device for one
        pass."""
        resting = self._built.config.offload and "params" in self._parked
        if resting:
            self.onload(("params",))
        try:
            yield
        finally:
            if resting:
                self.offload(("params",))

    def _moved(self, verb: str, moved: dict[str, int], before: int) -> dict[str, int]:
        after = memory_in_use()
        each = ", ".join(f"{part} {n / 1e6:.1f} MB" for part, n in moved.items()) or "nothing"
        # at_hand moves twice a pass; others when they are asked to
        say = log.debug if self._built.config.offload else log.info
        say("%s: %s; in use %.1f -> %.1f MB", verb, each, before / 1e6, after / 1e6)
        return {**moved, "in_use_before": before, "in_use_after": after}

    def _tensors(self, part: str) -> list[torch.Tensor]:
        b = self._built
        if part == "params":
            return list(b.params.values())
        if b.optimizer is None:
            return []
        if part == "grads":
            return list(gradient_tensors(b.chunks))
        return list(optimizer_tensors(b.optimizer))
