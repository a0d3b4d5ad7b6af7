"""What a rank reads of a model directory: its own bytes, a slice at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from megarl.ckpt.hf import load_hf
from megarl.ckpt.safetensors import SafetensorsDir, plan_files, shard_header, write_index
from megarl.models.hf_config import parse_hf_config
from megarl.models.piece_table import PieceTable, build_piece_table
from megarl.parallel.layout import Layout
from tests.tiny import save_tiny

# Llama-3.1-70B's config.json, as far as weights go
LLAMA_70B: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"], vocab_size=128256, hidden_size=8192,
    intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
    tie_word_embeddings=False,
)  # fmt: skip


def load(path: Path, table: PieceTable, layout: Layout, rank: int, dtype: torch.dtype) -> list[int]:
    """Bytes of every read that a rank makes, all its parameters filled."""
    reads: list[int] = []
    real = SafetensorsDir.read

    def counted(files: SafetensorsDir, name: str, box: tuple[slice, ...]) -> torch.Tensor:
        found = real(files, name, box)
        reads.append(found.numel() * found.element_size())
        return found

    shapes = {n: p.shape for n, p in table.local_params(layout.coords(rank)).items()}
    params = {n: torch.full(s, torch.nan, dtype=dtype) for n, s in shapes.items()}
    with patch.object(SafetensorsDir, "read", counted):
        load_hf(path, table, layout, rank, params)
    assert all(p.isfinite().all() for p in params.values())
    return reads


def own_bytes(table: PieceTable, layout: Layout, rank: int, itemsize: int) -> tuple[int, int]:
    """Of all pieces a rank holds, and of the largest one."""
    c = layout.coords(rank)
    sizes = [p.numel * itemsize for t in table.tensors for p in t.held_by(c)]
    return sum(sizes), max(sizes)


def test_ranks_read_their_own_bytes_and_together_all_of_them(tmp_path: Path) -> None:
    path = save_tiny(tmp_path, "llama", tie=False)
    layout = Layout(tp=4, pp=2)
    table = build_piece_table(
        parse_hf_config(json.loads((path / "config.json").read_text())), layout
    )
    total = 0
    for rank in range(layout.world_size):
        reads = load(path, table, layout, rank, torch.float32)
        assert (sum(reads), max(reads)) == own_bytes(table, layout, rank, 4)
        total += sum(reads)
    replicas = sum(p.numel * 4 for t in table.tensors for p in t.replicas)
    assert total == replicas + sum(t.numel * 4 for t in table.tensors)


def test_a_rank_of_a_model_of_70b(tmp_path: Path) -> None:
    """140 GB in files of holes. One layer of 80, cut in 8: what is read is what is held."""
    model, layout = parse_hf_config(LLAMA_70B), Layout(tp=8, pp=80)
    table = build_piece_table(model, layout)
    plan = plan_files(
        table, torch.bfloat16, writers=[0], max_shard_bytes=5 << 30, bucket_bytes=1 << 30
    )
    for name, members in plan.files.items():
        with (tmp_path / name).open("wb") as f:
            f.write(header := shard_header(members))
            f.truncate(len(header) + sum(m.nbytes for m in members))
    write_index(tmp_path, plan.files)
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) > 141_107_412_992  # 2 bytes of 70.6 B
    assert sum(f.stat().st_blocks * 512 for f in tmp_path.iterdir()) < 10e6
    rank = layout.dense_rank(pp=40, tp=3)
    reads = load(tmp_path, table, layout, rank, torch.bfloat16)
    assert (sum(reads), max(reads)) == own_bytes(table, layout, rank, 2)
    assert sum(reads) < 220e6 and max(reads) <= 8192 * 28672 // 8 * 2


def test_files_are_spread_over_the_ranks_that_hold_them() -> None:
    """Of each stage, replicas first, as they are often other nodes; all ranks have their turn."""
    model, layout = parse_hf_config(LLAMA_70B), Layout(tp=2, pp=2, dp=2)
    table = build_piece_table(model, layout)

    def plan(writers: list[int]) -> Any:
        return plan_files(
            table, torch.bfloat16, writers=writers, max_shard_bytes=5 << 30,
            bucket_bytes=256 << 20,
        )  # fmt: skip

    every = plan(list(range(8)))
    assert every.files.keys() == plan([0]).files.keys() == every.writer_of.keys()
    assert list(every.writer_of.values())[:4] == [0, 2, 1, 3]  # rank = tp + 2 dp
    load = dict.fromkeys(range(8), 0)
    for file, writer in every.writer_of.items():
        load[writer] += sum(m.nbytes for m in every.files[file])
    assert max(load.values()) <= 1.5 * min(load.values())
    first = every.writers[:8]
    assert sorted(first) == list(range(8))  # of the first eight buckets, one for each
    for file, members in every.files.items():
        stages = {table.by_name[m.name].pieces[0].place.pp for m in members}
        assert layout.coords(every.writer_of[file]).pp in stages
    assert set(plan([0, 5]).writer_of.values()) == {0, 5}
    assert set(plan([0]).writers) == {0}
