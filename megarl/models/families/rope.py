"""Reads rotary embeddings from a config.json: their base, and how they are scaled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from megarl.models.families.fields import number, positive, refuse_others
from megarl.models.shapes import RopeScaling
from megarl.observability.logging import get_logger, warn_on_rank_zero

log = get_logger(__name__)

ScalingReader = Callable[[Mapping[str, Any], str], RopeScaling]
Rope = tuple[float, RopeScaling | None]  # base, and how it is scaled
FULL, SLIDING = "full_attention", "sliding_attention"


def rope_settings(raw: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Returns the one set of rotary settings that counts, completed from the keys beside it.

    Two keys may hold one: `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5).
    As in transformers, `rope_scaling` replaces `rope_parameters` as a whole, its `rope_theta`
    included. A `rope_theta` beside them fills a gap; an `original_max_position_embeddings` beside
    them overrides one within. Raises ValueError for settings that are no object, or that differ by
    layer type.
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
    raw: Mapping[str, Any],
    source: str,
    *,
    partial: bool,
    scalings: Mapping[str, ScalingReader],
) -> Rope:
    """Returns (base, scaling or None). `partial`: heads may be rotated in part; `scalings`: the
    family's kinds of scaling and their readers. Raises ValueError naming the setting that is wrong
    or not supported."""
    return _read(rope_settings(raw, source), source, partial, scalings)


def rope_by_type(
    raw: Mapping[str, Any], source: str, scalings: Mapping[str, ScalingReader]
) -> tuple[Rope, Rope]:
    """Returns (base, scaling or None) of layers that attend in full, and of those with a window.

    `rope_parameters` (transformers 5) has a set for each type of layer. Of transformers 4 are
    `rope_scaling`, which changes the set of full layers, and the bases where a set has none:
    `rope_theta` and, of layers with a window, `rope_local_base_freq`. Raises ValueError as `rope`
    does.
    """
    sets = raw.get("rope_parameters") or {}
    if not isinstance(sets, Mapping) or sets.keys() - {FULL, SLIDING}:
        raise ValueError(
            f"{source}: rope_parameters={sets!r} is not supported in this family; supported: a set "
            f"for each of {FULL} and {SLIDING}"
        )
    scaling = raw.get("rope_scaling") or {}
    if scaling:
        require(scaling, str(scaling.get("type")), ("rope_type",), source)
    full = {"rope_theta": raw["rope_theta"], **(sets.get(FULL) or {}), **scaling}
    window = {"rope_theta": raw["rope_local_base_freq"], **(sets.get(SLIDING) or {})}
    for settings in (full, window):  # transformers looks for it beside the sets
        refuse_others(settings, {"truncate": (True, None)}, source)
    return _read(full, source, False, scalings), _read(window, source, False, scalings)


def _read(
    params: Mapping[str, Any], source: str, partial: bool, scalings: Mapping[str, ScalingReader]
) -> Rope:
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
    if kind not in scalings:
        raise ValueError(
            f"{source}: rope scaling type {kind!r} is not supported; supported: default, "
            f"{', '.join(scalings)}"
        )
    return theta, scalings[kind](params, source)


def _linear(params: Mapping[str, Any], source: str) -> RopeScaling:
    require(params, "linear", ("factor",), source)
    return RopeScaling(type="linear", factor=number(params, "factor", source))


def _llama3(params: Mapping[str, Any], source: str) -> RopeScaling:
    numbers, context = _LLAMA3, "original_max_position_embeddings"
    require(params, "llama3", (*numbers, context), source)
    values: dict[str, Any] = {k: number(params, k, source) for k in numbers}
    values[context] = positive(params, context, source)
    return RopeScaling(type="llama3", **values)


def yarn(params: Mapping[str, Any], source: str) -> RopeScaling:
    """Reads YaRN (Peng et al., 2023, arXiv 2309.00071) as transformers does: `mscale` and
    `mscale_all_dim` count together. Raises ValueError for a field that is missing or wrong."""
    require(params, "yarn", ("factor", "original_max_position_embeddings"), source)
    refuse_others(params, {"truncate": (True, False)}, source)
    mscale, all_dim = (number(params, k, source, 0.0) for k in ("mscale", "mscale_all_dim"))
    if (given := params.get("attention_factor")) == 0:
        raise ValueError(f"{source}: attention_factor={given!r}; expected a number above 0")
    scaling = RopeScaling(
        type="yarn",
        factor=number(params, "factor", source),
        original_max_position_embeddings=positive(
            params, "original_max_position_embeddings", source
        ),
        beta_fast=number(params, "beta_fast", source, 32.0) or 32.0,
        beta_slow=number(params, "beta_slow", source, 1.0) or 1.0,
        mscale=mscale if mscale and all_dim else 1.0,
        mscale_all_dim=all_dim if mscale else 0.0,
        attention_factor=number(params, "attention_factor", source, 0.0),
        exact=not params.get("truncate", True),
    )
    attn_factor = number(params, "attn_factor", source, 1.0)
    served = replace(scaling, attention_factor=0.0).rotary_factor * attn_factor
    if attn_factor != 1 and not math.isclose(served, scaling.rotary_factor, rel_tol=1e-4):
        _warn_of_servers(source, attn_factor, scaling.rotary_factor, served)
    return scaling


@cache
def _warn_of_servers(source: str, attn_factor: float, trained: float, served: float) -> None:
    warn_on_rank_zero(
        log,
        "%s: attn_factor=%g: transformers and megarl ignore it and multiply cos and sin by %.6g, "
        "SGLang and older vLLM by %.6g; set attention_factor=%.6g beside it, or log-probabilities "
        "of trainer and servers differ from the first step",
        source, attn_factor, trained, served, served,
    )  # fmt: skip


def require(params: Mapping[str, Any], kind: str, names: tuple[str, ...], source: str) -> None:
    """Raises ValueError, naming them, unless a scaling of this kind has all settings of `names`."""
    if missing := [k for k in names if params.get(k) is None]:
        raise ValueError(f"{source}: rope scaling type {kind!r} lacks {', '.join(missing)}")


_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
SCALINGS: Mapping[str, ScalingReader] = {"linear": _linear, "llama3": _llama3, "yarn": yarn}
