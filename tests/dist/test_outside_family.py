"""A family from outside of the package: this file is all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megarl.models.families import register
from megarl.models.families.base import Family
from tests.dist.engine_jobs import Tensors
from tests.dist.invariance import batch, check, train
from tests.dist.losses import LOSSES
from tests.dist.reference import hf_steps
from tests.tiny import VOCAB

register(
    Family(
        name="seed_oss",
        architecture="SeedOssForCausalLM",
        qkv_bias=True,
        defaults={"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288},
        ignored_fields=("attention_bias", "mlp_bias"),
    )
)


def train_outside(path: str, parallel: dict[str, Any], b: Tensors) -> Any:
    """Runs `train` in a process that has imported this file."""
    return train(path, parallel, "policy", b)


def test_a_family_from_outside_equals_hugging_face(worlds: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.SeedOssConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
        attention_bias=True, attention_out_bias=False, attention_dropout=0.0,
        residual_dropout=0.0, pad_token_id=0, bos_token_id=2, eos_token_id=1,
    )  # fmt: skip
    hf = transformers.SeedOssForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, p in hf.named_parameters():
            p.normal_(std=0.3) if name.endswith("bias") else p.mul_(1.0 if "norm" in name else 4.0)
    hf.save_pretrained(tmp_path)
    b = batch(hf)
    got = worlds(2).run(train_outside, str(tmp_path), dict(tp=2), b)
    check(got, hf_steps(hf, b, LOSSES["policy"]))


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="'seed_oss' exists already"):
        register(Family(name="seed_oss", architecture="OtherForCausalLM"))
