"""Reads transformers' config of a model whose model_type transformers may not know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def transformers_config(path: str | Path, override: Mapping[str, Any] | None = None) -> Any:
    """Returns transformers' config of the model directory `path`, with other values for the keys in
    `override`.

    A model_type that transformers does not know is read as that of the architecture: Kimi-K2 calls
    itself "kimi_k2", and its architecture is DeepseekV3ForCausalLM.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw, _ = transformers.PretrainedConfig.get_config_dict(path)
    model = getattr(transformers, (raw.get("architectures") or [""])[0], None)
    known = raw.get("model_type") in CONFIG_MAPPING
    if known and override:
        return CONFIG_MAPPING[raw["model_type"]].from_dict({**raw, **override})
    if known or model is None:
        return transformers.AutoConfig.from_pretrained(path)
    raw = {**raw, **(override or {})}
    return model.config_class.from_dict({k: v for k, v in raw.items() if k != "model_type"})
