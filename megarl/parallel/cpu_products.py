"""Computes matrix products on CPUs by the faster of torch's two libraries.

torch takes MKL for float32, which leaves half of a core's width unused where it is not Intel's:
oneDNN, which torch brings too, uses all of it on an AMD core with AVX-512, and takes plain
tensors. MEGARL_ONEDNN=0 or 1 in the environment overrules the choice. No function
here knows gradients.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_FEW_ROWS = 4  # from here on oneDNN pays
# of torch, and of oneDNN below it, with the least of each: either keeps what the other forgets
_CAPACITIES = {"LRU_CACHE_CAPACITY": 1, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": 0}


@cache
def by_onednn() -> bool:
    """Returns whether float32 products go through oneDNN. It depends on the machine alone, so that
    equal machines give equal bits. Raises ValueError for a MEGARL_ONEDNN other than 0 or 1."""
    given = os.environ.get("MEGARL_ONEDNN", "")
    if given not in ("", "0", "1"):
        raise ValueError(
            f"MEGARL_ONEDNN={given}: use 0 (never), 1 (where it can) or leave it unset"
        )
    has = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has and (given == "1" or (given == "" and wide and not _is_intel()))


def remember_shapes(count: int) -> None:
    """Has oneDNN keep the code that it made for the `count` shapes of factors met last, from this
    process's first product on; what the environment says comes first. A shape takes some 0.6 MB,
    and 1.5 ms to make. By itself torch keeps 1,024, and their small blocks, which live long between
    large tensors, keep these from growing together again: where every micro-batch has a length of
    its own, memory grows for hundreds of steps (https://github.com/pytorch/pytorch/issues/27971).
    Raises ValueError for a capacity in the environment that torch would crash on.
    """
    for name, least in _CAPACITIES.items():
        given = os.environ.setdefault(name, str(count))
        if not given.isdecimal() or int(given) < least:
            raise ValueError(f"{name}={given}: use a number of at least {least}, or leave it unset")


def _is_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True  # unknown: torch's own choice


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x [...,n,K] times the transpose of weight [N,K], plus bias [N]. Without gradients."""
    if takes(x, weight) and x.numel() >= _FEW_ROWS * x.shape[-1] > 0:
        factors = _plain(x), _plain(weight)
        found: Tensor = torch.ops.mkldnn._linear_pointwise(*factors, bias, "none", [], "")
        return found
    return torch.nn.functional.linear(x, weight, bias)


def _plain(t: Tensor) -> Tensor:
    """Returns t, or a copy where it is neither whole rows nor a transposed matrix of such: oneDNN
    refuses numbers that repeat in memory, as in an expanded gradient."""
    if t.is_contiguous() or (t.ndim == 2 and t.t().is_contiguous()):
        return t
    return t.contiguous()


def transposed_product(g: Tensor, x: Tensor) -> Tensor:
    """Returns the transpose of g [n,N] times x [n,K]: [N,K], a weight's gradient."""
    if not takes(g, x):
        return g.t() @ x
    if g.shape[1] > x.shape[1]:  # oneDNN is faster with the longer side as the weight
        return linear(x.t(), g.t()).t()
    return linear(g.t(), x.t())


def takes(x: Tensor, weight: Tensor) -> bool:
    """Returns whether oneDNN computes the product of these factors: float32 on a CPU."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and by_onednn()
    )
