"""One product in place of several: query, key and value of a layer, and gate and up of its MLP.

A small decode step spends its time on starting operations and reading weights. The weights of
layers that read the same input lie one after another in memory, so that a view of them all is one
weight, and nothing is kept twice. What a weight update moves apart is multiplied apart.

B rows of S positions, H hidden, n query and k key/value heads of D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megarl.parallel.cpu_products import linear

# attention whose heads are turned whole, and optionally normed one by one
_ATTENTION = ("LlamaAttention", "Qwen2Attention", "Qwen3Attention", "Qwen3MoeAttention")
_MLP = ("LlamaMLP", "Qwen2MLP", "Qwen3MLP", "Qwen3MoeMLP")


class Joined:
    """Multiplies by several linear layers of one input at once, while their weights are neighbours
    in memory."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        """Moves the layers' weights next to each other."""
        self._weights = [layer.weight for layer in layers]
        self._biases = [layer.bias for layer in layers if layer.bias is not None]
        assert len(self._biases) in (0, len(layers))
        for parts in (self._weights, self._biases):
            if parts:
                whole = torch.cat([p.data for p in parts])
                for p, part in zip(parts, whole.split([len(p) for p in parts]), strict=True):
                    p.data = part
        self._rows = [len(w) for w in self._weights]
        self._places: list[int] = []
        self._whole: tuple[Tensor, Tensor | None] | None = None

    def whole(self) -> tuple[Tensor, Tensor | None] | None:
        """Returns the weight and the bias of all layers as one, views of theirs; None where they
        are no neighbours."""
        places = [p.data_ptr() for p in (*self._weights, *self._biases)]
        if places != self._places:
            weight, bias = _as_one(self._weights), _as_one(self._biases)
            together = weight is not None and (bias is not None or not self._biases)
            self._whole = (weight, bias) if weight is not None and together else None
            self._places = places
        return self._whole

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the layers' outputs, one behind the other in the last dimension."""
        if (found := self.whole()) is not None:
            return linear(x, *found)
        biases: Sequence[Tensor | None] = self._biases or [None] * len(self._weights)
        pairs = zip(self._weights, biases, strict=True)
        return torch.cat([linear(x, w, b) for w, b in pairs], -1)


def _as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Returns a view of tensors [rows,...] as one, or None where they are no neighbours in one
    storage."""
    if not parts:
        return None
    first, end = parts[0], parts[0].data_ptr()
    for p in parts:
        same = p.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if p.data_ptr() != end or not same or not p.is_contiguous() or p.dtype != first.dtype:
            return None
        end += p.nbytes
    shape = (sum(len(p) for p in parts), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride())


def join_layers(model: nn.Module) -> None:
    """Gives the attention and the MLPs of known families forwards of fewer operations, which give
    what transformers' do up to rounding."""
    for module in model.modules():
        name = type(module).__name__
        if name in _ATTENTION:
            qkv = Joined([module.q_proj, module.k_proj, module.v_proj])  # type: ignore[list-item]
            module.forward = partial(_attention, module, qkv)
        elif name in _MLP and isinstance(module.act_fn, nn.SiLU):
            module.forward = partial(_mlp, module, Joined([module.gate_proj, module.up_proj]))  # type: ignore[list-item]


def _mlp(module: Any, gate_up: Joined, x: Tensor) -> Tensor:
    gate, up = gate_up(x).chunk(2, -1)
    down: Tensor = module.down_proj(F.silu(gate).mul_(up))
    return down


def _attention(
    module: Any,
    qkv: Joined,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    *,
    plan: Any,
    **_: Any,
) -> tuple[Tensor, None]:
    """Has the signature of transformers' attention, and calls the forward's plan. Hidden states are
    [B,S,H], cos and sin [B,S,D]."""
    dim, window = module.head_dim, getattr(module, "sliding_window", None)
    found = qkv(hidden_states).unflatten(-1, (-1, dim))  # [B,S,n + 2k,D]
    values = found.shape[2] // (module.num_key_value_groups + 2)
    turned, v = found[:, :, :-values], found[:, :, -values:]
    if hasattr(module, "q_norm"):
        turned = _normed(module, turned, values)
    cos, signed_sin = plan.rotary(*position_embeddings)
    first, second = turned.chunk(2, -1)
    turned = torch.addcmul(turned * cos, torch.cat((second, first), -1), signed_sin)
    q, k = turned[:, :, :-values].transpose(1, 2), turned[:, :, -values:].transpose(1, 2)
    out = plan.attend(module.layer_idx, q, k, v.transpose(1, 2), module.scaling, window)
    return module.o_proj(out.reshape(*out.shape[:2], -1)), None


def _normed(module: Any, heads: Tensor, keys: int) -> Tensor:
    """Returns the RMSNorm of each head of [B,S,n + k,D], by the weights of queries and of keys."""
    q, k = module.q_norm, module.k_norm
    normed = F.rms_norm(heads, heads.shape[-1:], eps=q.variance_epsilon)
    normed[:, :, :-keys].mul_(q.weight)
    normed[:, :, -keys:].mul_(k.weight)
    return normed


class Rotary:
    """Keeps the tables of a forward's rotary embedding for the layers that follow with the same."""

    _of: tuple[Tensor, Tensor] | None = None
    _tables: tuple[Tensor, Tensor]

    def rotary(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and (-sin, sin) [B,S,1,D] of transformers' cos and sin [B,S,D]."""
        if self._of is None or self._of[0] is not cos or self._of[1] is not sin:
            low, high = sin.chunk(2, -1)
            self._tables = cos[:, :, None], torch.cat((-low, high), -1)[:, :, None]
            self._of = cos, sin
        return self._tables
