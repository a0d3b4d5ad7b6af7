"""Weights from one Megatron layout into another over gloo, from rank to rank."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megarl.config.engine import ParallelConfig
from megarl.models.hf_config import read_hf_config
from megarl.models.params import init_params, named_params
from megarl.models.piece_table import PieceTable, build_piece_table
from megarl.parallel.layout import Layout
from megarl.planning.memory import layer_activations
from megarl.transfer.reallocate import Reallocator, plan_reallocation
from megarl.wire.process_group import bounded
from tests.dist.models_util import built_model, positions, thd
from tests.dist.world import World
from tests.tiny import save_tiny

Params = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def world(worlds: Any) -> World:
    return worlds(4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": save_tiny(root / "llama", "llama", tie=True),
        "qwen3_moe": save_tiny(root / "qwen3_moe", "qwen3_moe"),
        "deepseek_v3": save_tiny(root / "deepseek_v3", "deepseek_v3", layers=2),
    }


def run_move(
    path: Path, source: dict[str, Any], target: dict[str, Any], bound: int
) -> list[tuple[list[str], dict[str, float]]]:
    """Moves weights between two built models and back, each time into parameters that are NaN
    before; returns (parameters with other bits than before, metrics) of both moves."""
    results = []
    with (
        built_model(path, source, load=False, seed=3) as (a, groups),
        built_model(path, target, load=False, seed=3) as (b, _),
    ):
        before, after = named_params(a.chunks), named_params(b.chunks)
        there, back = (
            Reallocator(x.table, y.table, groups.rank, dtype=torch.float32, bucket_bytes=bound)
            for x, y in ((a, b), (b, a))
        )
        for move, x, y in ((there, before, after), (back, after, before)):
            want = {n: p.detach().clone() for n, p in y.items()}
            for p in y.values():
                p.data.fill_(float("nan"))
            stats = move(x, y)
            results.append(([n for n in want if not torch.equal(y[n], want[n])], stats))
    return results


@pytest.mark.parametrize(
    "kind, source, target, bound",
    (
        ("llama", dict(pp=2), dict(tp=2, pp=2), 1 << 20),
        ("llama", dict(tp=2, pp=2), dict(tp=4), 10_000),
        ("llama", dict(pp=2, vpp=2), dict(pp=4), 10_000),
        (
            "qwen3_moe",
            dict(tp=2, ep=2, sequence_parallel=True),
            dict(pp=2, ep=2, etp=1),
            50_000,
        ),
        ("deepseek_v3", dict(ep=4), dict(tp=2, pp=2, etp=2, sequence_parallel=True), 1 << 20),
    ),
)
def test_weights_arrive_and_come_back(
    world: World,
    models: dict[str, Path],
    kind: str,
    source: dict[str, Any],
    target: dict[str, Any],
    bound: int,
) -> None:
    model = read_hf_config(models[kind])
    a, b = (
        build_piece_table(model, Layout.from_config(ParallelConfig(**p), 4))
        for p in (source, target)
    )
    ranks = world.run(run_move, models[kind], source, target, bound)
    assert all(wrong == [] for rank in ranks for wrong, _ in rank)
    for (x, y), way in zip(((a, b), (b, a)), zip(*ranks, strict=True), strict=True):
        assert max(f["peak"] for _, f in way) <= bound
        plan = plan_reallocation(x, y, range(4), range(4), dtype=torch.float32, bucket_bytes=bound)
        steps = [step for rank in range(4) for step in plan.steps(rank, range(4), bound)]
        moved = [s for step in steps for message in step.sends for s in message.slices]
        assert sum(f["sent"] for _, f in way) == sum(4 * s.numel for s in moved)
        free = x.layout.dp == 2 and x.layout.pp == y.layout.pp == y.layout.tp == 2
        assert bool(moved) is not free  # every rank has what it needs


def filled(table: PieceTable, rank: int, dtype: torch.dtype) -> Params:
    params = {
        n: torch.zeros(p.shape, dtype=dtype)
        for n, p in table.local_params(table.layout.coords(rank)).items()
    }
    init_params(table, table.layout.coords(rank), params, seed=5)
    return params


def run_apart(path: Path) -> int:
    """Moves from ranks 0 and 1, which train, to ranks 3 and 2 (in that order) in bf16."""
    model, rank = read_hf_config(path), dist.get_rank()
    a = build_piece_table(model, Layout.from_config(ParallelConfig(pp=2), 2))
    b = build_piece_table(model, Layout.from_config(ParallelConfig(tp=2), 2))
    targets = [3, 2]
    move = Reallocator(
        a, b, rank, dtype=torch.bfloat16, source_ranks=[0, 1], target_ranks=targets,
        bucket_bytes=20_000,
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"rank {rank}: give `(source|target)` on ranks"):
        move(None if rank < 2 else {}, None)
    sent = 0

    def count(ops: list[Any]) -> list[Any]:
        nonlocal sent
        sent += sum(op.tensor.numel() for op in ops if op.op is dist.isend)
        return real(ops)

    real = dist.batch_isend_irecv
    with mock.patch.object(dist, "batch_isend_irecv", count):
        if rank in targets:
            want = filled(b, targets.index(rank), torch.bfloat16)
            have = {n: torch.full_like(p, 7) for n, p in want.items()}
            move(None, have)
            assert all(torch.equal(have[n], want[n]) for n in want)
        else:
            stats = move(filled(a, rank, torch.float32), None)
            assert stats["sent"] == sent
    return sent


def test_layouts_on_other_ranks_and_in_other_dtypes(world: World, models: dict[str, Path]) -> None:
    path = models["llama"]
    sent = world.run(run_apart, path)
    table = build_piece_table(read_hf_config(path), Layout(tp=2))
    norms = sum(t.numel for t in table.tensors if len(t.shape) == 1)
    weights = sum(t.numel for t in table.tensors)
    assert sum(sent) == 2 * (weights + norms)  # every number goes once to each rank that holds it
    assert sent[2:] == [0, 0]


def run_disagree(path: Path) -> str:
    table = build_piece_table(read_hf_config(path), Layout(dp=4))
    with pytest.raises(ValueError, match="planning a reallocation: rank 3 has another") as e:
        Reallocator(
            table, table, dist.get_rank(), dtype=torch.float32, bucket_bytes=1 + dist.get_rank()
        )
    return str(e.value)


def test_ranks_that_plan_differently_hear_of_it(world: World, models: dict[str, Path]) -> None:
    assert all("bucket_bytes" in said for said in world.run(run_disagree, models["llama"]))


def run_one_that_cannot_plan(path: Path) -> tuple[str, str, float]:
    """Gives rank 1 alone a bound that it refuses, in a group that waits for long."""
    table = build_piece_table(read_hf_config(path), Layout(dp=4))
    rank, start = dist.get_rank(), time.monotonic()
    bound = 0 if rank == 1 else 1 << 20
    with (
        bounded(None, 20.0),
        pytest.raises((ValueError, RuntimeError)) as e,
    ):
        Reallocator(table, table, rank, dtype=torch.float32, bucket_bytes=bound)
    return e.type.__name__, str(e.value), time.monotonic() - start


def test_a_rank_that_cannot_plan_is_an_error_on_every_rank(
    world: World, models: dict[str, Path]
) -> None:
    for rank, (kind, text, seconds) in enumerate(
        world.run(run_one_that_cannot_plan, models["llama"])
    ):
        assert kind == ("ValueError" if rank == 1 else "OtherRankFailed"), text
        assert "bucket_bytes=0" in text and (rank == 1 or "rank 1" in text)
        assert seconds < 15, "ranks wait for the group's timeout"


def test_wrong_ranks_are_refused(models: dict[str, Path]) -> None:
    table = build_piece_table(read_hf_config(models["llama"]), Layout(tp=2))
    with pytest.raises(ValueError, match=r"target_ranks=\[0, 0\]: name each of the layout's 2"):
        Reallocator(table, table, 0, dtype=torch.float32, target_ranks=[0, 0])
    with pytest.raises(ValueError, match="bucket_bytes=0"):
        Reallocator(table, table, 0, dtype=torch.float32, bucket_bytes=0)


def run_saved(paths: list[Path], tokens: int) -> list[int]:
    """Returns the bytes that backward keeps of each model, without its parameters."""
    totals = []
    for path in paths:
        with built_model(path, {}, dtype=torch.bfloat16) as (model, _):
            params = {p.untyped_storage().data_ptr() for p in named_params(model.chunks).values()}
            saved: dict[int, torch.Tensor] = {}  # by address; kept alive

            def keep(x: torch.Tensor, saved: dict[int, torch.Tensor] = saved) -> torch.Tensor:
                saved[x.untyped_storage().data_ptr()] = x
                return x

            ids = torch.arange(tokens)[None] % 100
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                model.chunks[0](ids, positions(ids), None, packed_seq_params=thd([tokens]))
            totals.append(
                sum(x.untyped_storage().nbytes() for at, x in saved.items() if at not in params)
            )
    return totals


def test_a_layer_keeps_the_activations_that_are_planned(world: World, tmp_path: Path) -> None:
    """Torch's norms also keep fp32 and normalised copies of their inputs: 8 bytes a number."""
    paths, tokens = [tmp_path / "2", tmp_path / "3"], 256
    for path in paths:
        save_tiny(path, "llama", layers=int(path.name), hidden_size=128, intermediate_size=256)
    two, three = world.run(run_saved, paths, tokens)[0]
    model = read_hf_config(paths[0])
    planned = layer_activations(model, Layout(), 0, tokens)
    assert three - two == pytest.approx(planned + 8 * tokens * model.hidden_size, rel=0.01)
