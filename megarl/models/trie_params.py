"""Tells megatron-core's layers that packed tokens are a trie: which segments attend to which, and
rotary embedding at each token's depth instead of its place in the row.

T packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from megarl.models.trie_attention import Attend, prepare
from megarl.parallel.mcore import place_tokens, to_device
from megarl.parallel.packing import Trie

from megatron.core.packed_seq_params import PackedSeqParams

# fields of PackedSeqParams: queries and keys are alike, with their padding and without
BOUNDS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
LONGEST = ("max_seqlen_q", "max_seqlen_kv")


@dataclass(kw_only=True)
class TrieParams(PackedSeqParams):
    """Holds a packed trie beside what megatron-core reads. To megatron-core the T tokens are one
    sequence, whose rotary angles are given for each token; max_seqlen is the longest path."""

    trie: Trie

    @cached_property
    def attend(self) -> Attend:
        """Computes attention over the trie, for every layer; see `prepare`."""
        return prepare(self.trie.segments, self.trie.depth.device)


def trie_params(trie: Trie) -> TrieParams:
    """Returns the params of a packed trie, whose `depth` [T] is on the device."""
    tokens = len(trie.depth)
    cu = to_device(torch.tensor([0, tokens], dtype=torch.int32))
    place_tokens(cu, None)
    longest = longest_path(trie)
    return TrieParams(
        qkv_format="thd",
        **dict.fromkeys(BOUNDS, cu),
        **dict.fromkeys(LONGEST, longest),
        trie=trie,
    )


def longest_path(trie: Trie) -> int:
    """Returns the tokens of the longest path from a root to a leaf."""
    lengths: list[int] = []
    for s in trie.segments:
        above = 0 if s.parent is None else lengths[s.parent]
        lengths.append(above + s.end - s.start)
    return max(lengths, default=0)


class RotaryByDepth(nn.Module):
    """Wraps a rotary embedding of megatron-core (plain or YaRN) so that the tokens of a trie are
    rotated by their depth. megatron-core asks for the length of a sequence and then for the angles
    up to it: for a trie the params themselves stand for the length, and the angles of each of the T
    tokens come back."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary: Any = rotary

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the TrieParams among the arguments, else the length that megatron-core finds."""
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, TrieParams):
                return arg
        return self.rotary.get_rotary_seq_len(*args, **kwargs)

    def forward(self, length: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the angles of a sequence of `length` tokens [length,1,1,d], or those of a trie's
        tokens, [T,1,1,d] for TrieParams; YaRN returns (angles, factor)."""
        if not isinstance(length, TrieParams):
            return self.rotary(length, *args, **kwargs)
        angles = self.rotary(length.max_seqlen_q, *args, **kwargs)
        if isinstance(angles, tuple):
            return (_at(angles[0], length.trie.depth), *angles[1:])
        return _at(angles, length.trie.depth)

    def __getattr__(self, name: str) -> Any:
        """Returns what the wrapped module has: its frequencies are read from outside."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("rotary"), name)


def _at(angles: Tensor, depth: Tensor) -> Tensor:
    return angles.index_select(0, depth.to(angles.device))


def rotate_by_depth(chunk: nn.Module) -> None:
    """Wraps every rotary embedding of a built model: the model's own, or, in latent attention, each
    layer's."""
    for module in list(chunk.modules()):
        rotary = getattr(module, "rotary_pos_emb", None)
        if isinstance(rotary, nn.Module) and not isinstance(rotary, RotaryByDepth):
            module.rotary_pos_emb = RotaryByDepth(rotary)
