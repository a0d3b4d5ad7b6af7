"""Value models: a language model with a scalar per token (`score`) in place of the vocabulary.

Hugging Face calls them ForTokenClassification (the score has a bias) and ForSequenceClassification
(no bias; the score of the last token counts), with one label. Critics and reward models are such.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.models.families import family_of
from megarl.models.shapes import ModelConfig

LM, TOKEN, SEQUENCE = "ForCausalLM", "ForTokenClassification", "ForSequenceClassification"


def language_model(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `raw` under the name of the language model that the value model is built on."""
    names = raw.get("architectures") or []
    if not isinstance(names, list):
        return raw  # parse_hf_config raises the error
    return {**raw, "architectures": [n.replace(TOKEN, LM).replace(SEQUENCE, LM) for n in names]}


def value_model(
    lm: ModelConfig, raw: Mapping[str, Any], source: str, *, new_bias: bool = True
) -> ModelConfig:
    """Returns the value model of a config.json `raw` whose transformer is that of `lm`.

    A language model's directory becomes a token classifier with a new head, without `new_bias` a
    sequence classifier. Raises ValueError for a classifier whose labels are not exactly one.
    """
    names = raw.get("architectures") or [family_of(lm).architecture]
    new = not any(n.endswith((TOKEN, SEQUENCE)) for n in names)
    if new:
        label = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        name = family_of(lm).architecture.replace(LM, TOKEN if new_bias else SEQUENCE)
        raw = {k: v for k, v in raw.items() if k != "num_labels"} | label
        raw = {**raw, "architectures": [name]}
    elif (labels := len(raw.get("id2label") or ()) or raw.get("num_labels", 2)) != 1:
        raise ValueError(f"{source}: {names[0]} with {labels} labels; a value model has one")
    return replace(
        lm,
        raw=dict(raw),
        tie_word_embeddings=False,
        head="value",
        score_bias=new_bias if new else any(n.endswith(TOKEN) for n in names),
        new_head=new,
    )
