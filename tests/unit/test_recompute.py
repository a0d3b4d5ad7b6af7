"""What is recomputed, in megatron-core's words."""

from __future__ import annotations

import pytest

from megarl.config.check_parts import section_problems
from megarl.config.engine import TrainEngineConfig
from megarl.models.options import EngineOptions, recompute_fields
from megarl.parallel.layout import Layout
from tests.unit.family_configs import config


def fields(
    layout: Layout = Layout(pp=2),  # noqa: B008
    *,
    recompute_granularity="none",
    architecture="Qwen2ForCausalLM",
    attention="sdpa",
    **kw,
):
    model = config(architecture, num_hidden_layers=8, mlp_only_layers=[])
    return recompute_fields(
        recompute_granularity, EngineOptions(**kw), layout, model, attention=attention
    )


def test_methods_belong_to_whole_layers():
    assert fields() == {"recompute_granularity": None}
    only = dict(recompute_granularity="selective")
    assert fields(**only, recompute_num_layers=3) == only | {"recompute_modules": ["core_attn"]}
    full = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)
    assert fields(**full) == full


@pytest.mark.parametrize(
    ("module", "architecture", "attention"),
    [
        ("mlp", "Qwen3MoeForCausalLM", "te"),  # has no dense layer
        ("moe", "Qwen2ForCausalLM", "te"),
        ("moe_act", "Qwen3MoeForCausalLM", "sdpa"),
        ("shared_experts", "Qwen3MoeForCausalLM", "te"),
        ("mla_up_proj", "Qwen3MoeForCausalLM", "te"),
    ],
)
def test_a_module_that_is_not_there_is_named(module, architecture, attention):
    kw = dict(recompute_granularity="selective", architecture=architecture, attention=attention)
    with pytest.raises(ValueError, match=f"options.recompute_modules='{module}' needs"):
        fields(**kw, recompute_modules=["layernorm", module])
    there = dict(architecture="DeepseekV3ForCausalLM", attention="te")
    assert fields(**kw | there, recompute_modules=[module])["recompute_modules"] == [module]


def test_uniform_steps_must_end_with_the_chunk():
    kw = dict(recompute_granularity="full", recompute_num_layers=3)
    with pytest.raises(ValueError, match=r"recompute_num_layers=3 does not divide .* \(4\); use 1"):
        fields(**kw)
    fields(**kw, recompute_method="block")
    fields(Layout(pp=2, split=(6, 2)), **(kw | dict(recompute_num_layers=2)))
    with pytest.raises(ValueError, match=r"\(3, 5\)"):
        fields(Layout(pp=2, split=(3, 5)), **kw)


def test_modules_have_megatron_cores_names():
    wrong = TrainEngineConfig(
        recompute_granularity="selective", options={"recompute_modules": ["attn"]}
    )
    (problem,) = section_problems(wrong)
    assert "options.recompute_modules=['attn']" in problem and "'core_attn'" in problem
