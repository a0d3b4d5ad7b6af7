"""Loads tokenizers of Hugging Face directories and hub names."""

from __future__ import annotations

from typing import Any

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
