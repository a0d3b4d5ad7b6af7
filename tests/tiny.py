"""Tiny random HF models that exercise what real families have: GQA, biases, qk-norm, tied heads."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as T

VOCAB = 130  # not a multiple of 128 * tp: the padded vocabulary is always exercised
KINDS = ("llama", "qwen2", "qwen3")
_CLS = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


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
    if kind == "qwen3":
        base["head_dim"] = 32  # != hidden / heads on purpose
    base.update(over)
    torch.manual_seed(seed)
    config = getattr(T, _CLS[kind] + "Config")(**base)
    model = getattr(T, _CLS[kind] + "ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.2 * torch.randn_like(p))
            elif name.endswith("bias"):
                p.normal_(std=0.3)
            else:
                p.mul_(4.0)
    return model.to(dtype)


def save_tiny(path: Path, kind: str, **kw: Any) -> Path:
    tiny_hf(kind, **kw).save_pretrained(path, safe_serialization=True)
    return path


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
