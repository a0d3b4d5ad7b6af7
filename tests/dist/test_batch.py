"""A Batch over several ranks: wherever its rows come from, an engine computes the same as from a
plain dict of all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.api.batch import Batch, Home, Tokens
from megarl.api.tokens import select
from megarl.parallel import exchange
from megarl.parallel.packing import split_minibatches
from tests.dist.engine_jobs import Tensors, batch, loss_fn, make_engine, save_model, state
from tests.dist.invariance import FIGURES
from tests.tiny import VOCAB

OUT: Any = dict(outputs=("logprobs", "entropy"), temperature=0.8)
PLAIN: dict[str, Any] = dict(optimizer={"distributed": False})
SP: dict[str, Any] = dict(tp=2, sequence_parallel=True)
# name -> the rank that brings a row
ORIGINS: dict[str, Callable[[int], int]] = {
    "rank 0": lambda row: 0,
    "every rank": lambda row: row % dist.get_world_size(),
    "the last two": lambda row: (-1 - row % 2) % dist.get_world_size(),
}


def brought(rows: Tensors, origin: str) -> Batch:
    """Returns a Batch of `rows`, each of which one rank brings."""
    owner, rank = ORIGINS[origin], dist.get_rank()
    mine = [i for i in range(len(rows["input_ids"])) if owner(i) == rank]
    whole = rows | {"episode_ids": torch.arange(len(rows["input_ids"]))}
    return Batch.from_local(select(whole, mine) if mine else None)


def weight(b: Tensors) -> float:
    """Returns the rows' weight W: no two rows count alike, and float sums of weights round."""
    return 0.37 * float(b["loss_mask"].sum()) + 0.1 * float(b["advantages"].double().exp().sum())


# ---- exchange


def holds(b: Batch, rows: Tensors) -> bool:
    """Returns whether this rank holds its part of `rows`, bit for bit."""
    return all(
        torch.equal(value, rows[name][b.rows][:, : value.shape[1]] if value.ndim > 1
                    else rows[name][b.rows])
        for name, value in b.padded().items() if name in rows
    )  # fmt: skip


def moved_about() -> list[float]:
    """Moves rows from every origin through several homes; returns the weights of all rows."""
    rows, n = batch(), dist.get_world_size()
    routes = torch.arange(rows["input_ids"].numel() * 6).view(*rows["input_ids"].shape, 2, 3)
    rows["routed_experts"] = routes.to(torch.int16) * rows["attention_mask"][..., None, None]
    before, exchange.CHUNK = exchange.CHUNK, 64  # several messages between two ranks
    g = torch.Generator().manual_seed(1)
    found: list[torch.Tensor] = []
    for origin in ORIGINS:
        b = brought(rows, origin)
        assert holds(b, rows) and torch.equal(b["advantages"], rows["advantages"])
        for of_rank in ((0,) * n, tuple(range(n)), (0, 0, 1, 1), (1, 0, 1, 0), (2, 0, 0, 1)):
            home = Home(of_rank, torch.randint(0, max(of_rank) + 1, (len(b),), generator=g))
            exchange.place(b, home)
            assert holds(b, rows)
            found.append(b.row_sums(weight))
            far = b.fetch([1, 4])
            assert torch.equal(far["input_ids"], select(rows, [1, 4])["input_ids"])
    exchange.CHUNK = before
    assert all(torch.equal(x, found[0]) for x in found)
    return found[0].tolist()


def test_rows_arrive_whole_from_every_origin_at_every_home(worlds):
    first, *others = worlds(4).run(moved_about)
    assert all(x == first for x in others)
    rows = batch()
    assert first == [weight(select(rows, [i])) for i in range(len(rows["input_ids"]))]


# ---- the engine


def steps(path: str, parallel: dict[str, Any], kind: str) -> dict[str, Any]:
    """Compares what an engine computes from a dict and from every origin, of the whole batch and in
    three mini-batches, some of which leave a rank without a row."""
    moe = dict(router_replay="trainer") if kind == "qwen3_moe" else {}
    engine = make_engine(path, parallel, **PLAIN, **moe)
    rows, names = batch(), ["logprobs"] + ["routed_experts"] * bool(moe)

    def forward(given: Any) -> list[Any]:
        found = engine.forward(given, outputs=names, temperature=0.8)
        return [found] if len(names) == 1 else [found[name] for name in names]

    def backward(given: Any) -> dict[str, Any]:
        stats = engine.backward_batch(given, loss_fn, weight, **OUT)
        return {"stats": stats, "grads": state(engine, grads=True)}

    whole = forward(rows)
    if moe:
        rows["routed_experts"] = whole[1]
    parts = split_minibatches(torch.arange(len(rows["input_ids"])), 3, seed=2)
    want = [backward(rows), *(backward(select(rows, part)) for part in parts)]
    for origin in ORIGINS:
        b = brought({k: v for k, v in rows.items() if k != "routed_experts"}, origin)
        outputs = forward(b)
        for tokens, all_rows in zip(outputs, whole, strict=True):
            width = int(tokens.lengths.max()) if len(tokens.lengths) else 0
            assert tokens.values.dtype == all_rows.dtype
            mine, theirs = tokens.padded(width=width), all_rows[b.rows][:, :width]
            assert torch.equal(mine, theirs), (origin, b.rows, mine - theirs)
        if moe:
            b["routed_experts"] = outputs[1]
        same(backward(b), want[0])
        cut = brought({k: v for k, v in rows.items() if k != "routed_experts"}, origin)
        cut.minibatches = parts
        logp = forward(cut)
        if moe:
            cut["routed_experts"] = logp[1]
        for part, result in zip(parts, want[1:], strict=True):
            same(backward(cut.select(part)), result)
    stats = [result["stats"] for result in want]
    engine.destroy()
    return {"stats": stats, "held": len(b.rows), "parts": parts}


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["stats"] == want["stats"]
    for name, value in want["grads"].items():
        assert torch.equal(got["grads"][name], value), name


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Keeps the stats of `steps` in one process, by kind of model."""
    return {}


@pytest.mark.parametrize(
    ("n", "kind", "parallel"),
    [
        (4, "qwen3", {}),
        (4, "qwen3", dict(cp=2)),
        (4, "qwen3", dict(tp=2)),
        (4, "qwen3_moe", dict(pp=2, ep=2)),
        (4, "qwen3_moe", dict(**SP, ep=2)),
    ],
    ids=str,
)
def test_a_batch_is_its_dict_to_the_bit(n, kind, parallel, worlds, models, alone):
    path = save_model(models, kind, False)
    first, *others = worlds(n).run(steps, path, parallel, kind)
    assert all(other["stats"] == first["stats"] for other in others)
    assert all(0 < rank["held"] < 7 for rank in (first, *others))
    if kind not in alone:
        alone[kind] = worlds(1).run(steps, path, {}, kind)[0]["stats"]
    for mine, one in zip(first["stats"], alone[kind], strict=True):
        assert mine["loss"] == pytest.approx(one["loss"], rel=FIGURES, abs=FIGURES)


def borrowing(path: str) -> dict[str, bool]:
    """Runs an engine in another layout than that of the engine that placed the batch."""
    actor, critic = make_engine(path, dict(tp=2), **PLAIN), make_engine(path, dict(pp=2), **PLAIN)
    rows, b = batch(), brought(batch(), "every rank")
    logp = actor.forward(b, **{**OUT, "outputs": ("logprobs",)})
    home, held = b.home, b["loss_mask"].values
    theirs = critic.forward(b, **{**OUT, "outputs": ("logprobs",)})
    all_rows = critic.forward(rows, **{**OUT, "outputs": ("logprobs",)})
    got = critic.backward_batch(b, loss_fn, weight, **OUT)
    want = critic.backward_batch(rows, loss_fn, weight, **OUT)
    result = {
        "stays at home": b.home is home and b["loss_mask"].values is held,
        "moved": tuple(c.dp for c in critic.layout.all_coords) != home.of_rank,
        "results at home": torch.equal(theirs.padded(), select(all_rows_of(all_rows, rows), b.rows)
                                       ["logprobs"]),
        "close": torch.allclose(logp.values, theirs.values, rtol=0, atol=1e-5),
        "same stats": got == want,
    }  # fmt: skip
    b["mine"] = theirs  # fits the batch's rows
    actor.destroy()
    critic.destroy()
    return result


def all_rows_of(logprobs: torch.Tensor, rows: Tensors) -> Tensors:
    return {k: rows[k] for k in ("input_ids", "attention_mask")} | {"logprobs": logprobs}


def test_another_layout_borrows_and_gives_back(worlds, models):
    for said in worlds(4).run(borrowing, save_model(models, "qwen3", True)):
        assert all(said.values()), said


def whole_pairs(path: str) -> tuple[list[int], list[int]]:
    """Runs micro-batches of pairs, placed as pairs, and also after their rows were placed apart."""
    engine = make_engine(path, {}, **PLAIN, max_tokens=10)
    rows = select(batch(), range(6)) | {"group_ids": torch.tensor([4, 0, 9, 9, 0, 4])}
    sizes: list[int] = []

    def pairs(outputs: Tensors, b: Tensors) -> Any:
        ids = b["group_ids"].sort().values.view(-1, 2)
        assert torch.equal(ids[:, 0], ids[:, 1]), "a pair was torn apart"
        sizes.append(len(ids))
        return outputs["logprobs"].sum(), {}

    found = []
    for placed_before in (False, True):
        b = brought(rows, "rank 0")
        if placed_before:
            exchange.place(b, Home(tuple(range(4)), torch.arange(6) % 4))
        sizes.clear()
        engine.eval_batch(b, pairs, lambda b: 0.5, whole_groups=True)
        found.append(sum(sizes))
    engine.destroy()
    return found[0], found[1]


def test_pairs_stay_together_wherever_rows_were_placed(worlds, models):
    counts = worlds(4).run(whole_pairs, save_model(models, "qwen3", True))
    assert [sum(c) for c in zip(*counts, strict=True)] == [3, 3]


# ---- what is refused


def refused(path: str) -> list[str]:
    """Returns the errors of faulty rows on one rank, and of ranks whose shared fields differ."""
    engine = make_engine(path, {}, trained=False)
    second = dist.get_rank() == 1
    bad = batch()
    bad["input_ids"] = bad["input_ids"].clone()
    bad["input_ids"][5, 3] = VOCAB
    said = []

    def attempt(make: Callable[[], Any]) -> None:
        try:
            make()
            said.append("fine")
        except ValueError as e:
            said.append(str(e))

    for origin in ORIGINS:
        attempt(lambda origin=origin: engine.forward(brought(bad, origin)))
    other = brought(batch(), "every rank")
    other["advantages"] = other["advantages"] + second
    attempt(lambda: engine.forward(other))
    typed = brought(batch(), "every rank")
    values = typed["loss_mask"]
    typed["x"] = Tokens(values.values.double() if second else values.values, values.lengths)
    attempt(lambda: engine.forward(typed))
    lefts = batch()
    if second:
        lefts["attention_mask"] = lefts["attention_mask"].flip(1)
    attempt(lambda: Batch.from_local(lefts))
    attempt(lambda: Batch.from_local({**batch(), "x": torch.zeros(7)} if second else batch()))
    attempt(lambda: engine.forward(brought(batch(), "rank 0")))
    engine.destroy()
    return said


def test_what_one_rank_sees_is_every_ranks_error(worlds, models):
    first, *others = worlds(4).run(refused, save_model(models, "qwen3", True))
    assert all(other == first for other in others)
    outside = (
        f"input_ids[5, 3] = {VOCAB} is outside of the model's vocabulary of {VOCAB} (1 such tokens "
        "in the batch); use the tokenizer that belongs to the model"
    )
    assert first[:3] == [outside] * 3
    assert "different batches: advantages of ranks [1] differ" in first[3]
    assert "different batches: x of ranks [1] differ" in first[4]
    assert first[5].startswith("Batch.from_local, rank 1: attention_mask of row ")
    assert first[6].startswith("Batch.from_local, ranks 0 and 1: the rows do not have the same")
    assert first[7] == "fine"
