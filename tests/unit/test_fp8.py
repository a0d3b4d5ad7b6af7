"""FP8: what is asked of megatron-core, and what is refused before it. No GPU is needed for that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megarl.engine.micro_batch import alignment
from megarl.models.build import drop_copies, fp8_fields, token_unit, transformer_config
from megarl.models.hf_config import ModelConfig, parse_hf_config
from megarl.parallel.layout import Layout
from megarl.parallel.packing import slot_lengths
from tests.tiny import tiny_hf

H100, BLACKWELL, A100 = (9, 0), (10, 0), (8, 0)


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return parse_hf_config(tiny_hf("qwen3", layers=2).config.to_dict())


def fields(monkeypatch: Any, gpu: tuple[int, int], recipe: str, model: ModelConfig, **over: Any):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: gpu)
    kw = dict(dtype=torch.bfloat16, attention="te") | over
    return fp8_fields(recipe, model, kw.pop("layout", Layout()), **kw)


@pytest.mark.parametrize(
    ("recipe", "gpu", "form"),
    [
        ("delayed", H100, "hybrid"),
        ("tensorwise", H100, "hybrid"),
        ("blockwise", H100, "e4m3"),
        ("mxfp8", BLACKWELL, "e4m3"),
    ],
)
def test_recipes_reach_the_transformer_config(monkeypatch, model, recipe, gpu, form):
    asked = fields(monkeypatch, gpu, recipe, model)
    config = transformer_config(
        model, Layout(), dtype=torch.bfloat16, device=torch.device("cpu"), use_te=False, **asked
    )
    assert (config.fp8, config.fp8_recipe, config.fp8_param) == (form, recipe, False)
    assert fields(monkeypatch, gpu, "none", model) == {}


@pytest.mark.parametrize(
    ("gpu", "recipe", "over", "message"),
    [
        (H100, "delayed", dict(attention="sdpa"), "needs Transformer Engine's layers"),
        (H100, "delayed", dict(dtype=torch.float16), "needs dtype='bfloat16' .it is float16."),
        (A100, "delayed", {}, "compute capability 8.9, this one has 8.0; use 'none'"),
        (H100, "mxfp8", {}, "10.0 to below 12.0, this one has 9.0; use 'delayed' or 'tensorwise'"),
        ((12, 0), "mxfp8", {}, "has 12.0; use 'delayed' or 'tensorwise' or 'blockwise' or 'none'"),
        (
            H100,
            "delayed",
            dict(layout=Layout(tp=4)),
            "mlp.linear_fc2.weight is .*, 24.; lower parallel.tp",
        ),
    ],
)
def test_what_cannot_run_is_refused(monkeypatch, model, gpu, recipe, over, message):
    with pytest.raises(ValueError, match=f"fp8='{recipe}'.*{message}"):
        fields(monkeypatch, gpu, recipe, model, **over)


def test_the_width_that_does_not_fit_is_named(monkeypatch, model):
    odd = replace(model, intermediate_size=100)
    with pytest.raises(ValueError, match=r"mlp.linear_fc1.weight is .200, .*\]"):
        fields(monkeypatch, H100, "tensorwise", odd)


def test_only_widths_that_the_model_has_are_looked_at(monkeypatch):
    sparse, mixed, shared = (
        parse_hf_config(tiny_hf(kind, layers=2, intermediate_size=100, **over).config.to_dict())
        for kind, over in (
            ("qwen3_moe", dict(mlp_only_layers=[])),
            ("qwen3_moe", {}),
            ("qwen2_moe", dict(decoder_sparse_step=1, shared_expert_intermediate_size=40)),
        )
    )
    assert fields(monkeypatch, H100, "tensorwise", sparse)
    with pytest.raises(ValueError, match=r"mlp.linear_fc1.weight is .200, .*\]"):
        fields(monkeypatch, H100, "tensorwise", mixed)
    with pytest.raises(ValueError, match=r"shared_experts.linear_fc2.weight is .*, 40\]"):
        fields(monkeypatch, H100, "tensorwise", shared)


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(cp=2), Layout(tp=2, sequence_parallel=True)], ids=str
)
@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
def test_every_ranks_share_of_the_tokens_is_a_multiple(layout, recipe):
    unit = token_unit(recipe)
    total = sum(slot_lengths([5, 11, 30], alignment(layout, unit)))
    share = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    assert total % (share * unit) == 0 and total < 46 + 4 * 3 + share * unit


def test_quantised_weights_that_layers_keep_are_dropped_with_the_weights() -> None:
    """tests/te proves that both ends of Transformer Engine's versions call them so."""
    layer = torch.nn.Linear(2, 2)
    layer._fp8_workspaces = {"weight": torch.ones(2)}  # type: ignore[assignment]
    plain = torch.nn.Linear(2, 2)
    drop_copies([torch.nn.Sequential(layer, plain)])
    assert layer._fp8_workspaces == {} and plain.weight.shape == (2, 2)
