"""Every rank refuses faulty inputs of a pass with the same clear error, and learns of the user's
code that failed on one of them; no rank hangs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.algos import Actor
from megarl.api.batch import Batch
from megarl.api.tokens import select
from megarl.config.algo import PPOActorConfig
from tests.dist.engine_jobs import Tensors, batch, loss_fn, make_engine, save_model, weight_fn
from tests.tiny import VOCAB

OUT = ("logprobs", "entropy")


def call(engine: Any, verb: str, b: Tensors, **kw: Any) -> str:
    """Returns the ValueError of the pass, or "fine"."""
    asked = {"outputs": OUT, **kw}
    try:
        if verb == "forward":
            engine.forward(b, **asked)
        else:
            getattr(engine, verb)(b, loss_fn, weight_fn, **asked)
    except ValueError as e:
        return str(e)
    return "fine"


def with_id(value: int, row: int, position: int) -> Tensors:
    b = batch()
    ids = b["input_ids"].clone()
    ids[row, position] = value
    return {**b, "input_ids": ids}


def ids_outside(path: str, parallel: dict[str, Any]) -> list[str]:
    engine = make_engine(path, parallel)
    said = [
        call(engine, verb, with_id(value, 1, 2))
        for verb in ("train_batch", "eval_batch", "forward")
        for value in (VOCAB, 10**6, -1)
    ]
    row, padded = (~batch()["attention_mask"]).nonzero()[0].tolist()
    good = engine.forward(batch())
    said.append(str(torch.equal(engine.forward(with_id(10**6, row, padded)), good)))
    said.append(call(engine, "train_batch", batch(), outputs=("logprobs", "logits")))
    said.append(call(engine, "eval_batch", batch(), outputs=("logprobs", "routed_experts")))
    said.append(call(engine, "forward", batch(), outputs=("logits",)))
    said.append(call(engine, "train_batch", batch()))
    engine.destroy()
    return said


@pytest.mark.parametrize("parallel", [dict(tp=2), dict(pp=2), dict()], ids=["tp2", "pp2", "dp2"])
def test_ids_outside_of_the_vocabulary_are_named_on_every_rank(worlds, models, parallel):
    for said in worlds(2).run(ids_outside, save_model(models, "qwen3", True), parallel):
        for text, value in zip(said, (VOCAB, 10**6, -1) * 3, strict=False):
            assert text == (
                f"input_ids[1, 2] = {value} is outside of the model's vocabulary of {VOCAB} (1 "
                "such tokens in the batch); use the tokenizer that belongs to the model"
            )
        assert said[9] == "True"
        assert "'logits' has no gradient" in said[10]
        assert said[11].startswith("outputs=('logprobs', 'routed_experts'): 'routed_experts'")
        assert said[12:] == ["fine", "fine"]


def differing_input(path: str, parallel: dict[str, Any]) -> list[str]:
    engine, frozen = make_engine(path, parallel), make_engine(path, parallel, trained=False)
    second = dist.get_rank() == 1
    said = []
    for verb in ("train_batch", "eval_batch", "forward"):
        for change in (
            with_id(7, 0, 0) | {"advantages": batch()["advantages"] * 2},
            {**batch(), "loss_mask": batch()["attention_mask"]},
            {**batch(), "advantages": batch()["advantages"].double()},
            {k: v for k, v in batch().items() if k != "loss_mask"},
            {k: v[:, :-1] if v.ndim == 2 else v for k, v in batch().items()},
            with_id(VOCAB, 0, 0),
        ):
            said.append(call(engine, verb, change if second else batch()))
    said.append(call(engine, "forward" if second else "eval_batch", batch()))
    said.append(call(engine, "forward", batch(), temperature=0.5 if second else 1.0))
    said.append(call(frozen, "forward", with_id(7, 0, 0) if second else batch()))
    said += [call(engine, "train_batch", batch()), call(frozen, "forward", batch())]
    engine.destroy()
    frozen.destroy()
    return said


@pytest.mark.parametrize("parallel", [dict(tp=2), dict()], ids=["tp2", "dp2"])
def test_ranks_with_different_batches_are_named_on_every_rank(worlds, models, parallel):
    first, second = worlds(2).run(differing_input, save_model(models, "qwen3", True), parallel)
    assert first == second and first[-2:] == ["fine", "fine"]

    def differ(keys: str) -> str:
        return (
            f"the ranks were given different batches: {keys} of ranks [1] differ from rank 0's; "
            "every rank passes the whole batch, the same on all"
        )

    each = [
        differ("advantages, input_ids"), differ("loss_mask"), differ("advantages"),
        differ("loss_mask"), differ("attention_mask, input_ids, loss_mask"), differ("input_ids"),
    ]  # fmt: skip
    arguments = differ("the call's arguments")
    assert first[:-2] == [*each * 3, arguments, arguments, differ("input_ids")]


# ---- the user's code fails on one rank


def failing(path: str, parallel: dict[str, Any]) -> list[str]:
    """Lets one function after the other fail on rank 1; returns the error of each on this rank, and
    at last whether updates are those of an engine that had no failures."""
    actor = Actor(PPOActorConfig(), make_engine(path, parallel), temperature=1.0)
    rows = batch() | {"rewards": torch.arange(7.0), "group_ids": torch.arange(7) // 4}
    rows["episode_ids"] = torch.arange(7)
    said = []

    def fails(fn: Any) -> Any:
        def on_the_second(*args: Any, **kw: Any) -> Any:
            if dist.get_rank() == 1:
                raise KeyError("my own mistake")
            return fn(*args, **kw)

        return on_the_second

    def error_of(verb: Any, *args: Any, **kw: Any) -> None:
        try:
            verb(*args, **kw)
            said.append("fine")
        except Exception as e:
            said.append("".join([type(e).__name__, ": ", str(e), *getattr(e, "__notes__", ())]))

    def spread(numbers: torch.Tensor, part: Tensors) -> torch.Tensor:
        return numbers[:, None] * part["loss_mask"]

    engine, spec = actor.engine, actor.advantages
    mine = [i for i in range(7) if i % 2 == dist.get_rank()]
    for b in (rows, Batch.from_local(select(rows, mine))):
        error_of(engine.train_batch, b, fails(loss_fn), weight_fn, outputs=OUT)
        error_of(engine.eval_batch, b, loss_fn, fails(weight_fn), outputs=OUT)
        for part in (dict(per_sample=fails(spec.per_sample)), dict(per_token=fails(spread))):
            actor.advantages = replace(spec, **part)
            error_of(actor.compute_advantages, b)
    error_of(engine.forward, rows, post_hook=fails(lambda outputs, row: outputs["logprobs"]))
    stats = engine.train_batch(rows, loss_fn, weight_fn, outputs=OUT)
    engine.destroy()
    engine = make_engine(path, parallel)
    fresh = engine.train_batch(rows, loss_fn, weight_fn, outputs=OUT)
    engine.destroy()
    return [*said, str(stats == fresh)]


@pytest.mark.parametrize("parallel", [dict(tp=2), dict(pp=2), dict()], ids=["tp2", "pp2", "dp2"])
def test_the_user_s_code_that_fails_on_one_rank_is_an_error_on_all(worlds, models, parallel):
    first, second = worlds(2).run(failing, save_model(models, "qwen3", True), parallel)
    group = "actor.advantages=group"
    each = ["loss_fn", "loss_weight_fn", group, group]
    verbs = [*each, *each, "forward: post_hook or aggregate_fn"]
    assert first == [
        *(
            f"OtherRankFailed: {what} failed on rank 1: KeyError: 'my own mistake'"
            for what in verbs
        ),
        "True",
    ]
    assert second == [*(f"KeyError: 'my own mistake'({what}, rank 1)" for what in verbs), "True"]


def tokens_in_a_dict(path: str, parallel: dict[str, Any]) -> tuple[str, bool]:
    """What every rank says of a Batch's own tokens in a plain dict, and whether passes go on."""
    engine = make_engine(path, parallel)
    whole = Batch.from_padded(batch())
    try:
        engine.forward({name: whole[name] for name in ("input_ids", "loss_mask")}, outputs=OUT)
        said = "fine"
    except TypeError as e:
        said = str(e)
    goes_on = bool(engine.forward(batch()).isfinite().all())
    engine.destroy()
    return said, goes_on


def test_tokens_of_a_batch_in_a_plain_dict(world2, models):
    for said, goes_on in world2.run(tokens_in_a_dict, save_model(models, "qwen3", True), {}):
        assert "'input_ids'" in said and "batch.padded()" in said and goes_on
