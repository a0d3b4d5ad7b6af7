"""Which layers of a config.json attend through a sliding window. None may: it is not implemented.

Qwen's configs carry `sliding_window` even where it is off, so only its use is refused. The rules
are those of transformers' config classes and models; `layer_types` is read by Qwen2, Qwen3 and
Qwen2-MoE there, and not by Qwen3-MoE and Mixtral.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models.shapes import count, positive

EVERY, UNASKED = "every layer", "every layer, unasked"
BEHIND, EVEN = "from max_window_layers", "even layers below max_window_layers"


def refuse_sliding_window(raw: Mapping[str, Any], rule: str, source: str) -> None:
    """ValueError if a layer slides. `raw` is completed with its family's defaults."""
    types = raw.get("layer_types") or []
    if not isinstance(types, list):
        raise ValueError(f"{source}: layer_types={types!r}; expected a list of types")
    if other := sorted({str(t) for t in types} - {"full_attention"}):
        raise ValueError(
            f"{source}: layer_types contains {other}; supported: 'full_attention' only"
        )
    window = raw.get("sliding_window")
    if rule == UNASKED:
        if window is not None:
            raise ValueError(
                f"{source}: sliding_window={window} is not supported; supported: full attention "
                "(sliding_window=null)"
            )
        return
    if not raw.get("use_sliding_window") or (window is None and rule != EVEN):
        return
    if types and rule != EVERY:
        return  # every one of them is full attention
    layers = range(positive(raw, "num_hidden_layers", source))
    if rule != EVERY:
        first_or_end = count(raw, "max_window_layers", source)
        layers = layers[first_or_end:] if rule == BEHIND else layers[:first_or_end:2]
    if layers:
        raise ValueError(
            f"{source}: use_sliding_window=true with sliding_window={window} is not supported (it "
            f"slides in {len(layers)} layers, the first is {layers[0]}); supported: full attention "
            "(use_sliding_window=false)"
        )
