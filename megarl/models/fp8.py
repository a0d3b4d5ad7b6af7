"""Sets Transformer Engine's FP8 matrix products, in megatron-core's words. Weights, gradients, the
LM head and everything outside of the layers' linear maps keep their dtype."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megarl.models.hf_config import ModelConfig
from megarl.parallel.layout import Layout

# recipe -> (format, smallest compute capability, sizes of matrix products are multiples of)
_RECIPES = {
    "delayed": ("hybrid", (8, 9), 16),
    "tensorwise": ("hybrid", (8, 9), 16),
    "blockwise": ("e4m3", (9, 0), 16),
    "mxfp8": ("e4m3", (10, 0), 32),
}
_NO_MXFP8_FROM = (12, 0)  # Transformer Engine has not all layouts of its products there


def fp8_fields(
    recipe: str, model: ModelConfig, layout: Layout, *, dtype: torch.dtype, attention: str
) -> dict[str, Any]:
    """Returns the fields of the TransformerConfig for an FP8 `recipe`, none for "none". Raises
    ValueError where these layers, this dtype, this GPU or these sizes cannot do it."""
    if recipe == "none":
        return {}
    form, least, unit = _RECIPES[recipe]
    if attention != "te":
        raise ValueError(
            f"fp8={recipe!r} needs Transformer Engine's layers, that is a GPU, Transformer Engine "
            "(pip install megarl[gpu]) and attention='te' or 'auto'; use fp8='none'"
        )
    if dtype != torch.bfloat16:
        raise ValueError(
            f"fp8={recipe!r} needs dtype='bfloat16' (it is {str(dtype).removeprefix('torch.')})"
        )
    if not runs_on(recipe, found := torch.cuda.get_device_capability()):
        bound = f" to below {_dotted(_NO_MXFP8_FROM)}" if recipe == "mxfp8" else ""
        fits = " or ".join([*(repr(r) for r in _RECIPES if runs_on(r, found)), "'none'"])
        raise ValueError(
            f"fp8={recipe!r} needs a GPU of compute capability {_dotted(least)}{bound}, this one "
            f"has {_dotted(found)}; use {fits}"
        )
    for name, size in _widths(model, layout).items():
        if size % unit:
            raise ValueError(
                f"fp8={recipe!r} needs sizes that are multiples of {unit}, but a rank's {name} is "
                f"{size}; lower parallel.tp or use fp8='none'"
            )
    return {"fp8": form, "fp8_recipe": recipe}


def drop_copies(chunks: Iterable[torch.nn.Module]) -> None:
    """Drops the quantised weights that Transformer Engine's layers keep between micro-batches:
    about two bytes a parameter. The next pass makes them anew, as after every update."""
    for chunk in chunks:
        for module in chunk.modules():
            copies = getattr(module, "_fp8_workspaces", None)
            if copies:
                copies.clear()


def runs_on(recipe: str, capability: tuple[int, int]) -> bool:
    """Returns whether a GPU of this compute capability (major, minor) can run the recipe."""
    if recipe == "mxfp8" and capability >= _NO_MXFP8_FROM:
        return False
    return _RECIPES[recipe][1] <= capability


def token_unit(recipe: str) -> int:
    """Returns the number of tokens that a rank's tokens are padded to a multiple of."""
    return 1 if recipe == "none" else _RECIPES[recipe][2]


def _widths(m: ModelConfig, layout: Layout) -> dict[str, int]:
    """Returns, by name, both sides of every linear map in the layers as a rank holds them."""
    widths = {
        "hidden size": m.hidden_size,
        "attention width": m.num_attention_heads // layout.tp * m.v_head_dim,
        **m.attention.widths(layout.tp),
    }
    if m.has_dense_layers:
        widths["feed-forward width"] = m.intermediate_size // layout.tp
    if m.moe is not None:
        widths["expert width"] = m.moe.intermediate_size // layout.etp
        widths["shared expert width"] = m.moe.shared_intermediate_size // layout.tp
    return widths


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
