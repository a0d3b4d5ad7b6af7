"""Makes the quickstart's model: a small random Qwen3 with its own trained tokenizer.

    python examples/tiny_model.py OUT [--seed 1] [--hidden 128] [--layers 4]

The result is a normal HF directory (config.json, model.safetensors, tokenizer, chat template).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

USER, ASSISTANT, END, PAD = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def corpus(seed: int, n: int = 2000) -> Iterator[str]:
    """Yields sums as text; digits stay single tokens, as in Qwen's and Llama's tokenizers."""
    rng = random.Random(seed)
    for _ in range(n):
        a, b = rng.randrange(1000), rng.randrange(1000)
        yield f"{a}+{b}={a + b}"


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    tok = Tokenizer(models.BPE(unk_token=None))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=264,
        special_tokens=[PAD, END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # any text can be encoded
        show_progress=False,
    )
    tok.train_from_iterator(corpus(seed), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token=END, pad_token=PAD)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(out: Path, *, seed: int = 1, hidden: int = 128, layers: int = 4) -> Qwen3ForCausalLM:
    """Writes model and tokenizer to `out` and returns the model."""
    disable_progress_bar()  # of one small file, there and back
    tokenizer = make_tokenizer(seed)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(2, hidden // 64),
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(out, safe_serialization=True)
    tokenizer.save_pretrained(out)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    model = make_model(args.out, seed=args.seed, hidden=args.hidden, layers=args.layers)
    print(f"{args.out}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters")


if __name__ == "__main__":
    main()
