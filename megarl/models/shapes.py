"""Holds a model's numbers, as its config.json gives them. Pure: no torch, no file, no family.

Generic code (layouts, costs, FP8, the planner) asks a ModelConfig and its Attention, and never
which family a model is of.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Says how rotary embeddings are scaled. "linear" uses `factor` only; "llama3" and "yarn" use
    `factor`, `original_max_position_embeddings` and the fields under their names.

    attention_factor: what cos and sin are multiplied with; 0: what `mscale` and `mscale_all_dim`
    say.
    """

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
    exact: bool = False  # the bounds between kept and stretched numbers are not rounded
    attention_factor: float = 0.0

    def gain(self, mscale: float) -> float:
        """Returns YaRN's factor for longer contexts, 0.1 mscale ln(factor) + 1."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def rotary_factor(self) -> float:
        """Returns what YaRN multiplies cos and sin with; 1 in other kinds."""
        if self.type != "yarn":
            return 1.0
        return self.attention_factor or self.gain(self.mscale) / self.gain(self.mscale_all_dim)


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
    `group_best` highest scores. 1: no groups. bias: router and experts have biases. limit: bounds
    an expert's gate from above, and its up from both sides; 0: none.
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
    bias: bool = False
    limit: float = 0.0


class Mixer(ABC):
    """Describes a kind of layer by what mixes its tokens: an attention, or a state that runs along
    a sequence. Generic code asks it for numbers."""

    @abstractmethod
    def weights(self, hidden: int) -> int:
        """Returns how many numbers a layer's matrices have: a token's multiply-adds with them."""

    @abstractmethod
    def sizes_to_cut(self) -> dict[str, int]:
        """Returns, by their names for the user, the sizes that tensor parallelism must divide."""

    def sizes_to_share(self) -> dict[str, int]:
        """Returns, by their names for the user, the sizes that the product of tensor and context
        parallelism must divide."""
        return {}

    @abstractmethod
    def kept(self, tp: int) -> tuple[float, float]:
        """Returns (shared, own): how many numbers of a token a layer keeps for backward. Sequence
        parallelism cuts `shared` over ranks; `own` is that of one of `tp` ranks. The inputs of the
        layer and of its output projection are not counted."""

    @abstractmethod
    def cached(self, tp: int) -> int:
        """Returns how many numbers of a token one of a server's `tp` GPUs caches in a layer."""

    def repeated_weights(self, hidden: int, tp: int) -> int:
        """Returns how many numbers of a layer each of a server's `tp` GPUs holds beyond its even
        share."""
        return 0


@dataclass(frozen=True, kw_only=True)
class Attention(Mixer):
    """Describes a kind of attention.

    heads: of queries; groups of them share `kv_heads` keys and values. head_dim: the size of a
    head's query and key; its value has `v_head_dim`. rotary_dim: how many
    numbers of a head are rotated. window: a token of the layers `window_layers` attends to itself
    and the `window` - 1 tokens before it; None: every layer attends to all tokens before. latent:
    keys and values of all heads come from one vector. sinks: every head has a learnable score
    besides those of the tokens.
    """

    latent: ClassVar[bool] = False
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    rotary_dim: int
    window: int | None = None
    window_layers: tuple[int, ...] = ()
    sinks: bool = False

    @property
    def query(self) -> int:
        """Returns the size of all heads' queries together."""
        return self.heads * self.head_dim

    @property
    def attended(self) -> int:
        """Returns the size of all heads' values together, which the output projection takes."""
        return self.heads * self.v_head_dim


@dataclass(frozen=True, kw_only=True)
class Recurrent(Mixer):
    """Describes a kind of layer with a state of fixed size in place of attention; `layers` are the
    numbers of the layers of this kind."""

    layers: tuple[int, ...]

    @property
    @abstractmethod
    def state(self) -> int:
        """Returns how many numbers a layer's state of one sequence has; they are fp32."""

    @property
    @abstractmethod
    def products(self) -> int:
        """Returns a token's multiply-adds with the state of a layer."""

    def cached(self, tp: int) -> int:
        """Returns 0: a state does not grow with the sequence."""
        return 0


@dataclass(frozen=True, kw_only=True)
class Wrapper:
    """Describes model directories in which a language model stands beside a vision tower:
    config.json has its settings in `text_config`. architecture: of the whole, such as
    Gemma3ForConditionalGeneration. model, head: how the names of the language model's tensors begin
    in place of `model.` and `lm_head.`."""

    architecture: str
    model: str
    head: str = "lm_head."

    def name(self, plain: str) -> str:
        """Returns the name of the tensor that the language model alone calls `plain`."""
        for prefix, own in (("model.", self.model), ("lm_head.", self.head)):
            if plain.startswith(prefix):
                return own + plain.removeprefix(prefix)
        return plain  # the score of a value model

    def module(self, name: str) -> str:
        """Returns what transformers' modules call the tensor `name` of the directory, and PEFT with
        them."""
        inside = name.startswith(self.model)
        return "model.language_model." + name.removeprefix(self.model) if inside else name

    def key_mapping(self) -> dict[str, str]:
        """Returns transformers' patterns that give the language model its own names back."""
        return {"^" + re.escape(self.model): "model.", "^" + re.escape(self.head): "lm_head."}


def is_beside(name: str, wrapper: Wrapper | None) -> bool:
    """Returns whether the tensor `name` of a model directory is no part of the language model: of a
    vision tower, or of layers that predict further tokens and have names of their own."""
    if name.startswith("mtp."):
        return True
    return wrapper is not None and not name.startswith((wrapper.model, wrapper.head, "score."))


def plain_name(name: str) -> str:
    """Returns the language model's own name of a tensor, or of an adapter's tensor, that may be
    named as in a complete model."""
    return name.replace("language_model.", "", 1)


# fields of ModelConfig that do not change what the weights mean
_NOT_THE_WEIGHTS = ("raw", "dtype", "initializer_range", "new_head", "wrapper")


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Returns the name of a field in which two models' `ModelConfig.meaning()` differ, or None.

    A field that is absent equals an empty one (None, False, 0 or no entries): a later version's
    fields have such defaults, so that checkpoints of an earlier version are still of the same
    model. JSON's lists equal tuples.
    """
    a, b = _filled(one), _filled(other)
    return next((name for name in {**a, **b} if a.get(name) != b.get(name)), None)


def _filled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: filled for k, v in value.items() if (filled := _filled(v))}
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Describes a decoder-only transformer, as its config.json does (H hidden, V vocabulary).

    attention: of the layers that attend. recurrent: the kind of the others, if there are any.
    mtp_layers: layers behind the last that predict further tokens; left out, as HF leaves them.
    head: "lm", or "value": one score per token in place of the vocabulary, with or without a bias;
    with `new_head` the directory is a language model's and has no score yet.
    wrapper: the whole that the language model is a part of.
    window_rope: rotary base and scaling of the layers with a window; None: those of all layers.
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
    recurrent: Recurrent | None = None
    mtp_layers: int = 0
    raw: Mapping[str, Any] = field(repr=False, compare=False)
    head: str = "lm"
    score_bias: bool = False
    new_head: bool = field(default=False, compare=False)
    wrapper: Wrapper | None = None
    window_rope: tuple[float, RopeScaling | None] | None = None

    def meaning(self) -> dict[str, Any]:
        """Returns the fields, as plain data, of which the weights' meaning depends: models between
        which nothing is `differing` can take over each other's weights."""
        return {k: v for k, v in asdict(self).items() if k not in _NOT_THE_WEIGHTS}

    def mixer(self, layer: int) -> Mixer:
        """Returns the kind of the layer of this number."""
        if self.recurrent is not None and layer in self.recurrent.layers:
            return self.recurrent
        return self.attention

    def layer_type(self, layer: int) -> str:
        """Returns the kind of the layer of this number as transformers' `layer_types` has it."""
        if self.mixer(layer) is self.recurrent:
            return "linear_attention"
        return "sliding_attention" if layer in self.attention.window_layers else "full_attention"

    def hf_name(self, plain: str) -> str:
        """Returns the HF name, in this model's directory, of what a language model alone calls
        `plain`."""
        return plain if self.wrapper is None else self.wrapper.name(plain)

    @property
    def experts(self) -> MoEShape:
        """Returns `moe`. Raises AssertionError for a dense model."""
        assert self.moe is not None, "a dense model has no experts"
        return self.moe
