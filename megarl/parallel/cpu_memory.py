"""Says whether the C library keeps memory that tensors on a CPU have freed.

A tensor that comes fresh from the kernel has to be faulted in, which takes longer than the pass
that fills it. glibc gives large blocks back at once and the end of its heap soon, so that every
micro-batch would pay this again. Other allocators (jemalloc, tcmalloc) decide for themselves, and
elsewhere than on Linux nothing happens.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of malloc.h
_GIVEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


@cache
def keep_freed() -> bool:
    """Keeps what is freed for the tensors to come, from here on; the peak stays the same. Returns
    whether it does: not where the environment tells glibc something else, or without glibc."""
    library = _glibc()
    if library is None or any(name in os.environ for name in _GIVEN):
        return False
    return bool(library.mallopt(_MMAP_MAX, 0) and library.mallopt(_TRIM_THRESHOLD, -1))


def give_back() -> None:
    """Gives the kernel back what is freed and still kept."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
