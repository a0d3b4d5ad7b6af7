"""A rank's parameters: one name for each, whatever the layer spec (local, Transformer Engine) and
chunk; marks for megatron-core's data parallelism and gradient norm; and how they are filled from
whatever gives boxes of HF tensors: files, a random generator.

Transformer Engine fuses a norm into the linear layer after it and names its weight accordingly;
canonical names are those of the local spec, with global layer and expert numbers.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from megarl.models.piece_table import HfTensor, PieceTable, View
from megarl.parallel.layout import Coords

# Transformer Engine spec -> local spec (dense layers), relative to the layer
_ALIASES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}
_ROUTER_BIAS = "mlp.router.expert_bias"  # a buffer that belongs to the model's weights
_LAYERS = "decoder.layers."
# experts one by one (local spec), or a layer's in one module (Transformer Engine's grouped GEMM)
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<e>\d+)\.)?"
    r"(?P<fc>linear_fc[12](?:\.weight|\.bias|_lora\.[AB]))(?P<grouped_e>\d*)"
)


def named_params(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Returns the parameters of this rank's chunks, wrapped (DDP, Float16Module) or not, by
    canonical name.

    Routers' biases, which are buffers, are among them, in fp32. A Float16Module makes new buffers:
    a bias found before it wraps a chunk is no longer the chunk's. Raises AssertionError for two
    parameters of one name.
    """
    out: dict[str, Tensor] = {}
    for chunk in chunks:
        model = unwrap(chunk)
        biases = [(n, b) for n, b in model.named_buffers() if n.endswith(_ROUTER_BIAS)]
        for _, bias in biases:
            bias.data = bias.data.float()
        for name, param in (*model.named_parameters(), *biases):
            canonical = canonical_name(model, name)
            assert canonical not in out, f"two parameters are called {canonical}"
            out[canonical] = param
    return out


def checkpoint_keys(name: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns where megatron-core's checkpoints keep the parameter of canonical `name`: the keys it
    may have, and its index into their leading dimensions (a layer's experts are one tensor)."""
    index, rest = "", name
    if name.startswith(_LAYERS):
        index, rest = name.removeprefix(_LAYERS).split(".", 1)
        index = f"{_LAYERS}{index}."
    if expert := _EXPERT.fullmatch(rest):
        return (f"{index}mlp.experts.experts.{expert['fc']}",), (int(expert["e"]),)
    fused = tuple(f"{index}{te}" for te, local in _ALIASES.items() if local == rest)
    return (*fused, name), ()


def checkpoint_key(name: str, names: Collection[str]) -> str:
    """Returns the one of `checkpoint_keys` that a parameter is saved under. A norm's is in the
    linear layer after it where the model has that layer, as with Transformer Engine's layers and in
    Megatron-LM's checkpoints. `names`: all canonical names of the model."""
    *fused, own = checkpoint_keys(name)[0]
    return next((k for k in fused if k.replace("layer_norm_weight", "weight") in names), own)


def unwrap(module: nn.Module) -> nn.Module:
    """Returns the model inside DDP and precision wrappers, which keep it as `.module`."""
    while isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
    return module


def canonical_name(model: nn.Module, name: str) -> str:
    """Returns the canonical name of a parameter that is called `name` in the unwrapped `model`."""
    if not name.startswith(_LAYERS):
        return name
    index, rest = name.removeprefix(_LAYERS).split(".", 1)
    layer = model.get_submodule(_LAYERS + index)
    number: int = layer.layer_number - 1  # type: ignore[assignment, operator]  # megatron counts from 1
    if expert := _EXPERT.fullmatch(rest):
        local = int(expert["e"] or expert["grouped_e"])
        e = layer.mlp.local_expert_indices[local]  # type: ignore[union-attr, index]
        rest = f"mlp.experts.local_experts.{e}.{expert['fc']}"
    return f"{_LAYERS}{number}.{_ALIASES.get(rest, rest)}"


def mark_params(table: PieceTable, c: Coords, params: Mapping[str, Tensor]) -> None:
    """Sets the marks of all parameters of the rank at `c`, by canonical name, from the piece table.
    Raises AssertionError unless they are the table's.

    tensor_model_parallel: the gradient norm counts such a parameter on every tensor-parallel rank,
    and any other on the first alone. Layers cannot be trusted with it: Transformer Engine leaves
    the mark out of grouped experts since 2.13, and sets it on projections that every rank repeats.

    allreduce=False: an expert's gradient is averaged over the ranks that hold the expert.
    megatron-core says so for ep > 1 only: with etp unlike tp it would average an expert over the
    wrong ranks, and a checkpoint of another ep would have its optimizer state under other names.

    sequence_parallel=False: both layer specs mark an expert's second bias, whose gradients would
    then be summed over tensor-parallel ranks, although data parallelism has summed them.

    shared: a part of an expert that all its ranks hold, of an adapter say, is counted on the first
    of them, which need not be the first of the dense weights'.
    """
    table.check_params(c, {name: param.shape for name, param in params.items()})
    for name, local in table.local_params(c).items():
        if name in table.buffers:
            continue
        param = params[name]
        param.tensor_model_parallel = not local.replicated  # type: ignore[attr-defined]
        if local.place.ep is not None:
            param.allreduce = False  # type: ignore[attr-defined]
            param.sequence_parallel = False  # type: ignore[attr-defined]
            param.shared = local.replicated and c.etp > 0  # type: ignore[attr-defined]
            param.tensor_model_parallel = True  # type: ignore[attr-defined]


# (HF tensor, box) -> its numbers, of the box's shape, any dtype, on the host
ReadSlice = Callable[[HfTensor, tuple[slice, ...]], Tensor]


def local_view(param: Tensor, view: View) -> Tensor:
    """Returns a strided view of `param`; no copy, no autograd. Raises AssertionError for a
    parameter that is not contiguous."""
    assert param.is_contiguous(), f"{view} of a parameter that is not contiguous"
    data = param.detach()
    return data.as_strided(view.shape, view.strides, data.storage_offset() + view.offset)


@torch.no_grad()
def load_params(
    table: PieceTable, c: Coords, params: Mapping[str, Tensor], read: ReadSlice
) -> None:
    """Writes every element of the rank's parameters: pieces from `read`, padding rows with zero.

    Reads each box once and one at a time, casting to the parameter's dtype on the way. Raises
    AssertionError unless `params` are the table's.
    """
    table.check_params(c, {n: p.shape for n, p in params.items()})
    for name, local in table.local_params(c).items():
        params[name].detach()[slice(*local.padding)].zero_()
    for tensor in table.tensors:
        for piece in tensor.held_by(c):
            data = read(tensor, piece.box)
            local_view(params[piece.param], piece.view).copy_(data.reshape(piece.view.shape))


def init_params(table: PieceTable, c: Coords, params: Mapping[str, Tensor], *, seed: int) -> None:
    """Fills the rank's parameters as HF initialises: N(0, initializer_range) matrices, unit norms,
    zero biases, or as a Param's `initial` says.

    The numbers are keyed by (seed, HF name), so the model does not depend on the layout. Every rank
    draws each tensor it holds a piece of in full, on the host.
    """
    std = table.model.initializer_range
    drawn: tuple[str, Tensor] = ("", torch.empty(0))

    def read(tensor: HfTensor, box: tuple[slice, ...]) -> Tensor:
        nonlocal drawn
        if drawn[0] != tensor.name:
            drawn = (tensor.name, draw(tensor, seed, std))
        return drawn[1][box]

    load_params(table, c, params, read)


def draw(tensor: HfTensor, seed: int, std: float) -> Tensor:
    """Returns the whole tensor as `init_params` makes it, in fp32 on the host."""
    initial = tensor.initial or ("ones" if len(tensor.shape) == 1 else "normal")
    if initial in _CONSTANTS:
        return torch.full(tensor.shape, _CONSTANTS[initial])
    key = zlib.crc32(f"{seed}:{tensor.name}".encode())
    generator = torch.Generator(device="cpu").manual_seed(key)
    if initial == "log_uniform":
        return torch.empty(tensor.shape).uniform_(*_LOG_UNIFORM, generator=generator).log_()
    return torch.empty(tensor.shape).normal_(std=std, generator=generator)


_CONSTANTS = {"zeros": 0.0, "ones": 1.0}
_LOG_UNIFORM = (0.01, 16.0)
