"""Plans a rehearsal: its models and layouts, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.cli.rehearse.job import LONG_CONTEXT
from megarl.cli.rehearse.layout import Shrunk, shrink_layouts
from megarl.cli.rehearse.model import VOCAB
from megarl.cli.rehearse.sizes import Degrees, is_mixed, shrink_model
from megarl.config.check import check_config
from megarl.config.errors import ConfigError
from megarl.config.parallel import ParallelConfig
from megarl.config.recipe_engines import engines, model_path
from megarl.config.recipes import BaseConfig
from megarl.models.hf_config import check_layout, parse_hf_config
from megarl.planning.shapes import find_shapes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Holds what a rehearsal runs. By engine: `paths`, the cluster's model; `raw` and `small`, its
    config.json and the small one. Engines with one path share one model."""

    cfg: BaseConfig
    layouts: Shrunk
    paths: dict[str, str]
    raw: dict[str, dict[str, Any]]
    small: dict[str, dict[str, Any]]


def make_plan(cfg: BaseConfig, *, cards: Path, ranks: int) -> Plan:
    """Plans the rehearsal of `cfg` on at most `ranks` ranks. cards: a directory with the
    config.json of models that are not here. Raises ConfigError where the configuration, its models
    or a layout are not sound."""
    paths = {name: model_path(cfg, name) for name in engines(cfg)}
    raw = _shapes(paths, cards)
    before = {name: engine.parallel for name, engine in engines(cfg).items()}
    _check_layouts(raw, before)
    layouts = shrink_layouts(before, ranks=ranks, mixed=any(map(is_mixed, raw.values())))
    small = {}
    for name, path in paths.items():
        users = [n for n, other in paths.items() if other == path]
        kv_heads = raw[name].get("num_key_value_heads") or raw[name]["num_attention_heads"]
        degrees = Degrees.of(
            (layouts.parallel[n] for n in users), (before[n] for n in users), kv_heads
        )
        small[name] = shrink_model(
            raw[name], degrees, layers=layouts.layers, vocab_size=VOCAB, positions=LONG_CONTEXT
        )
    return Plan(cfg=cfg, layouts=layouts, paths=paths, raw=raw, small=small)


def check_recipe(cfg: BaseConfig) -> None:
    """Raises ConfigError for what is wrong in the cluster's configuration itself, but for models
    and files that only the cluster has."""
    try:
        check_config(cfg)
    except ConfigError as e:
        own = [p for p in e.problems if "no such directory" not in p and "no such file" not in p]
        if own:
            raise ConfigError(own) from None


def _shapes(paths: Mapping[str, str], cards: Path) -> dict[str, dict[str, Any]]:
    found, problems = {}, []
    for name, path in paths.items():
        try:
            found[name] = find_shapes(path, cards)
        except ValueError as e:
            first = next(n for n, other in paths.items() if other == path)
            problems.append(f"{first}.path: {e} ({first}.path=NAME, for a rehearsal)")
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return found


def _check_layouts(
    raw: Mapping[str, dict[str, Any]], layouts: Mapping[str, ParallelConfig]
) -> None:
    """Raises ConfigError where the cluster's own model does not fit the cluster's own layout."""
    problems = []
    for name, shapes in raw.items():
        try:
            check_layout(parse_hf_config(_as_language_model(shapes), name), layouts[name])
        except ValueError as e:
            problems.append(f"{name}: {e}")
    if problems:
        raise ConfigError(problems)


def _as_language_model(raw: dict[str, Any]) -> dict[str, Any]:
    from megarl.models.value_model import language_model

    return dict(language_model(raw))
