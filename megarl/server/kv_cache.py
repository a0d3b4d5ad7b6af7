"""Slot KV cache and the attention that writes and reads it.

Every running sequence owns one row; rows 0..n-1 are always the running ones, so that a decode step
attends over a view of the cache instead of a gathered copy. The model calls `attend` through
transformers' attention registry; a plan among the forward's keyword arguments says what to do.

Shapes: R rows, C capacity in positions, K key/value heads, G query heads per key/value head, D head
dimension, of values E (equal but for latent attention, whose keys and values are cached as each
head has them); a forward has B rows of S positions of H hidden, queries [B,K*G,S,D].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION = "megarl_slots"
_POSITIONS_STEP = 64


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


class Decode:
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
        out = F.scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scale)
        return out.reshape(batch, 1, heads, v.shape[-1])


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
