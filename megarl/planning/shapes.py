"""Finds the config.json of a model that need not be on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def find_shapes(name: str, cards: Path) -> dict[str, Any]:
    """Returns the config.json of model `name` as plain data, without `quantization_config`, which
    describes published files.

    name: a model directory, such a file, or else a path or hub name whose last part, in lower
    case, is or begins with the name of a file of the directory `cards`: of
    meta-llama/Llama-3.1-70B-Instruct it is llama-3.1-70b.json. Raises ValueError where there is
    none of these, or no JSON object in it.
    """
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    elif not path.is_file():
        path = _card(path.name.lower(), cards)
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in cards.glob("*.json")))
        raise ValueError(f"no config.json at {name!r}; give a directory, a file or one of: {known}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ValueError(f"{path} is not a JSON file: {e}") from e
    if not isinstance(raw, dict):
        raise ValueError(f"{path} is not a model's config.json: it holds a {type(raw).__name__}")
    return {k: v for k, v in raw.items() if k != "quantization_config"}


def _card(name: str, cards: Path) -> Path:
    """Returns the file whose name is `name` or its longest beginning before a dash."""
    words = name.split("-")
    tries = [cards / f"{'-'.join(words[:n])}.json" for n in range(len(words), 0, -1)]
    return next((path for path in tries if path.is_file()), tries[0])
