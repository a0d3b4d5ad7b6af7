"""Loads tokenizers of Hugging Face directories and hub names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.config.recipes import BaseConfig
from megarl.utils.http import shown


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


def tokenizer_to_save(cfg: BaseConfig, model_path: str) -> Any:
    """Returns the run's tokenizer where it has to be saved with the model, None where it is the one
    in the model's own directory."""
    if cfg.tokenizer_path or cfg.chat_template:
        return run_tokenizer(cfg, model_path)
    return None
