"""Compares the safetensors files of two directories."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file


def read_all(path: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        out.update(load_file(file))
    return out


def same(a: Path, b: Path) -> None:
    want, have = read_all(a), read_all(b)
    assert want.keys() == have.keys()
    for name, t in want.items():
        assert t.dtype == have[name].dtype, name
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
        assert torch.equal(t.view(bits), have[name].view(bits)), name
