"""Tiny random HF models that exercise what real families have: GQA, biases, qk-norm, tied heads,
experts.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as T
from safetensors.torch import load_file, save_file

from megarl.models.families import find_wrapper

VOCAB = 130  # not a multiple of 128 * tp: the padded vocabulary is always exercised
KINDS = ("llama", "qwen2", "qwen3", "mistral")
MOE_KINDS = ("qwen2_moe", "qwen3_moe", "mixtral", "glm4_moe", "minimax_m2")
# gated delta networks and attention in turns
HYBRID_MOE_KINDS = ("qwen3_next", "qwen3_5_moe_text")
HYBRID_KINDS = ("qwen3_5_text", *HYBRID_MOE_KINDS)
OSS_KINDS = ("gpt_oss",)
GLM_KINDS = ("glm", "glm4")
WINDOW_ROPE_KINDS = (
    "gemma3_text",
    "olmo3",
)  # layers with a window have rotary settings of their own
# latent attention, with and without a latent of queries
MLA_KINDS = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "kimi_k2", "glm4_moe_lite")
_CLS = {
    "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral", "deepseek_v2": "DeepseekV2",
    "deepseek_v2_lite": "DeepseekV2", "deepseek_v3": "DeepseekV3", "glm": "Glm", "glm4": "Glm4",
    "mistral": "Mistral", "glm4_moe": "Glm4Moe", "kimi_k2": "DeepseekV3",
    "glm4_moe_lite": "Glm4MoeLite",
    "qwen3_next": "Qwen3Next", "qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe",
    "gemma3_text": "Gemma3", "olmo3": "Olmo3", "minimax_m2": "MiniMaxM2",
    "gpt_oss": "GptOss",
}  # fmt: skip
YARN = dict(
    rope_type="yarn",
    factor=8.0,
    beta_fast=32,
    beta_slow=1,
    mscale=1.0,
    mscale_all_dim=0.7,
    original_max_position_embeddings=32,
    rope_theta=10000.0,
)
_MLA: dict[str, Any] = dict(
    num_key_value_heads=4, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16,
    n_shared_experts=2, moe_intermediate_size=48, first_k_dense_replace=1, rope_parameters=YARN,
)  # fmt: skip
# more value heads than key heads, of another size
_DELTA: dict[str, Any] = dict(
    head_dim=32, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=16,
    linear_value_head_dim=24, full_attention_interval=2,
)  # fmt: skip
_DELTA_MOE = _DELTA | dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
    shared_expert_intermediate_size=40,
)  # fmt: skip
# what is a family's own
_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3_next": _DELTA_MOE | dict(mlp_only_layers=[1]),
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA_MOE,
    "qwen3": dict(head_dim=32),  # != hidden / heads on purpose
    "mistral": dict(sliding_window=5),
    # layers 1 and 3 attend in full; scores are not scaled by the size of a head
    "gemma3_text": dict(
        head_dim=24,
        query_pre_attn_scalar=20,
        sliding_window=5,
        sliding_window_pattern=2,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=4.0, rope_theta=5e4),
            sliding_attention=dict(rope_type="default", rope_theta=300.0),
        ),
    ),
    "olmo3": dict(
        sliding_window=5,
        rope_parameters=dict(
            full_attention=YARN | dict(mscale=None, rope_theta=5e4),
            sliding_attention=dict(rope_type="default", rope_theta=300.0),
        ),
    ),
    "minimax_m2": dict(
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=24,
        rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.5),
    ),
    # the default of both is to rotate half of a head
    "glm": dict(head_dim=24, attention_bias=True, rms_norm_eps=1e-5),
    "glm4": dict(head_dim=24, attention_bias=False, rms_norm_eps=1e-5),
    "qwen2_moe": dict(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        decoder_sparse_step=2,
        shared_expert_intermediate_size=40,
        norm_topk_prob=True,
    ),
    # layer 1 is dense; the weights of a token's experts do not sum to 1
    "qwen3_moe": dict(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        mlp_only_layers=[1],
        head_dim=32,
    ),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v2": _MLA
    | dict(
        n_routed_experts=6,
        num_experts_per_tok=3,
        n_group=3,
        topk_group=2,
        q_lora_rank=24,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.6,
    ),
    "deepseek_v2_lite": _MLA
    | dict(
        n_routed_experts=4,
        num_experts_per_tok=2,
        q_lora_rank=None,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    ),
    "deepseek_v3": _MLA
    | dict(
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        q_lora_rank=24,
        routed_scaling_factor=2.5,
        num_nextn_predict_layers=1,
        rms_norm_eps=1e-5,
    ),
    # a router without groups
    "kimi_k2": _MLA
    | dict(
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=1,
        topk_group=1,
        q_lora_rank=24,
        routed_scaling_factor=2.827,
        n_shared_experts=1,
        num_nextn_predict_layers=0,
        rope_parameters=YARN | dict(beta_fast=1.0, mscale_all_dim=1.0),
    ),
    # every other layer has a window; the clamps of gates are met
    "gpt_oss": dict(
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=24,
        sliding_window=5,
        swiglu_limit=1.5,
        rope_parameters=dict(
            rope_type="yarn",
            factor=8.0,
            truncate=False,
            original_max_position_embeddings=32,
            rope_theta=10000.0,
        ),
    ),
    "glm4_moe_lite": _MLA
    | dict(
        n_routed_experts=4,
        num_experts_per_tok=2,
        q_lora_rank=24,
        routed_scaling_factor=1.8,
        n_shared_experts=1,
        rms_norm_eps=1e-5,
        rope_parameters=dict(rope_type="default", rope_theta=1e6),
    ),
    "glm4_moe": dict(
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
        num_nextn_predict_layers=1,
        head_dim=24,
        attention_bias=True,
        use_qk_norm=True,
    ),
}


def tiny_hf(
    kind: str,
    *,
    tie: bool = False,
    layers: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **over: Any,
) -> T.PreTrainedModel:
    """A random model with logits far from uniform (weights scaled up, norms and biases random)."""
    base: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tie,
        rms_norm_eps=1e-6,
        eos_token_id=1,
        bos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    cls = getattr(T, _CLS[kind] + "ForCausalLM")
    model = cls(cls.config_class(**(base | _FAMILY.get(kind, {}) | over))).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.2 * torch.randn_like(p))
            elif name.endswith("A_log"):
                p.copy_(torch.empty_like(p).uniform_(0.05, 2.0).log())
            elif name.endswith(("bias", "sinks")) or "conv1d" in name:
                p.normal_(std=0.3)
            elif "linear_attn" in name:
                pass  # three steps with larger weights are ill-conditioned
            else:
                p.mul_(4.0)
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.normal_(std=0.2)
    return model.to(dtype)


def hf_named(model: T.PreTrainedModel, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Values by parameter name -> by the name of HF's files, where every expert stands alone, but
    gpt-oss's."""
    if model.config.model_type == "gpt_oss":
        return dict(values)
    mixtral = model.config.model_type in ("mixtral", "minimax_m2")
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    out = {}
    for name, value in values.items():
        block, _, leaf = name.rpartition(".")
        if mixtral:
            block = block.replace(".mlp", ".block_sparse_moe")
        if leaf in ("gate_up_proj", "down_proj"):
            for e, x in enumerate(value):
                parts = {gate: x.chunk(2)[0], up: x.chunk(2)[1]} if "up" in leaf else {down: x}
                out |= {f"{block}.{e}.{part}.weight": y for part, y in parts.items()}
        else:
            out[f"{block}.{leaf}"] = value
    return out


def save_tiny(path: Path, kind: str, **kw: Any) -> Path:
    return save_hf(tiny_hf(kind, **kw), path, kind)


def save_hf(model: T.PreTrainedModel, path: Path, kind: str) -> Path:
    """Saves a model of `kind`; transformers has no model_type "kimi_k2", so it is written here."""
    model.save_pretrained(path, safe_serialization=True)
    if kind == "kimi_k2":
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"model_type": kind}))
    return path


def nest(path: Path, architecture: str) -> Path:
    """Makes the directory of a tiny language model one of `architecture`, as it is published: with
    text_config, names of its own, a vision tower and layers that predict further tokens."""
    config = json.loads((path / "config.json").read_text())
    text = {k: v for k, v in config.items() if k != "architectures"}
    whole = {"architectures": [architecture], "vision_config": {"depth": 1}, "dtype": text["dtype"]}
    whole |= {"tie_word_embeddings": text["tie_word_embeddings"], "model_type": "whole"}
    (path / "config.json").write_text(json.dumps(whole | {"text_config": text}))
    wrapped = find_wrapper(whole)
    assert wrapped is not None
    tensors = load_file(path / "model.safetensors")
    beside = {
        "model.visual.blocks.0.weight": torch.randn(3, 5, 2).bfloat16(),
        "vision_tower.ids": torch.arange(7),
        "vision_tower.mask": torch.tensor([True, False, True]),
        "vision_tower.scale": torch.randn(5).to(torch.float8_e4m3fn),
        "mtp.fc.weight": torch.randn(4),
    }
    named = {wrapped[1].name(name): t for name, t in tensors.items()}
    save_file(named | beside, path / "model.safetensors", {"format": "pt"})
    return path


# names of the linear maps of layers, which FP8 stores: not embeddings, head, norms, biases, routers
LINEAR = re.compile(r"\.layers\.\d+\..*\.(\w+_proj|in_proj_\w+|kv_a_proj_with_mqa|w[123])\.weight$")


def is_linear(name: str) -> bool:
    """Whether an HF tensor of the tiny models is stored in FP8, by its name."""
    return LINEAR.search(name) is not None


@cache
def random_batch(n: int = 6, lo: int = 3, hi: int = 21, seed: int = 0) -> dict[str, torch.Tensor]:
    """Padded batch [n,S] of ragged lengths; loss_mask leaves out a prompt of two tokens."""
    g = torch.Generator().manual_seed(seed)
    lens = torch.randint(lo, hi, (n,), generator=g)
    width = int(lens.max())
    ids = torch.randint(3, VOCAB, (n, width), generator=g)
    mask = torch.arange(width)[None] < lens[:, None]
    loss_mask = mask.clone()
    loss_mask[:, :2] = False
    return {"input_ids": ids * mask, "attention_mask": mask, "loss_mask": loss_mask}
