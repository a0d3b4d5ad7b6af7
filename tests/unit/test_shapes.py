"""Kinds of layers by their number, and what makes two models the same."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from megarl.config.engine import ParallelConfig
from megarl.models.flops import sequence_cost
from megarl.models.hf_config import check_layout, parse_hf_config
from megarl.models.shapes import Recurrent, differing
from megarl.parallel.layout import Layout
from megarl.planning.memory import (
    kv_bytes_per_token,
    layer_activations,
    state_bytes_per_sequence,
)

QWEN = parse_hf_config(
    dict(
        architectures=["Qwen2ForCausalLM"], hidden_size=64, intermediate_size=96, vocab_size=130,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    )
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Toy(Recurrent):
    """A state of 16 x 16 a head, whose rows tensor parallelism cuts."""

    heads: int = 4

    @property
    def state(self) -> int:
        return self.heads * 16 * 16

    @property
    def products(self) -> int:
        return 2 * self.state

    def weights(self, hidden: int) -> int:
        return 10 * hidden

    def sizes_to_cut(self) -> dict[str, int]:
        return {"toy rows": 42}

    def sizes_to_share(self) -> dict[str, int]:
        return {"toy heads": self.heads}

    def kept(self, tp: int) -> tuple[float, float]:
        return 0, 100 / tp


HYBRID = replace(QWEN, recurrent=Toy(layers=(0, 1, 3)))


def test_layers_have_the_kind_of_their_number() -> None:
    assert [HYBRID.mixer(i) is HYBRID.recurrent for i in range(4)] == [True, True, False, True]
    assert all(QWEN.mixer(i) is QWEN.attention for i in range(4))


def test_costs_follow_from_the_kinds() -> None:
    attention, h = QWEN.attention, 64
    instead = 3 * (attention.weights(h) - 10 * h - 2 * 4 * 256)
    pairs = 3 * 4 * 16  # of half a pair of tokens in three layers
    for n in (1, 10):
        saved = sequence_cost(QWEN)(n) - sequence_cost(HYBRID)(n)
        assert saved == n * instead + pairs * n * (n + 1)


def test_memory_follows_from_the_kinds() -> None:
    assert kv_bytes_per_token(HYBRID, 1) * 4 == kv_bytes_per_token(QWEN, 1)
    assert state_bytes_per_sequence(HYBRID, 2) == 4 * 3 * 4 * 256 // 2
    assert state_bytes_per_sequence(QWEN, 2) == 0
    layer = [layer_activations(HYBRID, Layout(), i, tokens=10) for i in range(4)]
    assert layer[0] == layer[1] == layer[3] != layer[2]
    mlp = 64 + 3 * 96
    assert layer[0] == 10 * 2 * (3 * 64 + 100 + mlp)


@pytest.mark.parametrize(
    "parallel, named",
    [(dict(tp=4), "toy rows"), (dict(cp=8), "toy heads"), (dict(tp=2, cp=4), "toy heads")],
)
def test_a_kind_says_what_layouts_must_divide(parallel: dict[str, Any], named: str) -> None:
    check_layout(QWEN, ParallelConfig(**parallel))
    with pytest.raises(ValueError, match=named):
        check_layout(HYBRID, ParallelConfig(**parallel))


def test_a_kind_of_layer_belongs_to_the_meaning_of_the_weights() -> None:
    saved = json.loads(json.dumps(QWEN.meaning()))
    assert differing(saved, QWEN.meaning()) is None
    assert differing(saved, HYBRID.meaning()) == "recurrent"
    assert differing(HYBRID.meaning(), saved) == "recurrent"
    assert differing(json.loads(json.dumps(HYBRID.meaning())), HYBRID.meaning()) is None
    narrow = replace(QWEN, attention=replace(QWEN.attention, head_dim=8))
    assert differing(saved, narrow.meaning()) == "attention"


def test_a_checkpoint_of_before_a_field_is_of_the_same_model() -> None:
    saved = json.loads(json.dumps(QWEN.meaning()))
    del saved["recurrent"], saved["attention"]["interleaved"], saved["mtp_layers"]
    assert differing(saved, QWEN.meaning()) is None
    assert differing(saved, replace(QWEN, mtp_layers=1).meaning()) == "mtp_layers"
