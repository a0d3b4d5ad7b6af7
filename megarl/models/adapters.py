"""Puts low-rank adapters on a built model: modules, hooks, merged weights. See models/lora.py.

T tokens of this rank, n adapted HF modules in a layer, r rank of the adapters.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megarl.config.engine import LoRAConfig
from megarl.models.hf_config import ModelConfig
from megarl.models.lora import (
    Adapted,
    FusedRows,
    adapted_layers,
    adapter_table,
    check_lora,
    is_adapter,
    is_trained,
    scale,
)
from megarl.models.ops import GateUp
from megarl.models.params import canonical_name, local_view, mark_params, named_params
from megarl.parallel import mcore  # noqa: F401  before megatron
from megarl.parallel.layout import Layout

from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class Adapter(nn.Module):
    """Holds the adapters A and B of one linear layer, beside that layer; `add_to` is the layer's
    forward hook. megarl.models.lora gives their shapes.

    Ranks exchange tensors of width r. Column-parallel layers see whole tokens (with sequence
    parallelism: this rank's) and give their rows of the output; A x is computed by every rank, so
    its gradient must be summed over ranks. Row-parallel layers see their columns of the input, so A
    x must be summed. Under sequence parallelism the matrix that every rank holds has seen only this
    rank's tokens: finalize_model_grads sums its gradient, by the same mark as the norms'.

    Experts are cut over their own group, and the token dispatcher hands every rank of it the same
    tokens and sums the ranks' outputs, forward and backward. So ranks exchange only the gradient of
    the matrix that all of them hold.
    """

    def __init__(self, of: Adapted, adapters: Adapters) -> None:
        super().__init__()
        self.adapters, self.scale = adapters, scale(adapters.config)
        self.row_parallel, self.is_expert = of.row_parallel, of.base.expert is not None
        model, layout, c = adapters.table.model, adapters.table.layout, adapters.coords
        self.sequence_parallel = layout.sequence_parallel and not self.is_expert
        self.gated = isinstance(of.base.op, GateUp) and len(of.sources) == 2
        tp, rank = (layout.etp, c.etp) if self.is_expert else (layout.tp, c.tp)
        self.group: dist.ProcessGroup = (
            ps.get_expert_tensor_parallel_group()
            if self.is_expert
            else ps.get_tensor_model_parallel_group()
        )
        a, b, base = (p.op.local_shape(model, tp, 0) for p in (of.a, of.b, of.base))
        kw: dict[str, Any] = dict(dtype=adapters.dtype, device=adapters.device)
        self.A, self.B = (nn.Parameter(torch.empty(shape, **kw)) for shape in (a, b))
        whole = self.B if self.row_parallel else self.A
        whole.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        self.out_rows, slots = base[0], _slots(of, model, tp, rank)
        self.slots: Tensor
        self.register_buffer("slots", slots.to(adapters.device), persistent=False)

    def add_to(self, linear: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Returns the layer's (out, bias) with scale * B A x added to `out`, or None (no change)
        while the adapters are off. x and out are [T,...,features]."""
        if not self.adapters.on:
            return None
        out, bias = output
        a, b = self.A, self.B
        if self.is_expert:  # the gradient of the one that its ranks hold alike is summed over them
            together = partial(mappings.copy_to_tensor_model_parallel_region, group=self.group)
            a, b = (a, together(b)) if self.row_parallel else (together(a), b)
        low = self._exchanged(F.linear(_normed(linear, args[0]), a))
        weight = self._expanded(b)
        added = torch.addmm(out.flatten(0, -2), low.flatten(0, -2), weight.t(), alpha=self.scale)
        return added.view_as(out), bias

    def _exchanged(self, low: Tensor) -> Tensor:
        """Returns A x, [T,...,n*r], as the rows of B need it."""
        if self.is_expert:
            return low
        if self.row_parallel and self.sequence_parallel:
            low = mappings.reduce_scatter_to_sequence_parallel_region(low, group=self.group)
        elif self.row_parallel:
            low = mappings.reduce_from_tensor_model_parallel_region(low, group=self.group)
        elif self.sequence_parallel:
            low = mappings.gather_from_sequence_parallel_region(low, group=self.group)
        else:
            low = mappings.copy_to_tensor_model_parallel_region(low, group=self.group)
        return low

    def _expanded(self, b: Tensor) -> Tensor:
        """Returns B [rows,r] as [out_rows,n*r]: row i has its r numbers in the columns of its
        module, so that one product serves all modules, however their rows are interleaved."""
        r, n = b.shape[1], len(self.A) // b.shape[1]
        if n == 1 and len(b) == self.out_rows:
            return b
        spread = b.new_zeros(self.out_rows * n, r).index_copy(0, self.slots, b)
        return spread.view(self.out_rows, n * r)

    @torch.no_grad()
    def delta(self) -> Tensor:
        """Returns this rank's part of scale * B A in fp32, shaped like its part of the weight."""
        return self._expanded(self.B.float()) @ self.A.float() * self.scale

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Returns megatron-core's sharded tensors of A and B; gate and up rows of B are two tensors
        on disk. Raises KeyError where `metadata` lacks "dp_cp_group"."""
        metadata = metadata or {}
        found = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"A": 1} if self.row_parallel else {"B": 0},
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self.gated:
            found[f"{prefix}B"] = apply_swiglu_sharded_factory(
                found[f"{prefix}B"], sharded_offsets, metadata.get("singleton_local_shards", False)
            )
        return found


def _slots(of: Adapted, model: ModelConfig, tp: int, rank: int) -> Tensor:
    """Returns the place of B's rows for Adapter._expanded: i*n + k for row i of module k."""
    if not isinstance(of.b.op, FusedRows):
        return torch.empty(0, dtype=torch.long)
    n = len(of.sources)
    rows = (
        torch.arange(s.row, s.row + s.rows) * n + of.sources.index(s.source)
        for s in of.b.op.base_rows(model, tp, rank)
    )
    return torch.cat(list(rows))


def _normed(linear: nn.Module, x: Tensor) -> Tensor:
    """Returns the input of the weight: Transformer Engine's fused layers norm theirs first."""
    weight = getattr(linear, "layer_norm_weight", None)
    if weight is None:
        return x
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), linear.eps).to(x.dtype)  # type: ignore[arg-type]


class Merged(Mapping[str, Tensor]):
    """Maps names to a rank's base weights with their adapters merged in: W + scale * B A, in fp32,
    rounded to the weight's dtype. A lookup computes the weight; nothing is kept."""

    def __init__(self, params: Mapping[str, Tensor], adapters: Mapping[str, Adapter]) -> None:
        self._params, self._adapters = params, adapters

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        param = self._params[name]
        if name not in self._adapters:
            return param
        return self._adapters[name].delta().add_(param).to(param.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


class Adapters:
    """Adds adapters to a rank's chunks and freezes all other parameters, except those of a value
    head.

    table: the trained tensors by PEFT's names. params: the trained parameters by canonical name.
    on: whether the adapters count.
    Raises ValueError for adapters that do not fit the model or its tensor parallelism.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        model: ModelConfig,
        layout: Layout,
        cfg: LoRAConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
    ) -> None:
        check_lora(model, layout.tp, cfg)
        self.config, self.dtype, self.device, self.on = cfg, dtype, device, True
        self.table = adapter_table(model, layout, cfg)
        self.coords = layout.coords(dist.get_rank())
        self._by_weight: dict[str, Adapter] = {}
        wanted = {layer.base.name: layer for layer in adapted_layers(model, cfg)}
        for chunk in chunks:
            for path, linear in list(chunk.named_modules()):
                if not isinstance(getattr(linear, "weight", None), nn.Parameter):
                    continue
                name = canonical_name(chunk, f"{path}.weight")
                if name in wanted:
                    self._by_weight[name] = Adapter(wanted[name], self)
                    _attach(self._by_weight[name], chunk, path, linear)
            if getattr(chunk, "pre_process", False):
                chunk.embedding.register_forward_hook(_require_grad)  # type: ignore[union-attr]
        everything = named_params(chunks)
        self.params = {n: p for n, p in everything.items() if is_trained(n, model)}
        mark_params(self.table, self.coords, self.params)
        for name, param in everything.items():
            param.requires_grad_(name in self.params)
        self.reset(seed)

    def merged(self, params: Mapping[str, Tensor]) -> Merged:
        """Returns the base model's weights among `params` with the adapters merged in."""
        return Merged(base_params(params), self._by_weight)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Turns the adapters off inside the `with`: the model computes as the base model does."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Sets A and B as PEFT starts them: A kaiming-uniform, that is within 1/sqrt(in); B zero.
        The numbers are keyed by (seed, name), so they do not depend on the layout."""
        for tensor in self.table.tensors:
            if ".lora_" not in tensor.name:
                continue
            for piece in tensor.held_by(self.coords):
                view = local_view(self.params[piece.param], piece.view)
                if ".lora_B." in tensor.name:
                    view.zero_()
                    continue
                key = zlib.crc32(f"{seed}:{tensor.name}".encode())
                bound = 1 / math.sqrt(tensor.shape[1])
                whole = torch.empty(tensor.shape).uniform_(
                    -bound, bound, generator=torch.Generator().manual_seed(key)
                )
                view.copy_(whole[piece.box].reshape(view.shape))


def base_params(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns `params` without the adapters."""
    return {name: p for name, p in params.items() if not is_adapter(name)}


def _attach(adapter: Adapter, chunk: nn.Module, path: str, linear: nn.Module) -> None:
    """Puts an adapter beside its layer, which stands at `path` of the chunk."""
    parent, _, leaf = path.rpartition(".")
    chunk.get_submodule(parent).add_module(f"{leaf}_lora", adapter)
    linear.register_forward_hook(adapter.add_to)


def _require_grad(_module: nn.Module, _args: Any, hidden: Tensor) -> None:
    """Makes hidden states require gradients: the embedding is frozen, but activation recomputation
    and pipeline stages pass gradients on only where a layer's input requires them."""
    if torch.is_grad_enabled() and not hidden.requires_grad:
        hidden.requires_grad_()
