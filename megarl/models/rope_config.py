"""Reads rotary embeddings out of a config.json: their base, and how they are scaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models import deepseek
from megarl.models.shapes import RopeScaling, number, positive

_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def rope_settings(raw: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The one set of rotary settings that counts, completed from the keys beside it.

    Two keys may hold one: `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5).
    As in transformers, `rope_scaling` takes the place of the other as a whole, and with it of its
    `rope_theta`. A `rope_theta` beside them fills a gap; an `original_max_position_embeddings`
    beside them counts for more than one within.
    """
    found = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{source}: rope settings {found!r}; expected an object")
    if any(isinstance(v, Mapping) for v in found.values()):
        raise ValueError(
            f"{source}: rope_parameters per layer type ({sorted(found)}) is not supported; "
            "supported: one set for all layers"
        )
    settings = dict(found)
    if settings.get("rope_theta") is None:
        settings["rope_theta"] = raw.get("rope_theta")
    if raw.get("original_max_position_embeddings") is not None:
        settings["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    return settings


def rope(
    raw: Mapping[str, Any], source: str, *, partial: bool, mla: bool
) -> tuple[float, RopeScaling | None]:
    """(base, scaling or None). `partial`: heads may be rotated in part; `mla`: DeepSeek's."""
    params = rope_settings(raw, source)
    if not partial and params.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"{source}: partial_rotary_factor={params['partial_rotary_factor']} is not supported; "
            "supported: 1.0"
        )
    theta = number(params, "rope_theta", source)
    if not theta > 0:
        raise ValueError(f"{source}: rope_theta={theta}; expected a positive number")
    kind = params.get("rope_type", params.get("type", "default"))
    if kind in ("default", None):
        return theta, None
    supported = ("yarn",) if mla else tuple(_NEEDED)
    if kind not in supported:
        raise ValueError(
            f"{source}: rope scaling type {kind!r} is not supported; supported: default, "
            f"{', '.join(supported)}"
        )
    if mla:
        return theta, deepseek.yarn(params, source)
    missing = [k for k in _NEEDED[kind] if params.get(k) is None]
    if missing:
        raise ValueError(f"{source}: rope scaling type {kind!r} lacks {', '.join(missing)}")
    context = "original_max_position_embeddings"
    values: dict[str, Any] = {k: number(params, k, source) for k in _NEEDED[kind] if k != context}
    if context in _NEEDED[kind]:
        values[context] = positive(params, context, source)
    return theta, RopeScaling(type=kind, **values)
