"""Holds a model's numbers, as its config.json gives them. Pure: no torch, no file, no family.

Generic code (layouts, costs, FP8, the planner) asks a ModelConfig and its Attention, and never
which family a model is of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Says how rotary embeddings are scaled. "linear" uses `factor` only; "llama3" and "yarn" use
    `factor`, `original_max_position_embeddings` and the fields under their names."""

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
class MoEShape:
    """Holds the sizes of mixture-of-experts layers: a router sends each token to `top_k` of
    `num_experts`.

    norm_topk_prob: the weights of a token's experts sum to 1, before `scale` multiplies them.
    dense_layers: numbers of the layers with a plain MLP. shared_intermediate_size: the size of the
    expert that every token meets; 0: there is none. shared_gate: that expert's output is gated.
    sigmoid: each expert has a score of its own, in place of a softmax over all. score_bias: a bias
    is added to the scores when experts are chosen. groups: the number of equal groups of experts; a
    token goes to experts of the best `top_groups`, and a group is judged by the sum of its
    `group_best` highest scores. 1: no groups.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    dense_layers: tuple[int, ...] = ()
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    sigmoid: bool = False
    score_bias: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1


@dataclass(frozen=True, kw_only=True)
class Attention(ABC):
    """Describes a kind of attention by the numbers that generic code needs.

    heads: of queries; groups of them share `kv_heads` keys and values. head_dim: the size of a
    head's query and key; its value has `v_head_dim`. rotary_dim: how many
    numbers of a head are rotated. window: a token of the layers `window_layers` attends to itself
    and the `window` - 1 tokens before it; None: every layer attends to all tokens before.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    rotary_dim: int
    window: int | None = None
    window_layers: tuple[int, ...] = ()

    @property
    def query(self) -> int:
        """Returns the size of all heads' queries together."""
        return self.heads * self.head_dim

    @property
    def attended(self) -> int:
        """Returns the size of all heads' values together, which the output projection takes."""
        return self.heads * self.v_head_dim

    @abstractmethod
    def weights(self, hidden: int) -> int:
        """Returns how many numbers a layer's matrices have: a token's multiply-adds with them."""

    @abstractmethod
    def sizes_to_cut(self) -> dict[str, int]:
        """Returns, by their names for the user, the sizes that tensor parallelism must divide."""


# fields of ModelConfig that do not change what the weights mean
_NOT_THE_WEIGHTS = ("raw", "dtype", "initializer_range", "new_head")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Describes a decoder-only transformer, as its config.json does (H hidden, V vocabulary).

    mtp_layers: layers behind the last that predict further tokens; left out, as HF leaves them.
    head: "lm", or "value": one score per token in place of the vocabulary, with or without a bias;
    with `new_head` the directory is a language model's and has no score yet.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    attention: Attention
    vocab_size: int
    tie_word_embeddings: bool
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    initializer_range: float
    dtype: str
    moe: MoEShape | None = None
    mtp_layers: int = 0
    raw: Mapping[str, Any] = field(repr=False, compare=False)
    head: str = "lm"
    score_bias: bool = False
    new_head: bool = field(default=False, compare=False)

    def meaning(self) -> dict[str, Any]:
        """Returns the fields, as plain data, of which the weights' meaning depends: models in which
        they are equal can take over each other's weights."""
        return {k: v for k, v in asdict(self).items() if k not in _NOT_THE_WEIGHTS}

    @property
    def experts(self) -> MoEShape:
        """Returns `moe`. Raises AssertionError for a dense model."""
        assert self.moe is not None, "a dense model has no experts"
        return self.moe
