"""Reads grouped-query attention (Ainslie et al., 2023, arXiv 2305.13245), in full or through a
sliding window, from a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.models.families.fields import count, positive
from megarl.models.shapes import Attention

# Rules for which layers slide, as transformers' config classes and models have them. With BEHIND
# and EVEN a given `layer_types` decides, with BUT_NTH it alone; with the other rules it must agree.
BEHIND, EVEN = "from max_window_layers", "even layers below max_window_layers"
EVERY, UNASKED = "every layer", "every layer, unasked"
BUT_NTH = "all but every sliding_window_pattern-th layer, unasked"


@dataclass(frozen=True, kw_only=True)
class GroupedQuery(Attention):
    """Attention in which every key/value head serves heads / kv_heads query heads. `qkv_bias`:
    queries, keys and values have a bias. `qk_norm`: queries and keys are normalised head by head,
    with `whole_norm` all heads of a token together. `interleaved`: rotary embeddings turn pairs of
    neighbours, not of halves. `output_gate`: every head's output is multiplied with a gate, which
    is projected beside its query. `scaled_by`: what scores are divided by the root of; 0: head_dim.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    interleaved: bool = False
    output_gate: bool = False
    scaled_by: int = 0
    whole_norm: bool = False

    @property
    def keys(self) -> int:
        """Returns the size of all heads' keys together."""
        return self.kv_heads * self.head_dim

    @property
    def _projected(self) -> int:
        queries = (1 + self.output_gate) * self.heads
        return (queries + 2 * self.kv_heads) * self.head_dim

    def weights(self, hidden: int) -> int:
        """Returns how many numbers the projections of q, k, v and of the output have in a layer."""
        return hidden * (self._projected + self.heads * self.v_head_dim)

    def sizes_to_cut(self) -> dict[str, int]:
        """Returns the rows of q, k and v together, which tensor parallelism cuts evenly."""
        return {"qkv rows": self._projected}

    def kept(self, tp: int) -> tuple[float, float]:
        """Returns the numbers of q and k before and after rotation, of v (a view of the
        projection's output, which stays for it), of the output, an fp32 sum a head, and the fp32
        gates."""
        heads, kv_heads = self.heads / tp, max(1.0, self.kv_heads / tp)
        own = (2 * heads + 3 * kv_heads) * self.head_dim + heads * self.v_head_dim
        return 0, own + 2 * heads * (1 + self.output_gate * self.v_head_dim)

    def cached(self, tp: int) -> int:
        """Returns the numbers of a key and a value of each of a GPU's heads, at least one."""
        return max(1, self.kv_heads // tp) * (self.head_dim + self.v_head_dim)

    def repeated_weights(self, hidden: int, tp: int) -> int:
        """Returns the numbers of key/value heads that several GPUs hold."""
        return int(2 * hidden * self.head_dim * max(0.0, 1 - self.kv_heads / tp))


def read(raw: Mapping[str, Any], source: str, *, slides: str | None = None) -> GroupedQuery:
    """Reads heads, and with a rule `slides` a sliding window. Raises ValueError naming the key that
    is wrong. `raw` is completed with its family's defaults."""
    hidden = positive(raw, "hidden_size", source)
    heads = positive(raw, "num_attention_heads", source)
    kv_heads = positive(raw, "num_key_value_heads", source, default=heads)
    if heads % kv_heads:
        raise ValueError(
            f"{source}: num_attention_heads={heads} is not a multiple of "
            f"num_key_value_heads={kv_heads}"
        )
    if raw.get("head_dim") is None and hidden % heads:
        raise ValueError(
            f"{source}: hidden_size={hidden} is not a multiple of num_attention_heads={heads} and "
            "no head_dim is given"
        )
    dim = positive(raw, "head_dim", source, default=hidden // heads)
    if dim % 2:
        raise ValueError(f"{source}: head_dim={dim} is odd; rotary embeddings need it even")
    layers = _sliding_layers(raw, slides, source)
    return GroupedQuery(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=dim,
        rotary_dim=dim,
        window=positive(raw, "sliding_window", source) if layers else None,
        window_layers=layers,
    )


def _sliding_layers(raw: Mapping[str, Any], rule: str | None, source: str) -> tuple[int, ...]:
    """Returns the numbers of the layers that attend through the window. Qwen's configs carry
    `sliding_window` even where it is off."""
    layers = tuple(range(positive(raw, "num_hidden_layers", source)))
    asked, window = bool(raw.get("use_sliding_window")), raw.get("sliding_window")
    by_type = _sliding_types(raw, len(layers), source)
    if rule == BUT_NTH:
        n = positive(raw, "sliding_window_pattern", source)
        return tuple(i for i in layers if (i + 1) % n) if by_type is None else by_type
    if rule == UNASKED:
        found = () if window is None else layers
    elif not asked or (window is None and rule != EVEN):
        found = ()
    elif rule is None:
        raise ValueError(
            f"{source}: use_sliding_window=true with sliding_window={window} is not supported in "
            "this family; supported: full attention (use_sliding_window=false)"
        )
    elif rule == EVERY:
        found = layers
    elif by_type is not None:
        found = by_type
    else:
        first_or_end = count(raw, "max_window_layers", source)
        found = layers[first_or_end:] if rule == BEHIND else layers[:first_or_end:2]
    if by_type not in (None, found):
        raise ValueError(
            f"{source}: layer_types has 'sliding_attention' in layers {list(by_type or ())}, but "
            f"with use_sliding_window={asked} and sliding_window={window} this family slides in "
            f"{list(found)}; make them agree, or leave layer_types out"
        )
    return found


def _sliding_types(raw: Mapping[str, Any], layers: int, source: str) -> tuple[int, ...] | None:
    """Returns the layers that slide by `layer_types`, or None where there is no such key."""
    types = raw.get("layer_types")
    if not types:
        return None
    if not isinstance(types, list) or len(types) != layers:
        raise ValueError(f"{source}: layer_types={types!r}; expected a list of {layers} types")
    supported = ("full_attention", "sliding_attention")
    if other := sorted({str(t) for t in types} - set(supported)):
        raise ValueError(
            f"{source}: layer_types contains {other}; supported: {', '.join(supported)}"
        )
    return tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
