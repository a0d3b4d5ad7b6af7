"""Finds the models that a configuration names on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.config.check_data import looks_like_hub_name
from megarl.config.errors import raise_if_any
from megarl.config.recipe_engines import engines
from megarl.config.recipes import BaseConfig, GRPOConfig

# weights as safetensors only: others' formats can be twice the size and are never read
_HF_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def fetch_hub_models(cfg: BaseConfig) -> None:
    """Replaces the hub name (org/name) of an engine by its local snapshot, which is downloaded
    where it is missing.

    Raises ConfigError naming the model that is neither a directory nor on the hub."""
    problems = []
    for name, engine in _with_paths(cfg).items():
        path = engine.path
        if "/" not in path or Path(path).is_dir() or not looks_like_hub_name(path):
            continue
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            engine.path = snapshot_download(path, allow_patterns=list(_HF_FILES))
        except HFValidationError:
            problems.append(
                f"{name}.path={path}: no such directory, and no name that the hub allows; name a "
                "model's directory, or a model of the hub as org/name"
            )
        except (OSError, HfHubHTTPError) as e:
            why = " ".join(str(e).split())
            problems.append(
                f"{name}.path={path}: neither a directory nor to be had from the hub ({why}); "
                f"download it elsewhere (hf download {path} --local-dir DIR) and name its directory"
            )
    raise_if_any(problems)


def _with_paths(cfg: BaseConfig) -> dict[str, Any]:
    """Returns, by key, the sections that name a model by their path: engines and servers."""
    sections: dict[str, Any] = dict(engines(cfg))
    if isinstance(cfg, GRPOConfig):
        sections["server"] = cfg.server
        if cfg.judge is not None:
            sections["judge"] = cfg.judge
    return sections
