"""Gives each parameter one name, whatever the layer spec (local, Transformer Engine) and chunk.

Transformer Engine fuses a norm into the linear layer after it and names its weight accordingly;
canonical names are those of the local spec, with global layer and expert numbers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from torch import Tensor, nn

# Transformer Engine spec -> local spec (dense layers), relative to the layer
_ALIASES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}
_ROUTER_BIAS = "mlp.router.expert_bias"  # a buffer that belongs to the model's weights
_LAYERS = "decoder.layers."
# experts one by one (local spec), or a layer's in one module (Transformer Engine's grouped GEMM)
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<e>\d+)\.)?"
    r"(?P<fc>linear_fc[12](?:\.weight|_lora\.[AB]))(?P<grouped_e>\d*)"
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
