"""The piece table, with plain numbers: no process group, no torch."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from itertools import chain, product
from typing import Any

import pytest

from megarl.config.engine import ParallelConfig
from megarl.models.families import family_of
from megarl.models.families.params import QKV, Param
from megarl.models.hf_config import ModelConfig, check_layout, parse_hf_config
from megarl.models.ops import FusedQKV, Op, Sections
from megarl.models.piece_table import (
    Piece,
    PieceTable,
    View,
    build_piece_table,
    check_coverage,
    padded_vocab_size,
)
from megarl.parallel.layout import Layout

ARCH = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "glm4": "Glm4ForCausalLM",
}  # fmt: skip


def config(family: str = "qwen3", **over: Any) -> ModelConfig:
    raw: dict[str, Any] = dict(
        architectures=[ARCH[family]], vocab_size=130, hidden_size=12, intermediate_size=24,
        num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=4,
        max_position_embeddings=64,
    )  # fmt: skip
    return parse_hf_config({**raw, **over})


def read_view(local: list[int], piece: Piece) -> list[int]:
    """The numbers of a strided view in row-major order."""
    v = piece.view
    return [
        local[v.offset + sum(i * s for i, s in zip(index, v.strides))]
        for index in product(*map(range, v.shape))
    ]


def flat(rows: list[list[int]]) -> list[int]:
    return [x for row in rows for x in row]


def full_megatron_qkv(m: ModelConfig, hf: dict[str, list[list[int]]]) -> list[list[int]]:
    """Interleaved by query group, written out independently of the ops."""
    rep, d, rows = m.attention.heads // m.attention.kv_heads, m.attention.head_dim, []
    for g in range(m.attention.kv_heads):
        rows += hf["q"][g * rep * d : (g + 1) * rep * d]
        rows += hf["k"][g * d : (g + 1) * d] + hf["v"][g * d : (g + 1) * d]
    return rows


LAYOUTS = [
    Layout(tp=tp, pp=pp, vpp=vpp)
    for tp, (pp, vpp) in product((1, 2, 4, 8), ((1, 1), (2, 1), (2, 2), (4, 1)))
]


@pytest.mark.parametrize("family", ARCH)
@pytest.mark.parametrize("tie", (False, True))
def test_every_element_once_in_every_layout(family: str, tie: bool) -> None:
    """check_coverage runs inside build_piece_table; tp goes beyond the kv heads, and vocabularies
    leave whole ranks with padding only."""
    for layout, kv, vocab, unit in product(LAYOUTS, (1, 2, 8), (16, 130), (1, 8, 128)):
        m = config(family, tie_word_embeddings=tie, num_key_value_heads=kv, vocab_size=vocab)
        table = build_piece_table(m, layout, vocab_divisible_by=unit)
        assert sum(t.numel for t in table.tensors) == sum(
            p.numel for t in table.tensors for p in t.pieces
        )
        assert ("lm_head.weight" in table.by_name) is not tie


def test_the_coverage_check_finds_a_gap_and_an_overlap() -> None:
    table = build_piece_table(config(), Layout(tp=2))
    name = "model.layers.0.self_attn.k_proj.weight"
    k = table.by_name[name]
    for pieces in (k.pieces[:1], (*k.pieces, k.pieces[0])):
        broken = type(k)(k.name, k.shape, pieces, k.replicas)
        others = tuple(broken if t.name == name else t for t in table.tensors)
        with pytest.raises(AssertionError, match="k_proj"):
            check_coverage(PieceTable(table.model, table.layout, 0, others, table.params))


@pytest.mark.parametrize("tp, kv", ((1, 2), (2, 2), (2, 8), (4, 2), (8, 2), (4, 1)))
def test_fused_qkv_is_the_interleaved_matrix_cut_evenly(tp: int, kv: int) -> None:
    """Also with more ranks than key/value heads: megatron-core cuts inside a query group."""
    m = config(num_key_value_heads=kv)
    width = m.hidden_size
    hf, n = {}, 0
    for x, heads in (("q", m.attention.heads), ("k", kv), ("v", kv)):
        rows = heads * m.attention.head_dim
        hf[x] = [[n + r * width + c for c in range(width)] for r in range(rows)]
        n += rows * width
    fused = full_megatron_qkv(m, hf)
    table, per = build_piece_table(m, Layout(tp=tp)), len(fused) // tp
    for x in "qkv":
        t = table.by_name[f"model.layers.0.self_attn.{x}_proj.weight"]
        for p in t.pieces:
            assert p.place.tp is not None
            local = flat(fused[p.place.tp * per : (p.place.tp + 1) * per])
            assert read_view(local, p) == flat(hf[x][p.start[0] : p.stop[0]])
    if kv >= tp:  # whole groups on every rank: one strided view each
        assert all(len(t.pieces) == tp for t in table.tensors if "q_proj" in t.name)


def check_op(
    m: ModelConfig, tp: int, op: Op, hf: list[list[list[int]]], ranks: list[list[list[int]]]
) -> PieceTable:
    """Checks that `op` makes of HF tensors `hf`, as rows of numbers, the parameters of `ranks`."""
    names = tuple(f"hf{i}" for i in range(len(hf)))
    table = build_piece_table(m, Layout(tp=tp), params=[(Param("p", names, op), 0)])
    for name, rows in zip(names, hf, strict=True):
        assert table.by_name[name].shape[0] == len(rows)
        for p in table.by_name[name].pieces:
            assert p.place.tp is not None and min(p.view.strides) > 0
            assert read_view(flat(ranks[p.place.tp]), p) == flat(rows[p.start[0] : p.stop[0]])
    assert all(p.shape[0] == len(ranks[0]) for p in table.params)
    return table


def numbered(rows: int, width: int, first: int) -> list[list[int]]:
    return [[first + r * width + c for c in range(width)] for r in range(rows)]


@pytest.mark.parametrize("tp, kv", ((1, 2), (2, 2), (2, 8), (4, 2), (8, 2), (8, 1)))
def test_gates_of_a_group_stand_behind_its_queries(tp: int, kv: int) -> None:
    m = config(num_key_value_heads=kv)
    d, heads, width = m.attention.head_dim, m.attention.heads, m.hidden_size
    q = numbered(2 * heads * d, width, 0)
    k, v = (numbered(kv * d, width, n) for n in (10_000, 20_000))
    fused = []
    for group in range(kv):
        of_group = range(group * heads // kv, (group + 1) * heads // kv)
        for part in (0, 1):  # HF has every head's gate below it
            fused += chain(*(q[(2 * h + part) * d : (2 * h + part + 1) * d] for h in of_group))
        fused += k[group * d : (group + 1) * d] + v[group * d : (group + 1) * d]
    per = len(fused) // tp
    ranks = [fused[r * per : (r + 1) * per] for r in range(tp)]
    check_op(m, tp, replace(QKV, op=FusedQKV(gate=True)).op, [q, k, v], ranks)


@pytest.mark.parametrize("cols, width", (((), 1), (("hidden_size",), 12), ((1, 4), 4)))
@pytest.mark.parametrize("by_group", (True, False))
@pytest.mark.parametrize("tp", (1, 2, 4))
def test_sections_are_cut_each(tp: int, by_group: bool, cols: tuple[Any, ...], width: int) -> None:
    """Four groups have 2, 3 and 2 rows of one tensor, 3 of another: rows of a vector, a matrix, or
    a tensor with more dimensions."""
    m, sizes = config(), ((2, 3, 2), (3,))
    sections: list[list[list[list[int]]]] = []  # [section][group] -> its rows
    hf: list[list[list[int]]] = []
    for dims in sizes:
        mine = [
            [numbered(rows, width, 1000 * (len(sections) + s) + 100 * g) for g in range(4)]
            for s, rows in enumerate(dims)
        ]
        order = zip(*mine) if by_group else mine
        hf.append([row for part in order for rows in part for row in rows])
        sections += mine
    per = 4 // tp
    ranks = [
        [row for s in sections for rows in s[r * per : (r + 1) * per] for row in rows]
        for r in range(tp)
    ]
    table = check_op(m, tp, Sections(4, sizes, cols, by_group), hf, ranks)
    assert table.by_name["hf0"].shape[1:] == tuple(c if c != "hidden_size" else 12 for c in cols)


OSS: dict[str, Any] = dict(
    architectures=["GptOssForCausalLM"], num_local_experts=4, num_experts_per_tok=2,
    hidden_size=6, intermediate_size=4, num_hidden_layers=2,
)  # fmt: skip


@pytest.mark.parametrize("etp", (1, 2))
def test_experts_that_share_hf_tensors_have_a_box_each(etp: int) -> None:
    """Gate and up are in turns and matrices the other way round in HF: [E, H, 2I] and [E, I, H].
    Layouts refuse to cut experts with biases; tables of servers cut them."""
    m = config(**OSS)
    hidden, per = 6, 4 // etp
    table = build_piece_table(m, Layout(ep=2, etp=etp, dp=2 * etp))
    block = "model.layers.1.mlp.experts."

    def number(name: str, e: int, row: int, col: int) -> int:
        shape = (*table.by_name[block + name].shape, 1)
        return (e * shape[1] + row) * shape[2] + col

    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
        t = table.by_name[block + name]
        assert t.shape[0] == 4 and not t.linear
        for piece in (*t.pieces, *t.replicas):
            e, rank = int(piece.param.split(".")[6]), piece.place.etp
            assert rank is not None and piece.place.ep == e // 2
            gate_up = [2 * (rank * per + i) + part for part in (0, 1) for i in range(per)]
            local = {
                "gate_up_proj": [[number(name, e, h, i) for h in range(hidden)] for i in gate_up],
                "gate_up_proj_bias": [[number(name, e, i, 0)] for i in gate_up],
                "down_proj": [
                    [number(name, e, rank * per + i, h) for i in range(per)] for h in range(hidden)
                ],
                "down_proj_bias": [[number(name, e, h, 0)] for h in range(hidden)],
            }[name]
            box = product(*(range(a, b) for a, b in zip(piece.start, piece.stop)))
            assert read_view(flat(local), piece) == [number(name, *(*i, 0)[:3]) for i in box]


@pytest.mark.parametrize("expert", (3, 0))
def test_an_expert_that_is_missing_or_there_twice_is_found(expert: int) -> None:
    m = config(**OSS)
    params = [
        (replace(p, expert=expert, name=p.name.replace("experts.1", f"experts.{expert}")), layer)
        if p.expert == 1
        else (p, layer)
        for p, layer in family_of(m).params(m)
    ]
    with pytest.raises(AssertionError, match="experts"):
        build_piece_table(m, Layout(), params=params)


def test_a_views_runs_are_in_the_parameters_order() -> None:
    assert list(View(5, (4, 3, 2), (1, 4, 12)).runs()) == [(5, 29)]  # dense, permuted
    assert list(View(0, (2, 3), (1, 4)).runs()) == [(0, 2), (4, 6), (8, 10)]
    assert list(View(0, (3, 2), (4, 1)).runs()) == [(0, 2), (4, 6), (8, 10)]
    there = View(0, (5, 3, 2), (1, 5, 15))
    assert there.backwards() == View(0, (2, 3, 5), (1, 2, 6))
    assert there.backwards().backwards() == there


def test_gate_and_up_stand_one_after_the_other_on_every_rank() -> None:
    m = config()
    table = build_piece_table(m, Layout(tp=2))
    gate, up = (table.by_name[f"model.layers.1.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    half, size = m.intermediate_size // 2, m.intermediate_size // 2 * m.hidden_size
    for rank in (0, 1):
        assert (gate.pieces[rank].view.offset, up.pieces[rank].view.offset) == (0, size)
        assert gate.pieces[rank].start == up.pieces[rank].start == (rank * half, 0)


def test_gate_and_up_of_one_hf_matrix_are_cut_each() -> None:
    m = config("glm4")
    (fused,) = (t for t in build_piece_table(m, Layout(tp=2)).tensors if "1.mlp.gate_up" in t.name)
    half, size = m.intermediate_size // 2, m.intermediate_size // 2 * m.hidden_size
    assert fused.shape == (4 * half, m.hidden_size)
    found = {(p.place.tp, p.view.offset): p.start[0] for p in fused.pieces}
    assert found == {(0, 0): 0, (1, 0): half, (0, size): 2 * half, (1, size): 3 * half}


def test_row_parallel_cuts_columns() -> None:
    m = config()
    down = build_piece_table(m, Layout(tp=4)).by_name["model.layers.0.mlp.down_proj.weight"]
    assert [p.start for p in down.pieces] == [(0, 6 * r) for r in range(4)]
    assert down.pieces[0].view.shape == (12, 6) and down.pieces[0].view.strides == (6, 1)


def test_layers_lie_where_megatron_interleaves_them() -> None:
    table = build_piece_table(config(), Layout(pp=2, vpp=2))
    where = {
        i: (p.pp, p.vpp)
        for i in range(4)
        for p in [table.by_name[f"model.layers.{i}.mlp.down_proj.weight"].pieces[0].place]
    }
    assert where == {0: (0, 0), 1: (1, 0), 2: (0, 1), 3: (1, 1)}
    head = table.by_name["lm_head.weight"].pieces[0].place
    assert (head.pp, head.vpp) == (1, 1)


def test_replicas_are_norms_and_the_tied_embedding() -> None:
    table = build_piece_table(config(tie_word_embeddings=True), Layout(tp=2, pp=2))
    norm = table.by_name["model.layers.3.self_attn.q_norm.weight"]
    assert [p.place.tp for p in norm.pieces] == [0] and [p.place.tp for p in norm.replicas] == [1]
    emb = table.by_name["model.embed_tokens.weight"]
    assert {p.place.pp for p in emb.pieces} == {0}
    assert {(p.place.pp, p.param) for p in emb.replicas} == {(1, "output_layer.weight")}
    last = table.layout.coords(2)
    assert "output_layer.weight" in table.local_params(last)
    one_stage = build_piece_table(config(tie_word_embeddings=True), Layout(tp=2))
    assert not one_stage.by_name["model.embed_tokens.weight"].replicas


def test_vocabulary_padding_is_declared_and_never_in_a_piece() -> None:
    m = config(vocab_size=130)
    table = build_piece_table(m, Layout(tp=4), vocab_divisible_by=128)
    assert table.padded_vocab_size == 512 == padded_vocab_size(130, 4, 128)
    emb = table.by_name["model.embed_tokens.weight"]
    assert [(p.place.tp, p.start[0], p.stop[0]) for p in emb.pieces] == [(0, 0, 128), (1, 128, 130)]
    padding = [p.padding for p in table.params if p.name == "embedding.word_embeddings.weight"]
    assert padding == [(128, 128), (2, 128), (0, 128), (0, 128)]


def test_every_rank_is_told_its_parameters() -> None:
    m, layout = config("qwen2"), Layout(tp=2, pp=2, dp=2)
    table = build_piece_table(m, layout)
    for c in layout.all_coords:
        names = table.local_params(c)
        assert ("embedding.word_embeddings.weight" in names) == (c.pp == 0)
        assert f"decoder.layers.{2 * c.pp}.self_attention.linear_qkv.bias" in names
        held = sum(p.numel for t in table.tensors for p in t.held_by(c))
        padding = sum(
            (p.padding[1] - p.padding[0]) * math.prod(p.shape[1:]) for p in names.values()
        )
        assert held + padding == sum(math.prod(p.shape) for p in names.values())


def test_a_parameter_the_table_does_not_know_is_an_error() -> None:
    table = build_piece_table(config(), Layout())
    c = table.layout.coords(0)
    shapes = {n: p.shape for n, p in table.local_params(c).items()}
    table.check_params(c, shapes)
    with pytest.raises(AssertionError, match=r"extra\.weight"):
        table.check_params(c, {**shapes, "extra.weight": (1,)})


@pytest.mark.parametrize(
    "parallel, words",
    (
        (dict(tp=3), "parallel.tp=3 does not divide num_attention_heads=8"),
        (dict(tp=4), "num_key_value_heads=3"),
        (dict(pp=3), "num_hidden_layers=4"),
        (dict(pp=2, vpp=4), r"parallel.pp\*vpp=2\*4=8"),
        (dict(ep=2), "parallel.ep=2 needs a mixture-of-experts"),
    ),
)
def test_layouts_that_do_not_fit_name_the_values(parallel: dict[str, Any], words: str) -> None:
    heads = dict(num_attention_heads=12, num_key_value_heads=3) if "key" in words else {}
    with pytest.raises(ValueError, match=words):
        check_layout(config("llama", **heads), ParallelConfig(**parallel))


def test_layouts_that_fit_pass() -> None:
    for tp, pp, vpp in ((1, 1, 1), (8, 1, 1), (4, 2, 2), (2, 4, 1)):
        check_layout(config(), ParallelConfig(tp=tp, pp=pp, vpp=vpp))


def test_planning_imports_neither_torch_nor_megatron_nor_transformers() -> None:
    code = (
        "import sys, megarl.models.hf_config, megarl.models.piece_table;"
        "print([m for m in ('torch', 'megatron', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert out.stdout.strip() == "[]"
