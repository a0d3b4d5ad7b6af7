"""Loads tokenizers of Hugging Face directories and hub names. PlainTokenizer does
so without transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from megarl.config.recipes import BaseConfig
from megarl.utils.http import shown

# transformers' classes that make the same tokens as tokenizer.json
_PLAIN = ("PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast", "TokenizersBackend")


def load_hf_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """Returns the tokenizer of a directory or hub name. Raises ValueError where there is none, and
    for one that needs code, without trust_remote_code: with it, code that lies beside the tokenizer
    runs, which some published tokenizers need; it may do anything."""
    if not path:
        raise ValueError(
            "load_hf_tokenizer(''): no path; set tokenizer_path, or give the model's, actor.path"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except ValueError as e:
        if "trust_remote_code" not in str(e):
            raise ValueError(
                f"{path!r} has no tokenizer that can be loaded: add its tokenizer.json, or set "
                f"tokenizer_path to a directory that has one ({shown(str(e))})"
            ) from e
        raise ValueError(
            f"the tokenizer of {path} needs code that lies beside it: read that code, then set "
            "trust_remote_code=true"
        ) from e


def run_tokenizer(cfg: BaseConfig, model_path: str) -> Any:
    """Returns the tokenizer of a run whose model lies in `model_path`, with the chat template that
    the configuration names."""
    path = cfg.tokenizer_path or model_path
    tokenizer = load_hf_tokenizer(path, trust_remote_code=cfg.trust_remote_code)
    if file := cfg.chat_template:
        tokenizer.chat_template = Path(file).read_text(encoding="utf-8")
    return tokenizer


def tokenizer_for_checks(cfg: BaseConfig, model_path: str) -> Any:
    """Returns the run's tokenizer, read without transformers where its files are plain."""
    try:
        file = cfg.chat_template
        text = Path(file).read_text(encoding="utf-8") if file else ""
        return PlainTokenizer(Path(cfg.tokenizer_path or model_path), text)
    except Exception:  # a tokenizer's files may be wrong in any way
        return run_tokenizer(cfg, model_path)


def tokenizer_to_save(cfg: BaseConfig, model_path: str) -> Any:
    """Returns the run's tokenizer where it has to be saved with the model, None where it is the one
    in the model's own directory."""
    if cfg.tokenizer_path or cfg.chat_template:
        return run_tokenizer(cfg, model_path)
    return None


class PlainTokenizer:
    """Has what a `Template` uses of transformers' tokenizers, but for templates that mark the
    assistant's text: tokenizer.json by `tokenizers`, the chat template by Jinja. The checks of a
    start try it first: importing transformers takes longer than all else they do. Raises any
    exception for files of which transformers makes more than this, and for unsound ones."""

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
        variables = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return self._template.render(**{"tools": None, **self._named, **kwargs, **variables})


def _environment() -> ImmutableSandboxedEnvironment:
    """Returns what most chat templates use, by transformers' page on writing them. One that calls
    more fails here, and goes on to transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    return environment
