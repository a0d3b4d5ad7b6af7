"""Attributes that scripts of other systems use are answered with ours."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import megarl
from megarl.algos.roles import Role
from megarl.api.batch import Batch
from megarl.config.recipes import GRPOConfig
from megarl.trainer.saver import Saver
from tests.unit.bigram import BigramEngine


def batch() -> Batch:
    ids = torch.ones(2, 3, dtype=torch.long)
    return Batch.from_padded({"input_ids": ids, "attention_mask": ids.bool()})


# what a script writes, and a name of ours that the error has
LINES: dict[str, tuple[Callable[[], Any], str]] = {
    "config.async_training": (lambda: GRPOConfig().async_training, "max_head_offpolicyness"),
    "config.inf_engine": (lambda: GRPOConfig().inf_engine, "rollout"),
    "config.actor.kl_ctl": (lambda: GRPOConfig().actor.kl_ctl, "actor.kl_coef"),
    "megarl.FSDPPPOActor": (lambda: megarl.FSDPPPOActor, "MegatronActor"),
    "megarl.MegatronGRPOActor": (lambda: megarl.MegatronGRPOActor, "MegatronActor"),
    "megarl.LLMRequest": (lambda: megarl.LLMRequest, "ModelRequest"),
    "rollout.update_weights_async": (
        lambda: object.__new__(megarl.RemoteSGLangEngine).update_weights_async,
        "update_weights",
    ),
    "actor.compute_logps": (lambda: Role(BigramEngine()).compute_logps, "compute_logp"),
    "saver.save": (lambda: object.__new__(Saver).save, "maybe_save"),
    "batch.to": (lambda: batch().to, "moves"),
    "batch['input_ids'].shape": (lambda: batch()["input_ids"].shape, "padded"),
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_another_system_is_answered_with_ours(line: str) -> None:
    use, ours = LINES[line]
    with pytest.raises(AttributeError) as caught:
        use()
    assert ours in str(caught.value) and line.rpartition(".")[2] in str(caught.value)


def test_other_missing_names_are_missing_without_a_hint() -> None:
    for owner in (GRPOConfig(), batch(), Role(BigramEngine()), megarl):
        assert getattr(owner, "no_such_name", 1) == 1
        with pytest.raises(AttributeError, match="no_such_name"):
            owner.no_such_name  # noqa: B018


def test_configurations_and_batches_are_copied_and_pickled_as_before() -> None:
    cfg = GRPOConfig(experiment_name="x")
    assert copy.deepcopy(cfg) == cfg == pickle.loads(pickle.dumps(cfg))
    tokens = batch()["input_ids"]
    for other in (copy.deepcopy(tokens), pickle.loads(pickle.dumps(tokens))):
        assert torch.equal(other.values, tokens.values)
