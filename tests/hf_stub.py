"""A HF model directory as far as anything that does not import torch looks at it."""

from __future__ import annotations

import json
from pathlib import Path


def write_stub(folder: Path) -> Path:
    """Qwen3, 4 layers, 4 heads, 2 KV heads, 4096 positions; an empty safetensors file and an
    empty vocabulary.
    """
    config = dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=64, head_dim=16,
        intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=130, max_position_embeddings=4096, rms_norm_eps=1e-6, hidden_act="silu",
        tie_word_embeddings=True,
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "vocab.txt").write_text("")
    return folder
