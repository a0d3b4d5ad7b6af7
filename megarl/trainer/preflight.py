"""Checks of a recipe against its models, before any process group or server exists. No torch."""

from __future__ import annotations

from megarl.config.check import engines, model_path
from megarl.config.errors import raise_if_any
from megarl.config.recipes import BaseConfig, GRPOConfig
from megarl.models import check_layout, read_hf_config


def check_models(cfg: BaseConfig) -> None:
    """Raises ConfigError naming every engine whose model is unsupported or cannot be cut so."""
    problems = []
    for name, engine in engines(cfg).items():
        try:
            model = read_hf_config(model_path(cfg, name))
            check_layout(model, engine.parallel)
        except ValueError as e:
            problems.append(f"{name}: {e}")
            continue
        if name == "actor" and isinstance(cfg, GRPOConfig):
            room, most = cfg.server.context_length, model.max_position_embeddings
            if room > most:
                problems.append(
                    f"server.context_length={room}: the model's max_position_embeddings is {most}"
                )
    raise_if_any(problems)
