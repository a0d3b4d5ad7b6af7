"""Text of token ids, for stop strings and answers. A model without a tokenizer serves ids only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


class TextTools:
    """Decodes with the tokenizer in directory `path`; `tokenizer` is None where it has none."""

    def __init__(self, path: str) -> None:
        has_one = any((Path(path) / name).is_file() for name in _TOKENIZER_FILES)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path) if has_one else None

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`, or "" without a tokenizer."""
        if self.tokenizer is None or not ids:
            return ""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def matched_stop(self, ids: list[int], stops: tuple[str, ...]) -> str | None:
        """Returns the first of `stops` that is in the text of the last tokens, or None."""
        # a token may hold a part of a character; every byte of the stop string plus a margin do
        window = max(len(s.encode()) for s in stops) + 4
        tail = self.decode(ids[-window:], skip_special_tokens=False)
        return next((s for s in stops if s in tail), None)

    def answer(
        self,
        ids: list[int],
        finish_reason: dict[str, Any] | None,
        *,
        skip_special_tokens: bool,
        no_stop_trim: bool,
    ) -> str:
        """Returns the text of an answer, without the stop token or stop string that ended it."""
        matched = (finish_reason or {}).get("matched")
        trim = matched is not None and not no_stop_trim
        if trim and isinstance(matched, int):
            ids = ids[:-1]
        text = self.decode(ids, skip_special_tokens=skip_special_tokens)
        if trim and isinstance(matched, str) and (at := text.find(matched)) >= 0:
            text = text[:at]
        return text


def eos_token_ids(model_path: str, config: PretrainedConfig, tokenizer: Any) -> frozenset[int]:
    """Returns every id that the model's files call end of sequence."""
    found: set[int] = set()
    try:
        generation = GenerationConfig.from_pretrained(model_path)
    except OSError:  # the file is optional
        generation = GenerationConfig()
    from_tokenizer = getattr(tokenizer, "eos_token_id", None)
    for ids in (generation.eos_token_id, config.eos_token_id, from_tokenizer):
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return frozenset(int(i) for i in found)
