"""Defines the task of both sides of grpo_vs_trl.py: model, prompts, reward, hyperparameters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

PROMPTS, GROUP, MAX_NEW_TOKENS = 8, 8, 64
LEVEL = 8  # digits of a and b in the prompts a+b
LR, BETAS, EPS, WEIGHT_DECAY, CLIP_NORM, CLIP = 1e-6, (0.9, 0.95), 1e-8, 0.01, 1.0, 0.2
LENGTHS = ("equal", "ragged")
_EOS_PROBABILITY = {"equal": 0.0, "ragged": 1 / 20}


def make_model(path: Path, *, lengths: str, seed: int = 1) -> int:
    """Saves a random Qwen3 of 4.9M parameters over bytes; returns the number of parameters.

    Its answers are noise. The probability of EOS after any token sets their length: the embedding's
    first dimension is constant, and the head's row of EOS reads only that dimension.
    """
    import torch
    from tiny_model import make_tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer(seed)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=768, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, max_position_embeddings=256,
        tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float().eval()
    eos, probability = int(tokenizer.eos_token_id), _EOS_PROBABILITY[lengths]
    head = model.lm_head.weight.data
    model.model.embed_tokens.weight.data[:, 0] = 1.0
    head[eos] = 0.0
    with torch.no_grad():
        hidden = model.model(torch.randint(4, len(tokenizer), (8, 64))).last_hidden_state
        others = (hidden @ head.T).exp().sum(-1) - 1
        wanted = torch.log(others * max(probability, 1e-12) / (1 - probability))
        head[eos, 0] = (wanted / hidden[..., 0]).mean()
    model.save_pretrained(path, safe_serialization=True)
    tokenizer.save_pretrained(path)
    return sum(p.numel() for p in model.parameters())


def score(completion: str) -> float:
    """Returns the share of characters that are digits."""
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **row: Any
) -> float:
    """Wraps `score` in the signature of a megarl reward."""
    return score(completion)
