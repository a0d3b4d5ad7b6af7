"""A HF model directory as far as anything that does not import torch looks at it."""

from __future__ import annotations

import json
from pathlib import Path


def write_stub(folder: Path) -> Path:
    """Qwen3, 4 layers, 4 heads, 2 KV heads, 4096 positions; an empty safetensors file and a
    tokenizer that knows one word.
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
    vocab = {"<unk>": 0, "<eos>": 1, "word": 2}
    end = dict(
        id=1, content="<eos>", special=True, single_word=False, lstrip=False, rstrip=False,
        normalized=False,
    )  # fmt: skip
    tokenizer = dict(
        version="1.0", truncation=None, padding=None, added_tokens=[end], normalizer=None,
        pre_tokenizer={"type": "Whitespace"}, post_processor=None, decoder=None,
        model={"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    )  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    about = dict(
        tokenizer_class="PreTrainedTokenizerFast", eos_token="<eos>", unk_token="<unk>",
        chat_template="{% for m in messages %}{{ m.role }} {{ m.content }}<eos>{% endfor %}",
    )  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder
