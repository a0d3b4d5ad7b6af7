"""Every rank refuses faulty inputs of a pass with the same clear error, and no rank hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

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
