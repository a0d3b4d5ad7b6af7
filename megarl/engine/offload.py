"""Moves tensors out of device memory and back, under the feet of everything that refers to them.

A parameter, its slice in the data-parallel buffer, the optimizer's shard of it: many tensors look
at few storages. So storages are moved, not tensors: their bytes go to host memory and the storage
shrinks to nothing; later it grows back and every tensor is valid again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


class ParkedStorages:
    """Host copies of device storages, from `park` until `restore`.

    `scratch` tensors (gradients between steps) lose their numbers and come back as zeros. Host
    memory holds one copy of the rest, pinned where the device is a GPU.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._scratch: list[tuple[torch.UntypedStorage, int]] = []

    def park(self, tensors: Iterable[torch.Tensor], scratch: Iterable[torch.Tensor] = ()) -> None:
        assert not self._kept and not self._scratch, "already parked"
        seen: set[int] = set()
        for storage in _storages(tensors, seen):
            host = torch.empty(
                storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda"
            )
            host.copy_(_bytes(storage), non_blocking=True)
            self._kept.append((storage, host))
        self._scratch.extend((s, s.nbytes()) for s in _storages(scratch, seen))
        _synchronize()
        for storage, _ in (*self._kept, *self._scratch):
            storage.resize_(0)
        torch.cuda.empty_cache()

    def restore(self) -> None:
        for storage, host in self._kept:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=True)
        for storage, nbytes in self._scratch:
            storage.resize_(nbytes)
            _bytes(storage).zero_()
        _synchronize()
        self._kept, self._scratch = [], []


def _storages(tensors: Iterable[torch.Tensor], seen: set[int]) -> Iterator[torch.UntypedStorage]:
    """Every non-empty storage once; `seen` grows."""
    for t in tensors:
        storage = t.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Main parameters and states of a megatron optimizer, chained or not."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        torch_optimizer = inner.optimizer
        if torch_optimizer is None:  # this rank holds no parameter of that kind
            continue
        for group in torch_optimizer.param_groups:
            yield from group["params"]
        for state in torch_optimizer.state.values():
            yield from (v for v in state.values() if torch.is_tensor(v))


def gradient_tensors(chunks: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The data-parallel wrappers' gradient buffers."""
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data
