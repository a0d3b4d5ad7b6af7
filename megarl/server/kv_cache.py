"""Slot KV cache, the attention that writes and reads it, and states of layers without attention.

Every running sequence owns one row; rows 0..n-1 are always the running ones, so that a decode step
attends over a view of the cache instead of a gathered copy. The model calls `attend` through
transformers' attention registry; a plan among the forward's keyword arguments says what to do.

A layer with a state in place of attention gets `RowStates` for transformers' cache. A state stands
for all of a row's tokens: it is copied whole, and cannot be cut to a part of them.

Shapes: R rows, C capacity in positions, K key/value heads, G query heads per key/value head, D head
dimension, of values E (equal but for latent attention, whose keys and values are cached as each
head has them); a forward has B rows of S positions of H hidden, queries [B,K*G,S,D].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache, DynamicLayer

ATTENTION = "megarl_slots"
_POSITIONS_STEP = 64
_SINK_DIMS = 8  # one would do; kernels like multiples of 8


def kv_shape(config: Any) -> tuple[list[int], int, int, int]:
    """Returns an HF model's (numbers of the layers that attend, key/value heads, dimension of a
    key, dimension of a value)."""
    layers = [
        i
        for i, kind in enumerate(DynamicCache(config=config).layers)
        if isinstance(kind, DynamicLayer) or not hasattr(kind, "update_conv_state")
    ]
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None) is not None:  # latent attention
        keys = config.qk_nope_head_dim + config.qk_rope_head_dim
        return layers, heads, keys, config.v_head_dim
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return layers, getattr(config, "num_key_value_heads", None) or heads, dim, dim


def has_states(config: Any) -> bool:
    """Returns whether some of an HF model's layers have a state in place of keys and values."""
    return any(hasattr(kind, "update_conv_state") for kind in DynamicCache(config=config).layers)


class KVCache:
    """keys [layers,R,K,C,D] and values [layers,R,K,C,E] of the layers that attend, grown on demand.

    places: where a layer's number stands among them. states: of other layers [R,...], by (kind,
    number of the layer, number of the state), each from its first prefill on.

    What a mask hides must still be finite, since 0 * NaN is NaN: new memory is zeroed, and rows
    that a broken model filled with NaN are scrubbed. States are written whole before they are read.
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
        layers, *sizes = kv_shape(config)
        self.places = {layer: place for place, layer in enumerate(layers)}
        self._shape = len(layers), *sizes
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

    @property
    def nbytes(self) -> int:
        """Returns the bytes that it takes now."""
        tensors = (self.keys, self.values, *self.states.values())
        return sum(t.nbytes for t in tensors)

    def clear(self) -> None:
        """Gives the memory back; the content is lost."""
        layers, heads, *dims = self._shape
        self.keys, self.values = (
            torch.empty(layers, 0, heads, 0, dim, **self._kind) for dim in dims
        )
        self.states: dict[tuple[str, int, int], Tensor] = {}

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
        # all or none: memory may run out between them
        states = {
            key: torch.cat([old[:used], old.new_zeros(more_rows - used, *old.shape[1:])])
            for key, old in self.states.items()
        }
        self.keys, self.values = (
            self._grown(old, more_rows, more_positions, used) for old in (self.keys, self.values)
        )
        self.states = states

    def _grown(self, old: Tensor, rows: int, positions: int, used: int) -> Tensor:
        layers, _, heads, _, dim = old.shape
        new = torch.zeros(layers, rows, heads, positions, dim, **self._kind)
        keep = min(positions, old.shape[3])
        new[:, :used, :, :keep] = old[:, :used, :, :keep]
        return new

    def copy_rows(self, source: Sequence[int], target: Sequence[int], positions: int) -> None:
        """Copies the first `positions` of each source row to its target row, and its states."""
        if not source:
            return
        device = self.keys.device
        src, dst = torch.tensor(source, device=device), torch.tensor(target, device=device)
        self.keys[:, dst, :, :positions] = self.keys[:, src, :, :positions]
        self.values[:, dst, :, :positions] = self.values[:, src, :, :positions]
        for state in self.states.values():
            state[dst] = state[src]

    def scrub(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, dtype=torch.long, device=self.keys.device)
        self.keys[:, index] = 0
        self.values[:, index] = 0


class RowStates:
    """Gives a transformers model the states of `rows` by the methods of its cache; keys and values
    pass through. `begin`: what is read is the beginning of the rows' sequences."""

    def __init__(self, cache: KVCache, rows: slice, *, begin: bool) -> None:
        self._states, self._count, self._rows = cache.states, cache.rows, rows
        self._begin = begin

    def _state(self, kind: str, layer: int, index: int) -> Tensor | None:
        return None if self._begin else self._states[kind, layer, index][self._rows]

    def _store(self, key: tuple[str, int, int], state: Tensor) -> Tensor:
        if key not in self._states:
            self._states[key] = state.new_zeros(self._count, *state.shape[1:])
        own = self._states[key][self._rows]
        own.copy_(state)
        return own

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the last inputs [B,D,width] of a layer's convolution; None at the beginning."""
        return self._state("conv", layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns a layer's state [B,...]; None at the beginning."""
        return self._state("recurrent", layer_idx, state_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Returns False: no state of the past is kept."""
        return False

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> Tensor:
        """Keeps the last `conv_kernel_size` of a convolution's inputs [B,D,S]; returns them all,
        behind those of before, which are 0 at the beginning."""
        before = self.get_conv_state(layer_idx, state_idx)
        if before is None:
            width = conv_kernel_size or conv_states.shape[-1]
            conv_states = F.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        else:
            width = before.shape[-1]
            conv_states = torch.cat([before, conv_states], -1)
        self._store(("conv", layer_idx, state_idx), conv_states[..., -width:])
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0
    ) -> Tensor:
        """Keeps a layer's state, in its own dtype, and returns it."""
        return self._store(("recurrent", layer_idx, state_idx), recurrent_states)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values as they are: `attend` keeps them."""
        return keys, values


class Heads(NamedTuple):
    """Holds queries q, keys k [B,K,S,D] and values v [B,K,S,E] of a layer, and how they attend: a
    position to itself and the `window` - 1 before it; None: to all before it. `sinks` [K*G] are
    scores of a further key, whose value is 0."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    window: int | None
    sinks: Tensor | None


class Prefill:
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

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """Stores keys and values; returns the attention output [B,S,K*G,E]."""
        q, k, v, scale, window, sinks = heads
        rows, width = slice(self.row, self.row + k.shape[0]), k.shape[2]
        place = self.cache.places[layer]
        self.cache.keys[place, rows, :, :width] = k
        self.cache.values[place, rows, :, :width] = v
        mask = self._mask(width, window)
        if sinks is not None:
            q, k, v = _with_sinks(q, k, v, sinks / scale)
            mask = None if mask is None else F.pad(mask, (1, 0, 1, 0), value=True)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        if sinks is not None:
            out = out[:, :, 1:, :-_SINK_DIMS]
        return out.transpose(1, 2)


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Puts a key in front whose product with a query is the head's of `sinks`, by a dimension more,
    and a query that keeps the causal diagonal."""
    q, k, v = (F.pad(x, (0, _SINK_DIMS, 1, 0)) for x in (q, k, v))
    q[..., -1] = sinks[:, None]
    k[:, :, 0, -1] = 1
    return q, k, v


class Decode:
    """Plans one new position of each of the rows row..row+B-1; `lengths` [B] positions are there
    already."""

    def __init__(self, cache: KVCache, row: int, lengths: Sequence[int], *, exact: bool) -> None:
        device = cache.keys.device
        self.cache, self.row, self.exact = cache, row, exact
        self.rows = torch.arange(row, row + len(lengths), device=device)
        self.positions = torch.tensor(lengths, device=device)
        self._all = slice(row, row + len(lengths))
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

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """Stores and returns what `Prefill.attend` does, for S of 1."""
        q, k, v, scale, window, sinks = heads
        place = self.cache.places[layer]
        keys, values = self.cache.keys[place], self.cache.values[place]
        keys[self.rows, :, self.positions] = k[:, :, 0]
        values[self.rows, :, self.positions] = v[:, :, 0]
        batch, queries, _, dim = q.shape
        # the G queries that share a key/value head stand in for query positions: no repeated heads
        q = q.reshape(batch, k.shape[1], queries // k.shape[1], dim)
        seen, mask = self._keys(window)
        key, value = keys[self._all, :, seen], values[self._all, :, seen]
        if self.exact:  # fresh memory: kernels may treat unaligned views differently
            key, value = key.contiguous(), value.contiguous()
        if sinks is None:
            out = F.scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scale)
        else:
            out = _attend_with_sinks(q * scale, key, value, mask, sinks.view(1, *q.shape[1:3], 1))
        return out.reshape(batch, 1, queries, v.shape[-1])


def _attend_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor
) -> Tensor:
    """Attends with scaled queries: torch's kernels know no sinks, and a key in front would copy all
    keys at every step."""
    scores = q @ k.transpose(-1, -2)
    if mask is not None:
        scores += mask
    scores = torch.cat([scores, sinks.to(q.dtype).expand(len(q), -1, -1, -1)], -1)
    return scores.softmax(-1, dtype=torch.float32)[..., :-1].to(v.dtype) @ v


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
    if options.get("softcap") is not None:
        raise ValueError(f"{type(module).__name__}: softcap is not supported; serve with SGLang")
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    window, sinks = options.get("sliding_window"), options.get("s_aux")
    return plan.attend(layer, Heads(q, k, v, scale, window, sinks)), None


AttentionInterface.register(ATTENTION, _attend)
