"""YaRN of families with grouped-query attention, against transformers."""

from __future__ import annotations

import math
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


@pytest.mark.parametrize("kind", ("qwen3", "deepseek_v3"))
def test_attn_factor_is_named_once_unless_servers_compute_the_same(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSeek-R1-0528-Qwen3-8B publishes it. SGLang multiplies YaRN's own factor by it."""
    plain = YARN | dict(factor=4.0, mscale_all_dim=0.0)
    hf = tiny_hf(kind, layers=2, rope_parameters=plain)
    expected = model_of(hf)
    served = 0.8 * (0.1 * math.log(4) + 1)
    assert model_of(hf, rope_parameters={**plain, "attn_factor": 1.0}) == expected
    agreed = {**plain, "attn_factor": 0.8, "attention_factor": served}
    assert model_of(hf, rope_parameters=agreed).rope_scaling is not None
    assert capsys.readouterr().err == ""
    for _ in range(2):  # an engine and a reference model in one process
        found = parse_hf_config(
            {**expected.raw, "rope_parameters": {**plain, "attn_factor": 0.8}},
            f"{kind}/config.json",
        )
        assert found.rope_scaling == expected.rope_scaling
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{kind}/config.json" in line and "attn_factor=0.8" in line
    assert f"attention_factor={served:.6g}" in line


def test_rounding_beside_sets_by_layer_type_is_refused() -> None:
    """transformers looks for `truncate` where sets for each layer type leave no room for it."""
    hf = tiny_hf("olmo3", layers=2)
    sets = dict(hf.config.rope_parameters)
    assert model_of(hf).rope_scaling is not None
    sets["full_attention"] = sets["full_attention"] | {"truncate": False}
    with pytest.raises(ValueError, match="truncate=False"):
        model_of(hf, rope_parameters=sets)
