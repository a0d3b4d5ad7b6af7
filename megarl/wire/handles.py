"""Writes memory of this machine as text from which another process can map it.

The text is base64 of a pickle, as SGLang's /update_weights_from_tensor takes it: a CUDA IPC handle
for a GPU's memory, the name of a shared file for host memory. Its types are those that SGLang's
unpickler lets pass, and none is SGLang's own.

Each text is for one reader, who reads it once: torch counts the readers to come, and memory
announced to one that never comes is only freed with its writer.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from megarl.utils.env import allocator_settings, without_expandable_segments

_DEVICE = 6  # which argument of torch's rebuild_cuda_tensor is the device
_HAS_SETTER = hasattr(torch._C, "_accelerator_setAllocatorSettings")  # since torch 2.9
_GROWING = "expandable_segments:True"
_DTYPES = {
    str(d).removeprefix("torch.")
    for d in (torch.uint8, torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
_REBUILDERS = (
    "rebuild_tensor",
    "rebuild_typed_storage",
    "rebuild_storage_filename",
    "rebuild_storage_empty",
)
_ALLOWED = {
    *(("torch", name) for name in ("Tensor", "Size", *_DTYPES)),
    *(("torch.storage", name) for name in ("UntypedStorage", "TypedStorage")),
    *(("torch.multiprocessing.reductions", name) for name in _REBUILDERS),
}

segments_grow = False  # whether expand_segments has changed the allocator of this process


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """Returns uint8 [nbytes] that `pack` can hand to other processes. Host memory is freed with its
    last user, however that process ends."""
    if device.type == "cuda":
        with _fixed_segments():
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
    with _without_stderr():  # the first call starts a process that keeps what it inherits
        storage = torch.UntypedStorage._new_using_filename_cpu(nbytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def pack(name: str, tensor: torch.Tensor) -> str:
    """Returns the text of a tensor in memory from `allocate`, for one reader, under this name."""
    out = io.BytesIO()
    _Pickler(out).dump([(name, tensor)])
    return base64.b64encode(out.getvalue()).decode()


def pack_empty(name: str) -> str:
    """Returns the text of an empty tensor of this name: it needs no shared memory, and only types
    that SGLang's unpickler takes."""
    out = io.BytesIO()
    ForkingPickler(out, pickle.HIGHEST_PROTOCOL).dump([(name, torch.empty(0))])
    return base64.b64encode(out.getvalue()).decode()


def unpack(text: str) -> Sequence[tuple[str, torch.Tensor]]:
    """Returns the tensors under their names, in the writer's memory. Raises ValueError for any
    other text."""
    try:
        content = _Unpickler(io.BytesIO(base64.b64decode(text, validate=True))).load()
        return [(str(name), tensor) for name, tensor in content]
    except (ValueError, pickle.UnpicklingError, EOFError) as e:
        raise ValueError(f"not a list of tensors: {e}") from e
    except (AttributeError, KeyError, TypeError, IndexError) as e:
        raise ValueError(f"not a list of tensors: {type(e).__name__}: {e}") from e


class _Pickler(ForkingPickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type == "cuda":
            rebuild, arguments = reductions.reduce_tensor(obj)
            # Processes number GPUs each in their own way. SGLang knows them by their uuid.
            return rebuild, _replaced(arguments, uuid_of(obj.device))
        if isinstance(obj, torch.UntypedStorage):
            # by name: torch's default is a file descriptor, which only relatives can be sent
            place = obj._share_filename_cpu_()
            obj._shared_incref()  # of the reader to come
            return reductions.rebuild_storage_filename, (type(obj), *place)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` writes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"):
            return _rebuild_cuda_tensor
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return super().find_class(module, name)


def _rebuild_cuda_tensor(*arguments: Any) -> torch.Tensor:
    uuid = arguments[_DEVICE]
    for i in range(torch.cuda.device_count()):
        if uuid_of(torch.device("cuda", i)) == uuid:
            return reductions.rebuild_cuda_tensor(*_replaced(arguments, i))
    raise ValueError(f"it lies on GPU {uuid}, which this process does not see")


def uuid_of(device: torch.device) -> str:
    """Returns the UUID of a GPU, which all processes of a machine know it by."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _replaced(arguments: tuple[Any, ...], device: str | int) -> tuple[Any, ...]:
    return *arguments[:_DEVICE], device, *arguments[_DEVICE + 1 :]


def expand_segments(env: Mapping[str, str]) -> None:
    """Lets torch's allocator on GPUs grow its segments from now on: micro-batches differ in length,
    and segments of fixed sizes would fragment. Settings of the allocator in `env` stay. torch
    before 2.9 has no function to change them."""
    global segments_grow
    if not allocator_settings(env) and _HAS_SETTER:
        torch._C._accelerator_setAllocatorSettings(_GROWING)
        segments_grow = True


@contextlib.contextmanager
def _fixed_segments() -> Iterator[None]:
    """Makes torch's allocator use segments that do not grow, the only ones that a handle shares.
    Raises RuntimeError if the user lets segments grow and torch cannot change that."""
    settings = _GROWING if segments_grow else allocator_settings(os.environ)
    fixed = without_expandable_segments(settings)
    if fixed == settings:
        yield
        return
    if not _HAS_SETTER:
        raise RuntimeError(
            f"PYTORCH_CUDA_ALLOC_CONF={settings}: torch {torch.__version__} cannot share segments "
            "that grow with other processes; remove expandable_segments:True"
        )
    torch._C._accelerator_setAllocatorSettings(fixed)
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Hides stderr inside. torch starts its torch_shm_manager with our stderr; that process lives
    on while a server is connected to it, and a reader of our stderr through a pipe would wait for
    it."""
    kept = os.dup(2)
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        os.close(null)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
