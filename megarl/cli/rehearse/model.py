"""Writes the model of a rehearsal: a small config.json, random weights, a tokenizer of bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

END, PAD, USER, ASSISTANT = "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>"
_SPECIAL = (PAD, END, USER, ASSISTANT)
VOCAB = 256 + len(_SPECIAL) + 2  # two rows that no token has, as published models have
_STD = 0.1
_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_model(raw: Mapping[str, Any], directory: Path, *, head: str, seed: int) -> int:
    """Writes the model of the config.json `raw` and its tokenizer as a Hugging Face directory;
    returns its number of parameters. head: "value" where `raw` is a value model's. Raises
    ValueError where megarl does not support the model."""
    import torch
    from safetensors.torch import save_file

    from megarl.models.families import family_of
    from megarl.models.hf_config import read_hf_config

    directory.mkdir(parents=True)
    own = "value" if head == "value" and not _is_language_model(raw) else "lm"
    ends = {"eos_token_id": _SPECIAL.index(END), "pad_token_id": _SPECIAL.index(PAD)}
    (directory / "config.json").write_text(json.dumps(dict(raw) | ends, indent=2) + "\n")
    model = read_hf_config(directory, head=own)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for param, _ in family_of(model).params(model):
        for name, shape in zip(param.hf, param.op.hf_shapes(model), strict=True):
            random = torch.randn(shape, generator=generator) * _STD
            tensors[name] = random + 1 if "norm" in name else random
            if not param.buffer:
                tensors[name] = tensors[name].to(getattr(torch, model.dtype))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory)
    return sum(math.prod(t.shape) for t in tensors.values())


def write_tokenizer(directory: Path) -> None:
    """Writes a tokenizer that has a token for every byte and one for each mark of a chat."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*_SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(directory)


def _is_language_model(raw: Mapping[str, Any]) -> bool:
    return all(str(name).endswith("ForCausalLM") for name in raw.get("architectures") or ())
