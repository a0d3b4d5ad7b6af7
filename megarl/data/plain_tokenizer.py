"""Reads a tokenizer's own files: tokenizer.json by `tokenizers`, the chat template by Jinja.

The checks of a start try it first: importing transformers takes longer than all else they do. It
takes directories for which transformers does no more than this, and refuses all others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

# transformers' classes whose tokens are those that tokenizer.json makes
_PLAIN = ("PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast", "TokenizersBackend")


class PlainTokenizer:
    """Has what a `Template` uses of transformers' tokenizers, but for templates that mark the
    assistant's text. Raises any exception where the files are not plain, or not sound."""

    def __init__(self, directory: Path, chat_template: str = "") -> None:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
        if config["tokenizer_class"] not in _PLAIN or "auto_map" in config:
            raise ValueError(f"{directory}: {config['tokenizer_class']} is not plain")
        self.name_or_path = str(directory)
        self._tokens = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.added_tokens_decoder = self._tokens.get_added_tokens_decoder()
        named = {name: token for name, token in config.items() if name.endswith("_token") and token}
        self._named = {n: t["content"] if isinstance(t, dict) else t for n, t in named.items()}
        self.eos_token: str = self._named["eos_token"]
        self.eos_token_id = self._tokens.token_to_id(self.eos_token)
        file = directory / "chat_template.jinja"
        own = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        self.chat_template: str = chat_template or own
        self._template = _environment().from_string(self.chat_template)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        """Returns {"input_ids": the tokens of `text`}."""
        encoding = self._tokens.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoding.ids}

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> str:
        """Returns the text of the messages. Raises NotImplementedError to make tokens."""
        if tokenize:
            raise NotImplementedError("only transformers tells which tokens a template marks")
        known = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return self._template.render(**{"tools": None, **self._named, **kwargs, **known})


def _environment() -> ImmutableSandboxedEnvironment:
    """Returns what most chat templates use, by transformers' page on writing them. One that calls
    more fails here, and goes on to transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    return environment
