"""A byte-level BPE tokenizer small enough for the tiny models (VOCAB=130 ids)."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.tiny import VOCAB

_SPECIAL = ["<pad>", "<eos>", "<bos>"]  # ids 0, 1, 2, as tests/tiny.py numbers them
_CHAT = (
    "{% if tools %}<bos>tools: {{ tools | length }}\n{% endif %}"
    "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)


def save_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Trains a tokenizer on printable ASCII and writes it to the HF directory `path`."""
    ascii_ = sorted(set(map(chr, range(32, 127))) | {"Ċ", "Ġ"})
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    corpus = [f"the quick brown fox jumps over {i} lazy dogs in {3 * i}" for i in range(200)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=_SPECIAL, initial_alphabet=ascii_, show_progress=False
    )
    tok.train_from_iterator(corpus, trainer)
    assert tok.get_vocab_size() == VOCAB
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok, eos_token="<eos>", pad_token="<pad>", bos_token="<bos>"
    )
    fast.chat_template = _CHAT
    fast.save_pretrained(path)
    return fast
