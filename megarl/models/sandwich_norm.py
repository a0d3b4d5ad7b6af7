"""Defines layers that also normalise what attention and MLP add to the residual stream, as GLM-4's
do: x + norm(attention(norm(x))), then the same with the MLP. megatron-core has no such layer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from megarl.parallel import mcore  # noqa: F401  before megatron

from megatron.core.transformer import TransformerConfig, TransformerLayer  # isort: skip

WithBias = tuple[Tensor, Tensor | None]


class SandwichLayer(TransformerLayer):
    """A transformer layer that also normalises the outputs of attention and MLP. `norm`: the class
    of these two norms, with the arguments of megatron-core's."""

    self_attn_bda: Any
    mlp_bda: Any

    def __init__(
        self, config: TransformerConfig, *args: Any, norm: Callable[..., nn.Module], **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        sizes = dict(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        self.post_self_attn_layernorm = norm(**sizes)
        self.post_mlp_layernorm = norm(**sizes)
        # megatron-core calls these with a block's output and the residual stream, by default with
        # gradients enabled: norms, unlike sums, would then keep a graph where none is wanted
        self.bias_dropout_add_exec_handler = nullcontext
        self.self_attn_bda = partial(_add, self.self_attn_bda, self.post_self_attn_layernorm)
        self.mlp_bda = partial(_add, self.mlp_bda, self.post_mlp_layernorm)


def _add(
    bias_dropout_add: Callable[..., Any], norm: nn.Module, *settings: bool
) -> Callable[[WithBias, Tensor, float], Tensor]:
    """Returns bias_dropout_add(*settings), applied to the normalised output."""
    add = bias_dropout_add(*settings)

    def normed_add(output: WithBias, residual: Tensor, dropout: float) -> Tensor:
        x, bias = output
        assert bias is None
        out: Tensor = add((norm(x), None), residual, dropout)
        return out

    return normed_add
