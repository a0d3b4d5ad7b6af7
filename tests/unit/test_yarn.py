"""YaRN of families with grouped-query attention, against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from megarl.models.hf_config import ModelConfig, parse_hf_config
from megarl.models.rope import inv_freq
from tests.tiny import YARN, tiny_hf

PARTLY: dict[str, Any] = {"glm": dict(partial_rotary_factor=0.5)}
SETTINGS: tuple[dict[str, Any], ...] = (
    dict(mscale=None, mscale_all_dim=None),
    dict(),
    dict(mscale=0.5),
    dict(mscale=0.0),
    dict(mscale_all_dim=None),
    dict(attention_factor=1.7),
    dict(attention_factor=0.8, mscale=None),
    dict(truncate=False),
    dict(truncate=None, beta_fast=None, beta_slow=None),
    dict(beta_fast=4, beta_slow=4),
    dict(factor=0.5),
    dict(factor=4.0, original_max_position_embeddings=32768, rope_theta=1e6),
)


def model_of(hf: transformers.PreTrainedModel, **over: Any) -> ModelConfig:
    return parse_hf_config({**hf.config.to_dict(), "architectures": [type(hf).__name__], **over})


@pytest.mark.parametrize("kind", ("qwen2", "qwen3", "glm"))
@pytest.mark.parametrize("over", SETTINGS, ids=str)
def test_frequencies_and_factor_are_those_of_transformers(kind: str, over: dict[str, Any]) -> None:
    """The frequencies to the bit."""
    hf = tiny_hf(kind, layers=1, rope_parameters={**YARN, **PARTLY.get(kind, {}), **over})
    m, rotary = model_of(hf), hf.model.rotary_emb
    assert torch.equal(inv_freq(m), rotary.inv_freq)
    assert m.rope_scaling is not None
    assert m.rope_scaling.rotary_factor == pytest.approx(rotary.attention_scaling, rel=1e-15)


@pytest.mark.parametrize(
    "over, words",
    (
        (dict(truncate="no"), "truncate='no'"),
        (dict(attention_factor=0), "attention_factor=0; expected a number above 0"),
        (dict(attention_factor=-1), "attention_factor=-1; expected"),
        (dict(mscale="big"), "mscale='big'"),
        (dict(original_max_position_embeddings=None), "lacks original_max_position_embeddings"),
        (dict(factor=None), "lacks factor"),
    ),
)
def test_what_is_wrong_is_named(over: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        model_of(tiny_hf("qwen3", layers=1), rope_parameters={**YARN, **over})


def test_rounding_beside_sets_by_layer_type_is_refused() -> None:
    """transformers looks for `truncate` where sets for each layer type leave no room for it."""
    hf = tiny_hf("olmo3", layers=2)
    sets = dict(hf.config.rope_parameters)
    assert model_of(hf).rope_scaling is not None
    sets["full_attention"] = sets["full_attention"] | {"truncate": False}
    with pytest.raises(ValueError, match="truncate=False"):
        model_of(hf, rope_parameters=sets)
