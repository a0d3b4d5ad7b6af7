"""Shows a sample as its parts, with who wrote each of them."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from megarl.api.tokens import Padded

WROTE, READ = "model", "environment"


def turns(batch: Padded, sample: int, tokenizer: Any) -> dict[str, list[dict[str, str]]]:
    """Returns {"turns": [{"who": "model" | "environment", "text"}]} of row `sample` of a padded
    batch [B,S], from the first token the model wrote; {} where it wrote in one piece and nothing
    follows.

    The model wrote the tokens under loss_mask; the others were given to it: a tool's words, the
    user's next turn."""
    real = batch["attention_mask"][sample].bool()
    ids = batch["input_ids"][sample][real].tolist()
    written = batch["loss_mask"][sample][real].bool().tolist()
    if True not in written:
        return {}
    parts = groupby(range(written.index(True), len(ids)), key=written.__getitem__)
    found = [
        {
            "who": WROTE if by_model else READ,
            "text": tokenizer.decode([ids[t] for t in places], skip_special_tokens=True),
        }
        for by_model, places in parts
    ]
    found = [turn for turn in found if turn["who"] == WROTE or turn["text"].strip()]
    return {"turns": found} if len(found) > 1 else {}
