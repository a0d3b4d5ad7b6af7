"""Slot KV cache and the attention that writes and reads it.

Every running sequence owns one row; rows 0..n-1 are always the running ones, so that a decode step
attends over a view of the cache instead of a gathered copy. The model calls `attend` through
transformers' attention registry; a plan among the forward's keyword arguments says what to do.

Shapes: R rows, C capacity in positions, K key/value heads, G query heads per key/value head, D head
dimension, of values E (equal but for latent attention, whose keys and values are cached as each
head has them); a forward has B rows of S positions of H hidden, queries [B,K*G,S,D].

A small decode step spends its time on starting operations and reading weights. So query, key and
value of a layer are one product, and gate and up of its MLP: the weights of layers that read the
same input lie one after another in memory, so that a view of them all is one weight, and nothing is
kept twice. What a weight update moves apart is multiplied apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from megarl.parallel.cpu_kernels import linear

ATTENTION = "megarl_slots"
_POSITIONS_STEP = 64
# attention whose heads are turned whole, and optionally normed one by one
_ATTENTION = ("LlamaAttention", "Qwen2Attention", "Qwen3Attention", "Qwen3MoeAttention")
_MLP = ("LlamaMLP", "Qwen2MLP", "Qwen3MLP", "Qwen3MoeMLP")


def kv_shape(config: Any) -> tuple[int, int, int, int]:
    """Returns an HF model's (layers, key/value heads, dimension of a key, dimension of a value)."""
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    if getattr(config, "kv_lora_rank", None) is not None:  # latent attention
        keys = config.qk_nope_head_dim + config.qk_rope_head_dim
        return layers, heads, keys, config.v_head_dim
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return layers, getattr(config, "num_key_value_heads", None) or heads, dim, dim


class KVCache:
    """keys [layers,R,K,C,D] and values [layers,R,K,C,E], grown on demand.

    What a mask hides must still be finite, since 0 * NaN is NaN: new memory is zeroed, and rows
    that a broken model filled with NaN are scrubbed.
    """

    def __init__(
        self,
        config: Any,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        max_positions: int,
        max_tokens: int,
    ) -> None:
        """`config`: the HF model's. At most `max_tokens` = rows * positions are allocated."""
        self._shape = kv_shape(config)
        self._kind: dict[str, Any] = {"dtype": dtype, "device": device}
        self._max_rows, self._max_positions = max_rows, max_positions
        self._max_tokens = max_tokens
        self.clear()

    @property
    def rows(self) -> int:
        return self.keys.shape[1]

    @property
    def positions(self) -> int:
        return self.keys.shape[3]

    def clear(self) -> None:
        """Gives the memory back; the content is lost."""
        layers, heads, *dims = self._shape
        self.keys, self.values = (
            torch.empty(layers, 0, heads, 0, dim, **self._kind) for dim in dims
        )

    def reserve(self, rows: int, positions: int, *, used: int) -> None:
        """Makes room for `rows` sequences of `positions`; the first `used` rows keep their
        content."""
        if rows <= self.rows and positions <= self.positions:
            return
        assert used <= rows <= self._max_rows and positions <= self._max_positions
        more_rows, more_positions = max(rows, self.rows), max(positions, self.positions)
        if rows > self.rows:
            more_rows = min(self._max_rows, max(rows, 2 * self.rows))
        if positions > self.positions:
            more_positions = max(positions, self.positions * 3 // 2)
            more_positions = -(-more_positions // _POSITIONS_STEP) * _POSITIONS_STEP
            more_positions = min(self._max_positions, more_positions)
        if more_rows * more_positions > self._max_tokens:  # no room to spare in both
            more_rows = rows
            more_positions = min(self._max_positions, max(positions, self._max_tokens // rows))
        # both or none: memory may run out between them
        self.keys, self.values = (
            self._grown(old, more_rows, more_positions, used) for old in (self.keys, self.values)
        )

    def _grown(self, old: Tensor, rows: int, positions: int, used: int) -> Tensor:
        layers, _, heads, _, dim = old.shape
        new = torch.zeros(layers, rows, heads, positions, dim, **self._kind)
        keep = min(positions, old.shape[3])
        new[:, :used, :, :keep] = old[:, :used, :, :keep]
        return new

    def copy_rows(self, source: Sequence[int], target: Sequence[int], positions: int) -> None:
        """Copies the first `positions` of each source row to its target row."""
        if not source:
            return
        device = self.keys.device
        src, dst = torch.tensor(source, device=device), torch.tensor(target, device=device)
        self.keys[:, dst, :, :positions] = self.keys[:, src, :, :positions]
        self.values[:, dst, :, :positions] = self.values[:, src, :, :positions]

    def scrub(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, dtype=torch.long, device=self.keys.device)
        self.keys[:, index] = 0
        self.values[:, index] = 0


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


class Prefill(Rotary):
    """Plans the prefill of B right-padded prompts [B,S] into the rows from `row` on.

    Causality alone keeps real positions from seeing the padding behind them.
    """

    def __init__(self, cache: KVCache, row: int) -> None:
        self.cache, self.row = cache, row
        self._masks: dict[tuple[int, int], Tensor] = {}

    def _mask(self, width: int, window: int | None) -> Tensor | None:
        """Returns the mask [width,width] bool of a window; None where causality suffices."""
        if window is None or width <= window:
            return None
        if (width, window) not in self._masks:
            at = torch.arange(width, device=self.cache.keys.device)
            apart = at[:, None] - at
            self._masks[width, window] = (apart >= 0) & (apart < window)
        return self._masks[width, window]

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Stores k [B,K,S,D], v [B,K,S,E]; returns the attention output [B,S,K*G,E]. A position
        attends to itself and the `window` - 1 before it; None: to all before it."""
        rows, width = slice(self.row, self.row + k.shape[0]), k.shape[2]
        self.cache.keys[layer, rows, :, :width] = k
        self.cache.values[layer, rows, :, :width] = v
        mask = self._mask(width, window)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.transpose(1, 2)


class Decode(Rotary):
    """Plans one new position for each row first..first+B-1; `lengths` [B] positions are there
    already."""

    def __init__(self, cache: KVCache, first: int, lengths: Sequence[int], *, exact: bool) -> None:
        device = cache.keys.device
        self.cache, self.exact = cache, exact
        self.rows = torch.arange(first, first + len(lengths), device=device)
        self.positions = torch.tensor(lengths, device=device)
        self._all = slice(first, first + len(lengths))
        self._shortest, self._longest = min(lengths), max(lengths)
        self._read: dict[int | None, tuple[slice, Tensor | None]] = {}

    def _keys(self, window: int | None) -> tuple[slice, Tensor | None]:
        """Returns the positions of keys that are read, and a mask [B,1,1,n] over them: 0 for keys
        in a row's window, its new key included, -inf elsewhere; None where all rows have all."""
        if window not in self._read:
            # keys before every row's window are not read
            first = 0 if window is None else max(0, self._shortest + 1 - window)
            self._read[window] = slice(first, self._longest + 1), self._mask(first, window)
        return self._read[window]

    def _mask(self, first: int, window: int | None) -> Tensor | None:
        if self.exact or self._shortest == self._longest:
            return None
        last = self.positions[:, None]
        keys = torch.arange(first, self._longest + 1, device=last.device)
        hidden = keys > last
        if window is not None:
            hidden |= keys <= last - window
        mask = torch.zeros(hidden.shape, dtype=self.cache.keys.dtype, device=last.device)
        return mask.masked_fill_(hidden, -torch.inf)[:, None, None]

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Stores and returns what `Prefill.attend` does, for S of 1."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.rows, :, self.positions] = k[:, :, 0]
        values[self.rows, :, self.positions] = v[:, :, 0]
        batch, heads, _, dim = q.shape
        # the G queries that share a key/value head stand in for query positions: no repeated heads
        q = q.reshape(batch, k.shape[1], heads // k.shape[1], dim)
        seen, mask = self._keys(window)
        key, value = keys[self._all, :, seen], values[self._all, :, seen]
        if self.exact:  # fresh memory: kernels may treat unaligned views differently
            key, value = key.contiguous(), value.contiguous()
        if key.device.type == "cpu" and key.dtype == torch.float32 and not self.exact:
            out = _attend_cpu(q, key, value, mask, scale)
        else:
            out = F.scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scale)
        return out.reshape(batch, 1, heads, v.shape[-1])


def _attend_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Computes the attention of q [B,K,G,D] over k [B,K,W,D], v [B,K,W,E] under mask [B,1,1,W]. For
    few queries two batched products beat torch's flash kernel for CPUs, which goes head by head.
    """
    shape = (*q.shape[:3], k.shape[2])
    q, k, v = q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), v.flatten(0, 1)
    if mask is None:  # beta=0: what is in the sum's memory is not read
        scores = torch.baddbmm(q.new_empty(1), q, k, beta=0, alpha=scale)
    else:
        scores = torch.baddbmm(mask.expand(shape).flatten(0, 1), q, k, alpha=scale)
    return torch.bmm(scores.softmax(-1), v).view(*shape[:3], -1)


def _attend(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: Prefill | Decode,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Has transformers' attention signature, and calls the forward's plan."""
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise ValueError(f"the embedded server does not support attention with {name}")
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return plan.attend(layer, q, k, v, scale, options.get("sliding_window")), None


AttentionInterface.register(ATTENTION, _attend)


# ---- layers that are one product


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
