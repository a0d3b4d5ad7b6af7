"""Gated delta networks (Yang et al., 2024, arXiv 2412.06464) over packed sequences: the layers of
Qwen3-Next and Qwen3.5 that have a state of fixed size in place of attention.

T packed tokens of n sequences, H value heads of this rank (each key head serves H / key heads of
them), K and V the sizes of a key's and a value's head, D channels of the convolution, W its width.
The state S [K,V] of a head is zero where a sequence begins. A token with key k, value v, decay
exp(g) and rate b makes it

    S' = exp(g) S + b k (v - exp(g) k S)

and its query q gives q S'. Within a chunk of C tokens the changes of S solve a triangular system
(section 3.3), so that only chunks come one after another. On GPUs kernels of `fla`
(flash-linear-attention) do the same, where it is installed; they are not deterministic.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models.attention import packed_lengths
from megarl.models.layers import RMSNorm
from megarl.models.trie_params import TrieParams
from megarl.parallel import mcore  # noqa: F401  before megatron
from megarl.parallel.packing import zigzag_index
from megarl.parallel.worlds import pinned

from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import all_to_all, mappings
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec

CHUNK = 64
EPS = 1e-6  # of the lengths of queries and keys

# megatron-core refuses to build the layer without `fla`, of which its own forward takes kernels
GatedDeltaNet.__init__.__globals__["HAVE_FLA"] = True


@dataclass(frozen=True)
class Chunks:
    """Says where tokens stand when every sequence is filled up to whole chunks, and the first
    chunks of all sequences come first, then all second ones, longest sequence first.

    position [T]: a token's number in its sequence. slot [T]: its place among the chunks' tokens.
    counts: how many sequences have a first chunk, a second one, ... With C of 2, sequences of 1 and
    3 tokens and "." for filling:

        tokens  a0 b0 b1 b2      chunks  b0 b1 | a0 . | b2 .      counts  2, 1
    """

    position: Tensor
    slot: Tensor
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Kernels:
    """Holds fla's functions: a causal convolution and the chunked rule."""

    convolve: Callable[..., Any]
    rule: Callable[..., Any]


@cache
def fla_kernels() -> Kernels | None:
    """Returns the kernels of `fla`, or None where it is not installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    return Kernels(
        importlib.import_module("fla.modules.convolution").causal_conv1d,
        importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule,
    )


@dataclass(frozen=True)
class Sequences:
    """Describes the sequences of a packed row: where each begins, `bounds` [n+1] on the device and
    `host_bounds`; and `chunks`, or the `kernels` that need none.

    order [T]: the place of each token among those of all context-parallel ranks, one rank after
    another; back [T]: the token at each of these places. None without context parallelism.
    """

    bounds: Tensor
    host_bounds: Tensor
    kernels: Kernels | None
    chunks: Chunks | None
    order: Tensor | None
    back: Tensor | None


def sequences(
    lengths: Sequence[int], device: torch.device, *, cp: int = 1, kernels: Kernels | None = None
) -> Sequences:
    """Describes packed sequences of these lengths, shared out over `cp` ranks. Nothing is read from
    the device."""
    bounds = torch.tensor([0, *accumulate(lengths)])
    order = back = None
    if cp > 1:
        back = torch.cat([zigzag_index(lengths, cp, r) for r in range(cp)])
        order = _to(device, back.argsort())
        back = _to(device, back)
    chunks = _chunks(lengths, bounds, device) if kernels is None else None
    return Sequences(_to(device, bounds), bounds, kernels, chunks, order, back)


def _chunks(lengths: Sequence[int], bounds: Tensor, device: torch.device) -> Chunks:
    of = [-(-n // CHUNK) for n in lengths]
    counts = tuple(sum(c > i for c in of) for i in range(max(of)))
    first = torch.tensor([0, *accumulate(counts)])  # chunk number of the first i-th chunk
    place = torch.tensor(of).argsort(descending=True, stable=True).argsort()
    sequence = torch.arange(len(of)).repeat_interleave(torch.tensor(lengths))
    position = torch.arange(len(sequence)) - bounds[sequence]
    slot = (first[position // CHUNK] + place[sequence]) * CHUNK + position % CHUNK
    return Chunks(_to(device, position), _to(device, slot), counts)


def _to(device: torch.device, x: Tensor) -> Tensor:
    return pinned(x).to(device, non_blocking=True)


def convolve(x: Tensor, weight: Tensor, at: Sequences) -> Tensor:
    """Returns silu of each channel's causal convolution within its sequence: x [T,D], weight [D,W],
    whose last column meets the token itself."""
    if at.kernels is not None:
        bounds = dict(cu_seqlens=at.bounds, cu_seqlens_cpu=at.host_bounds)
        return at.kernels.convolve(x[None], weight, activation="silu", **bounds)[0][0]
    assert at.chunks is not None
    width, position = weight.shape[1], at.chunks.position
    out = x * weight[:, -1]
    for back in range(1, min(width, len(x))):
        earlier = x[:-back] * weight[:, width - 1 - back]
        earlier = earlier.masked_fill((position[back:] < back)[:, None], 0.0)
        out = out + F.pad(earlier, (0, 0, back, 0))
    return F.silu(out)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, at: Sequences) -> Tensor:
    """Returns what queries read from the state, [T,H,V] in v's dtype, for q and k [T,H,K], which
    are divided by their lengths, v [T,H,V], decays g and rates beta [T,H] in fp32."""
    if at.kernels is not None:
        bounds = dict(cu_seqlens=at.bounds, cu_seqlens_cpu=at.host_bounds)
        inputs = dict(q=q, k=k, v=v, g=g, beta=beta.to(v.dtype))
        batch = {name: x[None].contiguous() for name, x in inputs.items()}
        return at.kernels.rule(**batch, use_qk_l2norm_in_kernel=True, **bounds)[0][0]
    assert at.chunks is not None
    slot, counts = at.chunks.slot, at.chunks.counts

    def chunked(x: Tensor) -> Tensor:  # [T,H,...] -> [N,H,C,...]
        full = x.new_zeros((sum(counts) * CHUNK, *x.shape[1:]))
        return full.index_copy(0, slot, x).unflatten(0, (-1, CHUNK)).transpose(1, 2)

    dtype = v.dtype
    q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    q, k, v, g, beta = (chunked(x.float()) for x in (q, k, v, g, beta))
    g = g.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(later, -float("inf")).exp()
    rated = k * beta[..., None]
    right_side = torch.cat([v * beta[..., None], rated * g.exp()[..., None]], -1)
    system = (rated @ k.mT) * decay
    solved = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), -1)
    within = (q @ k.mT) * decay
    q = q * g.exp()[..., None]
    k = k * (g[..., -1:] - g).exp()[..., None]
    chunk_decay = g[..., -1].exp()[..., None, None]

    state = q.new_zeros(counts[0], q.shape[1], k.shape[-1], v.shape[-1])
    outs, begin = [], 0
    for n in counts:
        here, state = slice(begin, begin + n), state[:n]
        change = values[here] - keys[here] @ state
        outs.append(q[here] @ state + within[here] @ change)
        state = state * chunk_decay[here] + k[here].mT @ change
        begin += n
    return torch.cat(outs).transpose(1, 2).flatten(0, 1)[slot].to(dtype)


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


class GatedDelta(GatedDeltaNet):
    """megatron-core's layer, its parameters and their checkpoints, over packed sequences, with
    context parallelism by heads and without `fla`."""

    def __init__(
        self, config: Any, submodules: Any, layer_number: int, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__(config, submodules, layer_number, pg_collection=pg_collection)
        self.cp_group = pg_collection.cp

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        self.gated_delta_rule = delta_rule  # megatron-core 0.19 asks for one

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (output, no bias) for hidden states [s,b,H]: b sequences, or with
        packed_seq_params one packed row. Masks are ignored, as padding comes after every real
        token."""
        x, _bias = self.in_proj(hidden_states)  # [s,b,rows], all tokens of this cp rank
        s, b = x.shape[:2]
        at = self._sequences(packed_seq_params, s, b, x)
        x = self._to_heads(x.transpose(0, 1).flatten(0, 1), at)
        keys, values, heads = (
            n // self.tp_size // self.cp_group.size()
            for n in (self.qk_dim, self.v_dim, self.num_value_heads)
        )
        qkv, z, b_rate, a_rate = x.split((2 * keys + values, values, heads, heads), -1)
        qkv = convolve(qkv, self._own(self.conv1d.weight.squeeze(1), self._qkv()), at)
        q, k = (
            part.unflatten(-1, (-1, self.key_head_dim)) for part in qkv[:, : 2 * keys].chunk(2, -1)
        )
        v, z = (part.unflatten(-1, (heads, -1)) for part in (qkv[:, 2 * keys :], z))
        q, k = (part.repeat_interleave(heads // part.shape[1], 1) for part in (q, k))
        step = F.softplus(a_rate.float() + self._own(self.dt_bias).float())
        g = -self._own(self.A_log).float().exp() * step
        out = self._norm(delta_rule(q, k, v, g, b_rate.float().sigmoid(), at))
        out = (out * F.silu(z.float())).to(x.dtype).flatten(1)
        out = self._from_heads(out, at)
        return self.out_proj(out.unflatten(0, (b, s)).transpose(0, 1))

    def _norm(self, out: Tensor) -> Tensor:
        if self.tp_size == 1 or self.config.sequence_parallel:
            return self.out_norm(out)
        # Ranks have different heads, so the weight's gradient must be summed over them.
        # megatron-core does so under sequence parallelism only (true of 0.19.2).
        weight = mappings.copy_to_tensor_model_parallel_region(self.out_norm.weight)
        return torch.func.functional_call(self.out_norm, {"weight": weight}, (out,))

    def _sequences(self, packed: Any, s: int, b: int, x: Tensor) -> Sequences:
        assert not isinstance(packed, TrieParams), "a state cannot branch"
        cp = self.cp_group.size()
        # fla's kernels are for 16 bits
        kernels = fla_kernels() if x.is_cuda and x.dtype != torch.float32 else None
        if packed is None:
            return sequences([s * cp] * b, x.device, cp=cp, kernels=kernels)
        plans = packed.__dict__.setdefault("_megarl_plans", {})  # as attention keeps its own
        if "sequences" not in plans:
            plans["sequences"] = sequences(packed_lengths(packed), x.device, cp=cp, kernels=kernels)
        return plans["sequences"]

    # ---- context parallelism: each rank has all tokens of its share of the heads

    def _qkv(self) -> tuple[int, ...]:
        return tuple(n // self.tp_size for n in (self.qk_dim, self.qk_dim, self.v_dim))

    def _own(self, param: Tensor, sections: Sequence[int] = ()) -> Tensor:
        cp, rank = self.cp_group.size(), self.cp_group.rank()
        if cp == 1:
            return param
        parts = param.split(sections) if sections else (param,)
        return torch.cat([part.chunk(cp)[rank] for part in parts])

    def _to_heads(self, x: Tensor, at: Sequences) -> Tensor:
        """Exchanges tokens for heads: [T/cp, rows] -> [T, rows/cp], in the order of the row."""
        cp = self.cp_group.size()
        if at.order is None:
            return x
        heads = self.num_value_heads // self.tp_size
        sections = (*self._qkv(), self.v_dim // self.tp_size, heads, heads)
        x = torch.cat([part.unflatten(-1, (cp, -1)) for part in x.split(sections, -1)], -1)
        x = x.transpose(0, 1).flatten(0, 1)  # [cp * T/cp, rows/cp], what rank r gets r-th
        return all_to_all(self.cp_group, x)[at.order]

    def _from_heads(self, x: Tensor, at: Sequences) -> Tensor:
        """Exchanges heads for tokens: [T, rows/cp] -> [T/cp, rows]."""
        if at.back is None:
            return x
        x = all_to_all(self.cp_group, x[at.back])
        return x.unflatten(0, (self.cp_group.size(), -1)).transpose(0, 1).flatten(1)


def delta_spec(attention: ModuleSpec) -> ModuleSpec:
    """Returns the spec of a layer that has the linear layers of `attention`'s spec."""
    parts = attention.submodules
    # its norm multiplies with the weight itself, also where other norms do with 1 + weight
    own = GatedDeltaNetSubmodules(parts.linear_qkv, RMSNorm, parts.linear_proj)
    return ModuleSpec(GatedDelta, submodules=own)


class GatedAttention(SelfAttention):
    """Attention whose output is gated. With more tensor-parallel ranks than key/value heads,
    megatron-core 0.16 gives a rank the gates of a whole query group; they are cut to its heads."""

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Returns megatron-core's queries, keys, values, and the gates of these queries."""
        query, key, value, gate = super().get_query_key_value_tensors(*args, **kwargs)
        heads = query.shape[2]
        if gate.shape[2] > heads:
            first = self.pg_collection.tp.rank() * heads % gate.shape[2]
            gate = gate[:, :, first : first + heads]
        return query, key, value, gate
