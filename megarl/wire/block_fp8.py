"""Makes and reads block-wise FP8 weights, as DeepSeek-V3 publishes and SGLang serves them.

A matrix W [O, I] is cut into blocks of 128 x 128. Each is stored as e4m3 numbers Q and one fp32
number s, its "scale_inv", with W ~ Q * s:

    s = max(amax(|W|), 1e-12) / 448          448 is the largest e4m3 number
    Q = e4m3(W / s), in fp32, rounded to nearest even

`NAME.weight` becomes float8_e4m3fn [O, I], and `NAME.weight_scale_inv` float32 [ceil(O/128),
ceil(I/128)] stands beside it. Only the linear maps of the layers are stored so: embeddings, the
output layer, norms, biases and routers keep their dtype.

Pure functions of tensors; temporaries are as large as STRIP rows in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

BLOCK, STRIP = 128, 1024
LARGEST = torch.finfo(torch.float8_e4m3fn).max
SUFFIX = "_scale_inv"
Spec = tuple[tuple[int, ...], torch.dtype]


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the scales of a matrix: [O, I] -> [ceil(O/128), ceil(I/128)]."""
    return tuple(-(-n // BLOCK) for n in shape)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns Q float8_e4m3fn [O, I] and s float32 [ceil(O/128), ceil(I/128)] of W [O, I] in any
    dtype."""
    q = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    s = torch.empty(scale_shape(tuple(weight.shape)), device=weight.device)
    for rows, scales, strip in zip(q.split(STRIP), s.split(STRIP // BLOCK), weight.split(STRIP)):
        blocks = _blocks(strip.float())
        scales.copy_(blocks.abs().amax((1, 3)).clamp(min=1e-12) / LARGEST)
        scaled = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST)
        rows.copy_(scaled.flatten(2).flatten(0, 1)[: rows.shape[0], : rows.shape[1]])
    return q, s


def dequantize(q: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Returns Q * s in float32 [O, I]."""
    out = torch.empty(q.shape, device=q.device)
    for rows, scales, strip in zip(out.split(STRIP), s.split(STRIP // BLOCK), q.split(STRIP)):
        scaled = _blocks(strip.float()) * scales[:, None, :, None]
        rows.copy_(scaled.flatten(2).flatten(0, 1)[: rows.shape[0], : rows.shape[1]])
    return out


def dequantized(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields named tensors with every pair of Q and s as its product, others as they are."""
    by_name = dict(tensors)
    for name, t in by_name.items():
        if t.dtype == torch.float8_e4m3fn:
            yield name, dequantize(t, by_name[name + SUFFIX])
        elif not _is_scale(name, by_name):
            yield name, t


def plain_specs(specs: Mapping[str, Spec]) -> dict[str, Spec]:
    """Returns `specs` without the scales: one for each tensor of `dequantized`, where an FP8 matrix
    still has its dtype. Raises ValueError naming a matrix without the scales it needs."""
    for name, (shape, dtype) in specs.items():
        if dtype != torch.float8_e4m3fn:
            continue
        need = scale_shape(shape), torch.float32
        if len(shape) != 2 or specs.get(name + SUFFIX) != need:
            raise ValueError(
                f"{name}: {dtype} of shape {list(shape)} needs {name + SUFFIX} with it, float32 of "
                f"shape {list(need[0])}"
            )
    return {n: s for n, s in specs.items() if not _is_scale(n, specs)}


def _is_scale(name: str, names: Mapping[str, Any]) -> bool:
    return name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in names


def _blocks(strip: torch.Tensor) -> torch.Tensor:
    """Returns [o, i] as [ceil(o/128), 128, ceil(i/128), 128], filled up with zeros."""
    rows, columns = strip.shape
    padded = torch.nn.functional.pad(strip, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
