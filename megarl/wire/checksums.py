"""Computes the checksum of both sides of a weight sync: equal strings mean equal bits."""

from __future__ import annotations

import ctypes
import hashlib

import torch


def tensor_checksum(t: torch.Tensor) -> str:
    """Returns the SHA-256 (64 hex digits) of the tensor's bytes in row-major order, in the dtype it
    has.

    The shape is not part of it: compare tensors by their HF names, and cast to the dtype of the
    other side first.
    """
    raw = t.detach().to("cpu").contiguous()
    # numpy() would make the storage one that cannot be resized, so memory could not be given back
    return hashlib.sha256((ctypes.c_ubyte * raw.nbytes).from_address(raw.data_ptr())).hexdigest()
