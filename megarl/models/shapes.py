"""What a config.json says about rotary scaling, experts and latent attention, as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """type "linear" uses `factor` only; "llama3" all fields of its line, as "yarn" does."""

    type: str
    factor: float
    original_max_position_embeddings: int = 8192
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MLAShape:
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): keys and values of all heads
    come from one latent vector of `kv_rank` numbers, queries from one of `q_rank` (None: from the
    hidden state itself). Of a head's query and key, `nope_dim` numbers carry no position and
    `rope_dim` are rotated, those of the key being the same in all heads; its value has `v_dim`.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True, kw_only=True)
class MoEShape:
    """Mixture-of-experts layers: a router sends each token to `top_k` of `num_experts`.

    norm_topk_prob: their weights sum to 1, before `scale` multiplies them. dense_layers: numbers of
    the layers with a plain MLP. shared_intermediate_size: of the expert that every token meets; 0:
    none. sigmoid: scores by expert in place of a softmax over them.
    groups: a token goes to experts of the best `top_groups` of so many equal groups, each judged by
    the sum of its `group_best` highest scores. 1: no groups.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    dense_layers: tuple[int, ...] = ()
    shared_intermediate_size: int = 0
    sigmoid: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1


def positive(raw: Mapping[str, Any], name: str, source: str, default: int | None = None) -> int:
    """raw[name], which must be a positive integer; `default` where it is absent or null."""
    return _integer(raw, name, source, default, least=1)


def count(raw: Mapping[str, Any], name: str, source: str) -> int:
    """raw[name], which must be an integer that is not negative; 0 where it is absent or null."""
    return _integer(raw, name, source, 0, least=0)


def _integer(
    raw: Mapping[str, Any], name: str, source: str, default: int | None, *, least: int
) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"{source}: {name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        expected = "a positive integer" if least else "an integer, 0 or more"
        raise ValueError(f"{source}: {name}={value!r}; expected {expected}")
    return value


def number(raw: Mapping[str, Any], name: str, source: str, default: float | None = None) -> float:
    """raw[name], which must be a number that is finite and not negative; `default` where it is
    absent or null."""
    value = raw.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{source}: {name}={value!r}; expected a number, 0 or more")
    return float(value)
