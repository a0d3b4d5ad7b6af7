"""Small configurations of some families, without files."""

from __future__ import annotations

from typing import Any

from megarl.models.hf_config import ModelConfig, parse_hf_config

FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {},
    "Qwen3MoeForCausalLM": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
                                mlp_only_layers=[1]),
    "Qwen3NextForCausalLM": dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, full_attention_interval=2,
        shared_expert_intermediate_size=8, partial_rotary_factor=1.0, linear_num_key_heads=4,
        linear_num_value_heads=8, linear_key_head_dim=2, linear_value_head_dim=3,
    ),
    "GptOssForCausalLM": dict(num_local_experts=4, num_experts_per_tok=2),
    "DeepseekV3ForCausalLM": dict(
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=8, n_shared_experts=1,
        first_k_dense_replace=1, n_group=1, topk_group=1, kv_lora_rank=6, q_lora_rank=None,
        qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4, num_key_value_heads=4,
    ),
}  # fmt: skip


def config(architecture: str = "Qwen2ForCausalLM", **over: Any) -> ModelConfig:
    raw: dict[str, Any] = dict(
        architectures=[architecture], vocab_size=21, hidden_size=8, intermediate_size=16,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=2,
    )  # fmt: skip
    return parse_hf_config(raw | FAMILIES[architecture] | over)
