"""DeepSeek's config.json, YaRN, choice of experts and arithmetic, against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from megarl.config.engine import ParallelConfig
from megarl.models.families import family_of
from megarl.models.families.deepseek import Latent
from megarl.models.flops import train_flops
from megarl.models.hf_config import ModelConfig, check_layout, parse_hf_config
from megarl.models.layers import GroupLimited
from megarl.models.piece_table import build_piece_table
from megarl.parallel import mcore  # noqa: F401  before megatron
from megarl.parallel.layout import Layout
from megarl.planning.memory import parameters
from tests.tiny import (
    GLM_KINDS,
    KINDS,
    MLA_KINDS,
    MOE_KINDS,
    OSS_KINDS,
    VOCAB,
    WINDOW_ROPE_KINDS,
    YARN,
    hf_named,
    save_tiny,
    tiny_hf,
)

from megatron.core.models.common.embeddings import YarnRotaryEmbedding

# as on the hub
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_shared_experts": 1, "n_routed_experts": 256, "ep_size": 1, "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4,
    "num_experts_per_tok": 8, "moe_layer_freq": 1, "first_k_dense_replace": 3,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "max_position_embeddings": 163840,
    "rope_theta": 10000, "tie_word_embeddings": False, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
# Kimi-K2-Instruct's, dequantised
KIMI: dict[str, Any] = {
    **V3, "model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64,
    "num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "routed_scaling_factor": 2.827,
    "rope_theta": 50000.0, "max_position_embeddings": 131072,
    "rope_scaling": {
        "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
# GLM-4.7-Flash's
FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "vocab_size": 154880, "hidden_size": 2048,
    "intermediate_size": 10240, "moe_intermediate_size": 1536, "num_hidden_layers": 47,
    "num_nextn_predict_layers": 1, "num_attention_heads": 20, "num_key_value_heads": 20,
    "n_shared_experts": 1, "n_routed_experts": 64, "routed_scaling_factor": 1.8,
    "kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "qk_nope_head_dim": 192, "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 4, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "max_position_embeddings": 202752, "rope_theta": 1000000, "rope_scaling": None,
    "partial_rotary_factor": 1.0, "attention_bias": False, "rms_norm_eps": 1e-05,
    "model_type": "glm4_moe_lite", "tie_word_embeddings": False,
}  # fmt: skip
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 102400, "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2,
    "n_routed_experts": 64, "routed_scaling_factor": 1.0, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "norm_topk_prob": False, "scoring_func": "softmax",
}  # fmt: skip


def read(raw: dict[str, Any], **over: Any) -> ModelConfig:
    return parse_hf_config({**raw, **over})


def test_the_published_models_have_their_published_sizes() -> None:
    small, v3 = read(V2_LITE), read(V3)
    assert (
        v3.moe is not None
        and v3.mtp_layers == 1
        and v3.attention.head_dim == 192
        and v3.attention.v_head_dim == 128
    )
    assert v3.attention == Latent(
        heads=128, kv_heads=128, head_dim=192, v_head_dim=128, rotary_dim=64, q_rank=1536,
        kv_rank=512, nope_dim=128,
    )  # fmt: skip
    assert (v3.moe.groups, v3.moe.top_groups, v3.moe.group_best, v3.moe.scale) == (8, 4, 2, 2.5)
    assert v3.moe.dense_layers == (0, 1, 2) and v3.moe.sigmoid

    def size(m: ModelConfig) -> int:
        return sum(t.numel for t in build_piece_table(m, Layout()).tensors)

    assert round(size(small) / 1e9, 1) == 15.7
    four, five = (size(read(V3, num_hidden_layers=n)) for n in (4, 5))
    assert round((five + 56 * (five - four)) / 1e9, 1) == 671.0


def test_kimi_k2_has_its_published_size() -> None:
    """Its model card has 1T parameters, 32B of them per token."""
    m = read(KIMI)
    assert m.family == "kimi_k2" and m.attention.heads == 64 and m.mtp_layers == 0
    assert m.moe is not None and (m.moe.groups, m.moe.scale, m.moe.dense_layers) == (1, 2.827, (0,))
    assert m.rope_scaling is not None and m.rope_scaling.beta_fast == 1.0
    total, active = parameters(m)
    assert (total, active) == (pytest.approx(1e12, rel=0.03), pytest.approx(32e9, rel=0.03))
    # DeepSeek-V3's own configs, and those that transformers writes, are not Kimi's
    assert read(KIMI, model_type="deepseek_v3").family == "deepseek_v3"
    assert read({k: v for k, v in KIMI.items() if k != "model_type"}).family == "deepseek_v3"
    assert read(KIMI, architectures=None).family == "kimi_k2"


def test_glm_flash_has_its_published_size() -> None:
    """Its model card has 30B parameters, 3B of them per token."""
    m = read(FLASH)
    assert m.family == "glm4_moe_lite" and m.mtp_layers == 1 and m.experts.dense_layers == (0,)
    total, active = parameters(m)
    assert (total, active) == (pytest.approx(30e9, rel=0.05), pytest.approx(3e9, rel=0.3))


def test_glm_flash_has_experts_where_transformers_has_them() -> None:
    hf = tiny_hf("glm4_moe_lite", layers=3, mlp_layer_types=["sparse", "dense", "sparse"],
                 first_k_dense_replace=None)  # fmt: skip
    m = parse_hf_config({**hf.config.to_dict(), "architectures": [type(hf).__name__]})
    table = build_piece_table(m, Layout())
    want = hf_named(hf, hf.state_dict())
    assert {t.name: t.shape for t in table.tensors} == {n: tuple(t.shape) for n, t in want.items()}
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in want


@pytest.mark.parametrize("kind", MLA_KINDS)
def test_every_element_once_in_every_layout(kind: str, tmp_path: Any) -> None:
    """check_coverage runs inside build_piece_table."""
    save_tiny(tmp_path, kind)
    from megarl.models.hf_config import read_hf_config

    m = read_hf_config(tmp_path)
    for layout in (Layout(tp=4, ep=2, dp=1), Layout(tp=2, pp=2, vpp=2, etp=2), Layout(cp=2, ep=2)):
        table = build_piece_table(m, layout)
        biases = [t for t in table.tensors if t.buffer]
        assert len(biases) == (3 if kind in ("deepseek_v3", "kimi_k2", "glm4_moe_lite") else 0)
        assert {t.name for t in table.tensors} - {t.name for t in table.trained.tensors} == {
            t.name for t in biases
        }


@pytest.mark.parametrize(
    "raw, over, words",
    (
        (V3, dict(rope_interleave=False), "rope_interleave=False"),
        (V3, dict(norm_topk_prob=False), "norm_topk_prob=False.*True"),
        (V3, dict(scoring_func="softmax"), "scoring_func='softmax'.*'sigmoid'"),
        (V3, dict(topk_method="greedy"), "topk_method='greedy'.*'noaux_tc'"),
        (V3, dict(num_key_value_heads=64), "num_key_value_heads=64"),
        (V3, dict(n_group=3), "n_group=3 with topk_group=4|n_group=3"),
        (V3, dict(first_k_dense_replace=61), "first_k_dense_replace=61"),
        (V3, dict(kv_lora_rank=None), "kv_lora_rank is missing"),
        (V3, dict(quantization_config={"quant_method": "fp8"}), "quantization_config.*dequantise"),
        (V3, dict(rope_scaling={"type": "linear", "factor": 2}), "'linear'.*default, yarn"),
        (V3, dict(rope_scaling={**V3["rope_scaling"], "truncate": "no"}), "truncate='no'"),
        (
            V3,
            dict(rope_scaling={**V3["rope_scaling"], "attention_factor": 0}),
            "factor=0;.*above 0",
        ),
        (
            V3,
            dict(rope_scaling={**V3["rope_scaling"], "attention_factor": 2, "factor": 1}),
            "attention_factor=2.0 with factor=1.0.*latent attention",
        ),
        (V3, dict(rope_scaling={"type": "yarn", "factor": 4}), "lacks original_max_position"),
        (FLASH, dict(first_k_dense_replace=3), "first_k_dense_replace=3.*1"),
        (FLASH, dict(mlp_layer_types=["sparse"] * 46), "for each of 47 layers"),
        (FLASH, dict(mlp_layer_types=["dense"] * 47), "one that is sparse"),
        (FLASH, dict(mlp_layer_types=["dense", "shared"] + ["sparse"] * 45), "mlp_layer_types"),
        (FLASH, dict(mlp_layer_types="sparse"), "mlp_layer_types='sparse'"),
        (FLASH, dict(mlp_layer_types=["sparse", "dense"] + ["sparse"] * 45), "leave it out"),
        (FLASH, dict(head_dim=128), "head_dim=128.*64"),
        (FLASH, dict(scoring_func="softmax"), "scoring_func='softmax'"),
        (FLASH, dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        (V2_LITE, dict(norm_topk_prob=True), "norm_topk_prob=True"),
        (V2_LITE, dict(topk_method="noaux_tc"), "topk_method='noaux_tc'"),
        (V2_LITE, dict(num_experts_per_tok=65), "num_experts_per_tok=65"),
        (V2_LITE, dict(qk_rope_head_dim=7), "qk_rope_head_dim=7"),
    ),
)
def test_what_is_not_implemented_is_named(
    raw: dict[str, Any], over: dict[str, Any], words: str
) -> None:
    if over.get("n_group") == 3:
        over = {**over, "topk_group": 2}
    with pytest.raises(ValueError, match=words):
        read(raw, **over)


def test_layouts_that_do_not_fit_name_the_values() -> None:
    m = read(V3, num_hidden_layers=8)
    check_layout(m, ParallelConfig(tp=8, sequence_parallel=True, pp=4, ep=64))
    with pytest.raises(ValueError, match="sequence_parallel=true"):
        check_layout(m, ParallelConfig(tp=2))
    with pytest.raises(ValueError, match=r"parallel\.ep=3 does not divide num_experts=256"):
        check_layout(m, ParallelConfig(ep=3))
    with pytest.raises(ValueError, match=r"parallel\.tp=8 does not divide q_lora_rank=1532"):
        check_layout(
            read(V3, num_hidden_layers=8, q_lora_rank=1532),
            ParallelConfig(tp=8, sequence_parallel=True),
        )
    with pytest.raises(ValueError, match=r"tp=8 does not divide kv_lora_rank \+ qk_rope_h.*=580"):
        check_layout(
            read(V3, num_hidden_layers=8, kv_lora_rank=516),
            ParallelConfig(tp=8, sequence_parallel=True),
        )
    with pytest.raises(ValueError, match=r"parallel\.tp=3 does not divide num_attention_heads=128"):
        check_layout(m, ParallelConfig(tp=3, sequence_parallel=True))


@pytest.mark.parametrize("context", (4096, 96, 7))
@pytest.mark.parametrize("cp", (1, 2, 3, 4, 6, 8, 12))
def test_context_parallelism_shares_the_rows_of_yarns_table(context: int, cp: int) -> None:
    """megatron-core cuts the table of the original context into 2 * cp parts."""
    parallel = ParallelConfig(cp=cp)
    scaling = {**V3["rope_scaling"], "original_max_position_embeddings": context}
    check_layout(read(V3, num_hidden_layers=8, rope_scaling=None), parallel)  # has no table
    m = read(V3, num_hidden_layers=8, rope_scaling=scaling)
    if cp == 1 or context % (2 * cp) == 0:
        check_layout(m, parallel)
        return
    words = rf"parallel\.cp={cp}\b.*original_max_position_embeddings={context}\b"
    with pytest.raises(ValueError, match=words):
        check_layout(m, parallel)


@pytest.mark.parametrize(
    "over",
    (
        dict(),
        dict(factor=40.0, mscale=0.707, mscale_all_dim=0.707),
        dict(mscale=None, mscale_all_dim=None),
        dict(mscale=0.5, mscale_all_dim=None),
        dict(beta_fast=16, beta_slow=2),
        dict(beta_fast=1.0, beta_slow=1.0, factor=32.0, mscale_all_dim=1.0),
        dict(factor=0.5),
        dict(attention_factor=1.3),
        dict(attention_factor=0.9, mscale=None, mscale_all_dim=None),
        dict(mscale=None),
        dict(truncate=False),
    ),
)
def test_yarn_is_hugging_faces_to_the_bit(over: dict[str, Any]) -> None:
    """Frequencies, the factor on cos and sin, and the scale of attention scores."""
    hf = tiny_hf("deepseek_v3", layers=2, rope_parameters={**YARN, **over})
    rotary, attention = hf.model.rotary_emb, hf.model.layers[0].self_attn
    raw = {**hf.config.to_dict(), "architectures": ["DeepseekV3ForCausalLM"]}
    m = parse_hf_config(raw)
    f = family_of(m).transformer_fields(m)
    ours = YarnRotaryEmbedding(
        f["qk_pos_emb_head_dim"], rotary_base=f["rotary_base"], use_cpu_initialization=True,
        scaling_factor=f["rotary_scaling_factor"],
        correction_range_round_to_int=over.get("truncate", True),
        **{k: f[k] for k in (
            "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"
        )},
    )  # fmt: skip
    angles, factor = ours(200)
    want = torch.arange(200.0)[:, None] * rotary.inv_freq
    assert torch.equal(angles[:, 0, 0, : want.shape[1]], want)
    assert factor == pytest.approx(rotary.attention_scaling, rel=1e-12)
    from megatron.core.models.common.embeddings import _yarn_get_mscale

    scale = _yarn_get_mscale(f["rotary_scaling_factor"], f["mscale_all_dim"]) ** 2
    assert scale * 20**-0.5 == pytest.approx(attention.scaling, rel=1e-12)


@pytest.mark.parametrize("kind", ("deepseek_v2", "deepseek_v3"))
def test_groups_are_chosen_as_hugging_face_does(kind: str) -> None:
    hf = tiny_hf(kind, layers=2)
    m = parse_hf_config({**hf.config.to_dict(), "architectures": [type(hf).__name__]})
    assert m.moe is not None and m.moe.groups > 1
    router = hf.model.layers[1].mlp.gate
    x = torch.randn(500, m.hidden_size, generator=torch.Generator().manual_seed(0))
    logits, _, want = router(x)
    scores = logits.softmax(-1) if kind == "deepseek_v2" else logits.sigmoid()
    biased = scores + getattr(router, "e_score_correction_bias", 0.0)
    values, chosen = GroupLimited(m.moe).get_replay_topk(biased, m.moe.top_k)
    assert torch.equal(chosen.sort().values, want.sort().values)
    assert torch.equal(values, biased.gather(1, chosen))
    assert not torch.equal(chosen.sort().values, biased.topk(m.moe.top_k).indices.sort().values)


@pytest.mark.parametrize(
    "kind", (*KINDS, *MOE_KINDS, *MLA_KINDS, *GLM_KINDS, *WINDOW_ROPE_KINDS, *OSS_KINDS)
)
def test_flops_are_those_torch_counts(kind: str) -> None:
    """Products of matrices are counted one by one; attention is computed in full, of which a causal
    one, or one through a window of 5, is the part of the pairs of tokens that it looks at."""
    hf = tiny_hf(kind, layers=3)
    hf.config._attn_implementation = "eager"
    hf.config._experts_implementation = "eager"
    m = parse_hf_config({**hf.config.to_dict(), "architectures": [type(hf).__name__]})
    n = 24
    with FlopCounterMode(display=False) as counter:
        hf(torch.arange(3, 3 + n)[None] % VOCAB).logits.sum().backward()
    by_op = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    attention = by_op.pop("aten.bmm")
    # of positions, by a product in forward
    angles = 2 * n * m.attention.rotary_dim // 2
    if attention % (6 * n * n):
        attention -= angles
    slides = [i in m.attention.window_layers for i in range(3)]
    pairs = sum(min(i + 1, 5 if slides_ else n) for slides_ in slides for i in range(n)) / 3
    want = sum(by_op.values()) + attention * pairs / n**2
    assert train_flops(m, [n]) == pytest.approx(want, rel=1e-9)
    assert train_flops(m, [n, 2 * n]) > 3 * train_flops(m, [n])
    assert isinstance(hf, transformers.PreTrainedModel)
