"""Makes the model of a rehearsal: a small config.json of the same family, random weights, a
tokenizer of bytes, and a reward.

Nothing here is a model that anybody would train: sizes are the smallest that every degree divides
and that leave each mechanism something to do (two key/value heads, two experts on every rank, a
group of experts that loses, a window shorter than a prompt).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.parallel import ParallelConfig
from megarl.models.families import find_family
from megarl.models.hf_config import DEFAULTS

HEAD = 16  # numbers of a head
WINDOW = 8  # tokens
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
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_OF_THE_TOKENIZER = ("bos_token_id", "eos_token_id", "pad_token_id")


# sizes


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Holds what sizes must be multiples of, for every engine that uses the model. `repeats`: the
    layout had more tensor-parallel ranks than key/value heads, which ranks then repeat."""

    tp: int
    ep: int
    etp: int
    repeats: bool

    @classmethod
    def of(
        cls,
        here: Sequence[ParallelConfig],
        before: Sequence[ParallelConfig],
        raw: Mapping[str, Any],
    ) -> Degrees:
        """Returns the degrees of the layouts `here`, which were those `before`, of the model with
        the config.json `raw`."""
        tp, ep, etp = (math.lcm(*(getattr(p, d) for p in here)) for d in ("tp", "ep", "etp"))
        kv_heads = raw.get("num_key_value_heads") or raw["num_attention_heads"]
        return cls(tp=tp, ep=ep, etp=etp, repeats=any(p.tp > kv_heads for p in before))


def is_mixed(raw: Mapping[str, Any]) -> bool:
    """Returns whether the model has layers of several kinds: dense ones before experts, or a
    sliding window in some."""
    full = _completed(raw)
    dense = full.get("first_k_dense_replace") or full.get("mlp_only_layers")
    sparse = any(k in full for k in _EXPERTS)
    some = full.get("sliding_window") and full.get("use_sliding_window")
    return bool(sparse and (dense or full["decoder_sparse_step"] > 1)) or bool(some)


def shrink_model(
    raw: Mapping[str, Any], d: Degrees, *, layers: int, vocab_size: int, positions: int
) -> dict[str, Any]:
    """Returns the config.json `raw` with small sizes. Raises ValueError where the family of `raw`
    is not known."""
    full = _completed(raw)
    experts, wide = 2 * max(2, d.ep), HEAD * math.lcm(d.tp, d.etp)
    sizes = {
        "intermediate_size": 4 * wide,
        # latents of DeepSeek's attention, each of which tp divides
        "q_lora_rank": 2 * HEAD * d.tp,
        "kv_lora_rank": HEAD * d.tp,
        "qk_nope_head_dim": HEAD,
        "qk_rope_head_dim": 8 * d.tp,
        "v_head_dim": HEAD,
        # which layers are of which kind
        "first_k_dense_replace": 1,
        "mlp_only_layers": [0],
        "decoder_sparse_step": min(2, layers, full["decoder_sparse_step"]),
        "sliding_window": WINDOW,
        "max_window_layers": layers // 2,
        **dict.fromkeys(_EXPERTS, experts),
        "moe_intermediate_size": 2 * wide,
        "shared_expert_intermediate_size": 2 * wide,
    }
    small = {k: v for k, v in raw.items() if k not in (*_OF_THE_TOKENIZER, "layer_types")}
    small.setdefault("model_type", find_family(raw, "config.json").name)
    small |= {key: value for key, value in sizes.items() if full.get(key)}
    small |= {"num_hidden_layers": layers, "vocab_size": vocab_size}
    small |= {"max_position_embeddings": positions, **_heads(full, d)}
    if any(key in full for key in _EXPERTS):
        small |= _choice(full, experts)
    return small


def _completed(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {**DEFAULTS, **find_family(raw, "config.json").defaults, **raw}


def _heads(full: Mapping[str, Any], d: Degrees) -> dict[str, Any]:
    """Returns heads, key/value heads and the hidden size."""
    if "kv_lora_rank" in full:
        heads = kv = 2 * max(1, d.tp)
        return _sizes_of(heads, kv, HEAD * heads)
    before = int(full["num_attention_heads"])
    shared = min(2, before // int(full.get("num_key_value_heads") or before))
    kv = max(1, d.tp // 2) if d.repeats else max(2, d.tp)
    heads = math.lcm(kv * shared, d.tp)
    dim = full.get("head_dim")
    if dim is None:
        return _sizes_of(heads, kv, HEAD * heads)
    wider = dim * before != full["hidden_size"]
    return _sizes_of(heads, kv, HEAD * heads * (3 if wider else 2) // 2) | {"head_dim": HEAD}


def _sizes_of(heads: int, kv: int, hidden: int) -> dict[str, Any]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv, "hidden_size": hidden}


def _choice(full: Mapping[str, Any], experts: int) -> dict[str, Any]:
    """Returns groups of experts, and how many experts a token meets."""
    groups, best = full.get("n_group") or 1, full.get("topk_group")
    limited = groups > 1 and best is not None and best < groups
    choice = experts // 2 if limited else experts
    small = {"num_experts_per_tok": min(full["num_experts_per_tok"], max(2, choice // 2))}
    if groups > 1:
        small |= {"n_group": 2, "topk_group": 1 if limited else 2}
    return small


# files


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


def even_share(
    prompt: Any, completion: str, prompt_ids: Any, completion_ids: Any, **row: Any
) -> float:
    """Returns the share of even token ids in the answer, from 0 to 1. A model with random weights
    answers nothing rightly; this way samples differ, and gradients are not zero."""
    return sum(token % 2 == 0 for token in completion_ids) / max(1, len(completion_ids))
