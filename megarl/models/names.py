"""One name per parameter: local layer spec and Transformer Engine spec, every pipeline chunk.

Transformer Engine fuses a norm into the linear layer after it and names its weight accordingly;
canonical names are those of the local spec, with global layer and expert numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

# Transformer Engine spec -> local spec (dense layers), relative to the layer
_ALIASES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_LAYERS = "decoder.layers."
# experts one by one (local spec), or a layer's in one module (Transformer Engine's grouped GEMM)
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<e>\d+)\.)?(?P<fc>linear_fc[12]\.weight)(?P<grouped_e>\d*)"
)


def named_params(chunks: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Canonical name -> parameter over this rank's chunks, wrapped (DDP, Float16Module) or not."""
    out: dict[str, nn.Parameter] = {}
    for chunk in chunks:
        model = unwrap(chunk)
        for name, param in model.named_parameters():
            canonical = canonical_name(model, name)
            assert canonical not in out, f"two parameters are called {canonical}"
            out[canonical] = param
    return out


def unwrap(module: nn.Module) -> nn.Module:
    """The model inside DDP and precision wrappers, which keep it as `.module`."""
    while isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
    return module


def canonical_name(model: nn.Module, name: str) -> str:
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
