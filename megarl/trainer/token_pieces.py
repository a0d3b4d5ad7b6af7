"""Spells token ids as the pieces of text that they stand for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

Piece = str | list[int]  # text, or bytes that are not whole characters

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BROKEN = "\ufffd"


class TokenPieces:
    """Spells tokens one by one, so that pieces side by side are the text; each id is looked up
    once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, Piece] = {}
        self._special = set(getattr(tokenizer, "all_special_ids", ()))

    def of(self, ids: Iterable[int]) -> dict[int, Piece]:
        """Returns the pieces by id."""
        return {i: self._of(i) for i in ids}

    def special(self, ids: Iterable[int]) -> list[int]:
        """Returns the ids that are special tokens."""
        return [i for i in ids if i in self._special]

    def _of(self, token: int) -> Piece:
        if token not in self._known:
            self._known[token] = self._spell(token)
        return self._known[token]

    def _spell(self, token: int) -> Piece:
        """Returns a token's text; an id that the tokenizer does not know is <|id|>."""
        try:
            named = self._tokenizer.convert_ids_to_tokens(token)
            text = self._tokenizer.decode([token], skip_special_tokens=False)
        except (AttributeError, TypeError, ValueError, IndexError, OverflowError):
            named = text = None
        if not isinstance(named, str) or not isinstance(text, str):
            return text or f"<|{token}|>"
        if found := _BYTE.fullmatch(named):
            return [int(found[1], 16)]
        if named.startswith("\u2581") and not text.startswith(" "):  # decoding drops a first space
            return " " + text
        if _BROKEN in text and all(c in _byte_characters() for c in named):
            return [_byte_characters()[c] for c in named]
        return text


@cache
def _byte_characters() -> dict[str, int]:
    """Returns the bytes that the characters of byte-level tokenizers stand for: what can be printed
    stands for itself, the others follow from U+0100 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}
