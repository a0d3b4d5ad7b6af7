"""Shares host memory between processes of one machine, without a name in any file system.

Nobody has to clean it up: the kernel frees it with its last mapping, however its owners end.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import torch

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # one per running kernel


@dataclass(frozen=True)
class SharedMemoryHandle:
    """Says where other processes find the memory, and how they recognise it."""

    machine: str
    pid: int
    fd: int
    inode: tuple[int, int]
    nbytes: int


def offer(nbytes: int) -> SharedMemoryHandle | None:
    """Makes `nbytes` of memory to `attach`. Returns None where the system has no such thing
    (macOS).

    Close `fd` when everybody has attached.
    """
    if not hasattr(os, "memfd_create"):
        return None
    fd = os.memfd_create("megarl")
    os.ftruncate(fd, nbytes)
    return SharedMemoryHandle(machine(), os.getpid(), fd, _inode(fd), nbytes)


def attach(offered: SharedMemoryHandle) -> torch.Tensor | None:
    """Returns the memory as a uint8 tensor; None where it is on another machine or out of reach."""
    if offered.machine != machine():
        return None
    try:
        fd = os.open(f"/proc/{offered.pid}/fd/{offered.fd}", os.O_RDWR)
    except OSError:  # another container or user
        return None
    try:
        if _inode(fd) != offered.inode:  # another container's process of the same number
            return None
        return torch.frombuffer(mmap.mmap(fd, offered.nbytes), dtype=torch.uint8)
    finally:
        os.close(fd)


def machine() -> str:
    """Returns one name for each running kernel."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def _inode(fd: int) -> tuple[int, int]:
    stat = os.fstat(fd)
    return stat.st_dev, stat.st_ino
