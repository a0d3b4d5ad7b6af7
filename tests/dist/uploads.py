"""What the trainer ranks of the tests of weight sync run. Their parameters are those of the piece
table, filled from an HF directory: no model is built.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megarl.api.records import WeightUpdateMeta
from megarl.ckpt.hf import load_hf, save_hf
from megarl.config.engine import ParallelConfig
from megarl.models.hf_config import read_hf_config
from megarl.models.piece_table import PieceTable, build_piece_table
from megarl.parallel.layout import Layout
from megarl.utils.http import call_json
from megarl.weight_sync.transports import WeightSender, WeightSource

SOME = 60_000  # bytes of a bucket: about ten of them


def sharded(
    source: Path, parallel: dict[str, Any], dtype: torch.dtype = torch.float32
) -> tuple[Any, ...]:
    """(table, layout, rank, params) of this rank: WeightSource's and save_hf's arguments."""
    rank = dist.get_rank()
    layout = Layout.from_config(ParallelConfig(**parallel), dist.get_world_size())
    table: PieceTable = build_piece_table(read_hf_config(source), layout)
    local = table.local_params(layout.coords(rank))
    params = {n: torch.empty(p.shape, dtype=dtype) for n, p in local.items()}
    load_hf(source, table, layout, rank, params)
    return table, layout, rank, params


def flipped(source: Path, target: Path, share: float, seed: int = 0) -> Path:
    """Copies an fp32 model with the last bit flipped in `share` of its numbers."""
    shutil.copytree(source, target)
    rng = torch.Generator().manual_seed(seed)
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        for t in tensors.values():
            t.view(torch.int32)[torch.rand(t.shape, generator=rng) < share] ^= 1
        save_file(tensors, file, metadata={"format": "pt"})
    return target


@dataclass(frozen=True)
class Upload:
    """source: the weights; saved: where `save` is to write them beside; before: what a server is
    asked first (address, path, body)."""

    source: Path
    saved: Path | None
    meta: WeightUpdateMeta
    before: tuple[str, str, dict[str, Any]] | None = None


def run_uploads(parallel: dict[str, Any], uploads: list[Upload]) -> list[dict[str, float] | str]:
    """Through one sender, as a training does; the figures of each, or its error."""
    held = {u.source: sharded(u.source, parallel) for u in uploads}
    table, layout, rank, params = held[uploads[0].source]
    params = {n: p.clone() for n, p in params.items()}
    sender = WeightSender(WeightSource(table, layout, rank, params))
    out: list[dict[str, float] | str] = []
    try:
        for upload in uploads:
            for name, value in held[upload.source][3].items():
                params[name].copy_(value)
            if upload.saved is not None:
                save_hf(upload.saved, table, layout, rank, params)
            if upload.before is not None and rank == 0:
                address, path, body = upload.before
                call_json("POST", address, path, body, timeout=60)
            try:
                out.append(sender.upload(upload.meta))
            except RuntimeError as e:
                out.append(str(e))
    finally:
        sender.close()
    return out
