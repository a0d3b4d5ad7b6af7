"""Experts in the piece table and in config.json, with plain numbers: no process group."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from megarl.config.engine import ParallelConfig
from megarl.models.build import transformer_config
from megarl.models.hf_config import ModelConfig, check_layout, parse_hf_config, read_hf_config
from megarl.models.options import EngineOptions
from megarl.models.params import load_params, local_view
from megarl.models.piece_table import PieceTable, build_piece_table
from megarl.parallel.layout import Layout
from tests.tiny import HYBRID_MOE_KINDS, MOE_KINDS, tiny_hf

BASE: dict[str, Any] = dict(
    vocab_size=30, hidden_size=8, intermediate_size=8, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=4, max_position_embeddings=64, num_experts_per_tok=2,
)  # fmt: skip
QWEN: dict[str, Any] = {
    **BASE, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "moe_intermediate_size": 12,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    **BASE, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8,
}  # fmt: skip
SHARED: dict[str, Any] = {
    **QWEN, "architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 20,
}  # fmt: skip
LAYOUTS = [
    Layout(tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp, dp=16 // (tp * pp * cp))
    for tp, (pp, vpp), cp, (ep, etp) in product(
        (1, 2, 4), ((1, 1), (2, 1), (2, 2)), (1, 2),
        ((1, 1), (2, 1), (8, 1), (1, 4), (2, 2), (4, 2)),
    )
]  # fmt: skip


def models() -> list[ModelConfig]:
    return [parse_hf_config(raw) for raw in (SHARED, MIXTRAL, {**QWEN, "mlp_only_layers": [0, 2]})]


@pytest.mark.parametrize("m", models(), ids=("qwen2_moe", "mixtral", "some-dense"))
def test_every_element_once_in_every_layout(m: ModelConfig) -> None:
    """check_coverage runs inside build_piece_table; every rank is told all it holds."""
    for layout in LAYOUTS:
        table = build_piece_table(m, layout, vocab_divisible_by=1)
        sizes = {t.name: t.numel for t in table.tensors}
        assert sum(p.numel for t in table.tensors for p in t.pieces) == sum(sizes.values())
        ranks = [table.local_params(c) for c in layout.all_coords]
        experts = {n for r in ranks for n in r if ".experts." in n}
        sparse = m.num_layers - len(m.moe.dense_layers) if m.moe else 0
        assert len(experts) == sparse * 8 * 2
        per_rank = {sum(".experts." in n for n in r) for r in ranks}
        if layout.pp == 1:
            assert per_rank == {sparse * 16 // layout.ep}


def test_experts_lie_on_expert_ranks_in_order() -> None:
    table = build_piece_table(parse_hf_config(QWEN), Layout(dp=8, ep=4, etp=2))
    for e in range(8):
        gate, up, down = (
            table.by_name[f"model.layers.3.mlp.experts.{e}.{x}_proj.weight"]
            for x in ("gate", "up", "down")
        )
        for t in (gate, up, down):
            assert [(p.place.ep, p.place.etp) for p in t.pieces] == [(e // 2, 0), (e // 2, 1)]
            assert {p.param.split(".")[6] for p in t.pieces} == {str(e)}
        # 12 rows in two shares of 6; the local matrix is gate's share, then up's
        assert [p.start for p in gate.pieces] == [(0, 0), (6, 0)] == [p.start for p in up.pieces]
        assert [p.view.offset for p in (*gate.pieces, *up.pieces)] == [0, 0, 48, 48]
        assert [p.start for p in down.pieces] == [(0, 0), (0, 6)]
    router = table.by_name["model.layers.3.mlp.gate.weight"]
    assert router.shape == (8, 8) and not router.replicas


def shards(table: PieceTable, hf: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    out = []
    for c in table.layout.all_coords:
        params = {n: torch.full(p.shape, torch.nan) for n, p in table.local_params(c).items()}
        load_params(table, c, params, lambda t, box: hf[t.name][box])
        out.append(params)
    return out


@pytest.mark.parametrize("m", models(), ids=("qwen2_moe", "mixtral", "some-dense"))
def test_owners_hold_the_model(m: ModelConfig) -> None:
    """HF tensors cut for every rank, and put together again from whom the table calls owner."""
    for layout in LAYOUTS[::5]:
        table = build_piece_table(m, layout)
        hf = {t.name: torch.randn(t.shape) for t in table.tensors}
        ranks = shards(table, hf)
        assert not any(p.isnan().any() for params in ranks for p in params.values())
        for t in table.tensors:
            found = torch.full(t.shape, torch.nan)
            for p in t.pieces:
                view = local_view(ranks[p.place.rank(layout)][p.param], p.view)
                found[p.box] = view.reshape(found[p.box].shape)
            assert torch.equal(found, hf[t.name]), t.name


@pytest.mark.full
def test_parameters_of_a_published_model() -> None:
    """Qwen3-30B-A3B has 30.5 billion, as its model card says."""
    raw = {
        **QWEN, "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "moe_intermediate_size": 768,
    }  # fmt: skip
    table = build_piece_table(parse_hf_config(raw), Layout(dp=8, ep=8))
    assert round(sum(t.numel for t in table.tensors) / 1e9, 1) == 30.5


@pytest.mark.parametrize("kind", (*MOE_KINDS, *HYBRID_MOE_KINDS))
def test_what_transformers_saves_is_read_back(kind: str, tmp_path: Any) -> None:
    tiny_hf(kind).save_pretrained(tmp_path)
    shape = read_hf_config(tmp_path).moe
    assert shape is not None and (shape.num_experts, shape.top_k) == (4, 2)
    assert shape.intermediate_size == (96 if kind in ("mixtral", "minimax_m2") else 48)
    shared = {"qwen2_moe": 40, "glm4_moe": 48} | dict.fromkeys(HYBRID_MOE_KINDS, 40)
    assert shape.shared_intermediate_size == shared.get(kind, 0)
    assert shape.norm_topk_prob == (kind != "qwen3_moe")
    dense = {"qwen2_moe": (0, 2), "qwen3_moe": (1,), "glm4_moe": (0,), "qwen3_next": (1,)}
    assert shape.dense_layers == dense.get(kind, ())


def test_sparse_steps() -> None:
    def dense(**over: Any) -> tuple[int, ...]:
        shape = parse_hf_config({**QWEN, **over}).moe
        assert shape is not None
        return shape.dense_layers

    assert dense() == dense(decoder_sparse_step=1, mlp_only_layers=[]) == ()
    assert dense(decoder_sparse_step=2) == (0, 2)
    assert dense(decoder_sparse_step=2, mlp_only_layers=[3, 9]) == (0, 2, 3)


@pytest.mark.parametrize(
    "raw, words",
    (
        ({**QWEN, "num_experts": None}, "num_experts is missing"),
        ({**QWEN, "num_experts_per_tok": 9}, "num_experts_per_tok=9 of num_experts=8"),
        ({**QWEN, "moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({**QWEN, "mlp_only_layers": [0, 1, 2, 3]}, "no layer with experts"),
        ({**QWEN, "norm_topk_prob": True, "num_experts_per_tok": 1}, "num_experts_per_tok=1"),
        ({**SHARED, "shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
        ({**MIXTRAL, "num_experts_per_tok": 1}, "num_experts_per_tok=1"),
        ({**MIXTRAL, "router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    ),
)
def test_what_is_not_implemented_is_named(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_hf_config(raw)


@pytest.mark.parametrize(
    "parallel, words",
    (
        (dict(ep=3), r"parallel.ep=3 does not divide num_experts=8; choose ep from \[1, 2, 4, 8\]"),
        (dict(etp=5), "parallel.etp=5 does not divide the experts' intermediate size=12"),
        (dict(tp=2), "set parallel.sequence_parallel=true"),
    ),
)
def test_layouts_that_do_not_fit_name_the_values(parallel: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_layout(parse_hf_config(QWEN), ParallelConfig(**parallel))


def test_layouts_that_fit_pass() -> None:
    m = parse_hf_config({**QWEN, "intermediate_size": 9})  # no layer has it
    check_layout(m, ParallelConfig(tp=4, sequence_parallel=True, ep=8, etp=3, pp=2))


def test_the_overlap_of_shared_experts_is_refused_where_there_is_none() -> None:
    kw: dict[str, Any] = dict(dtype=torch.float32, device=torch.device("cpu"), use_te=False)
    options = EngineOptions(moe_shared_expert_overlap=True)
    model = parse_hf_config(SHARED)
    assert transformer_config(model, Layout(), options=options, **kw).moe_shared_expert_overlap
    with pytest.raises(ValueError, match="moe_shared_expert_overlap=True: qwen3_moe has no shared"):
        transformer_config(parse_hf_config(QWEN), Layout(), options=options, **kw)
