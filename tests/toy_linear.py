"""A family from outside with a kind of layer of its own, in one file: Qwen2 of which every other
layer has linear attention (Katharopoulos et al., 2020, arXiv 2006.16236) without normalisation.

A head gives a token the sum of (q k_s) v_s over the tokens s of its sequence up to itself. Weights
have the names and shapes of attention without biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.models.families import register
from megarl.models.families.base import Family
from megarl.models.families.params import PROJ, Param
from megarl.models.ops import ColumnParallel, H
from megarl.models.shapes import ModelConfig, Recurrent

ALL = "recurrent.width"


@dataclass(frozen=True, kw_only=True)
class LinearAttention(Recurrent):
    heads: int
    dim: int

    @property
    def width(self) -> int:
        return self.heads * self.dim

    @property
    def state(self) -> int:
        return self.heads * self.dim**2

    @property
    def products(self) -> int:
        return 2 * self.state

    def weights(self, hidden: int) -> int:
        return 4 * hidden * self.width

    def sizes_to_cut(self) -> dict[str, int]:
        return {"heads of linear attention": self.heads}

    def kept(self, tp: int) -> tuple[float, float]:
        return 0, 4 * self.width / tp


@dataclass(frozen=True, kw_only=True)
class Toy(Family):
    def read_recurrent(self, raw: Mapping[str, Any], source: str) -> LinearAttention:
        heads = raw["num_attention_heads"]
        layers = tuple(range(0, raw["num_hidden_layers"], 2))
        return LinearAttention(layers=layers, heads=heads, dim=raw["hidden_size"] // heads)

    def recurrent_spec(self, m: ModelConfig, attention: Any) -> Any:
        from megarl.parallel import mcore  # noqa: F401  before megatron

        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.module import MegatronModule
        from megatron.core.transformer.spec_utils import ModuleSpec

        class Module(MegatronModule):
            """Has the arguments of megatron-core's attention, and its outputs [s,b,H]."""

            def __init__(self, config: Any, *_: Any, **__: Any) -> None:
                super().__init__(config)
                kind = m.recurrent
                assert isinstance(kind, LinearAttention)
                self.dim = kind.dim
                how = dict(
                    config=config, init_method=config.init_method, bias=False, skip_bias_add=True
                )
                for name in "qkv":
                    linear = ColumnParallelLinear(
                        m.hidden_size, kind.width, gather_output=False, **how
                    )
                    self.add_module(f"linear_{name}", linear)
                self.linear_proj = RowParallelLinear(
                    kind.width, m.hidden_size, input_is_parallel=True, **how
                )

            def forward(
                self, hidden_states: Tensor, *_: Any, packed_seq_params: Any = None, **__: Any
            ) -> Any:
                parts = (self.get_submodule(f"linear_{x}")(hidden_states)[0] for x in "qkv")
                q, k, v = (x.unflatten(-1, (-1, self.dim)).flatten(0, 1) for x in parts)
                cu = packed_seq_params.cu_seqlens_q
                sequence = torch.bucketize(torch.arange(len(q)), cu, right=True)
                seen = (sequence[:, None] == sequence).tril()
                out = mixed(q[None], k[None], v[None], seen)[0]
                return self.linear_proj(out.unflatten(0, (-1, 1)))

        return ModuleSpec(Module)


def mixed(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Returns the outputs [B,S,heads*dim] of q, k, v [B,S,heads,dim]; `seen` [S,S] says which
    tokens s a token takes."""
    scores = torch.einsum("bthd,bshd->bhts", q, k) * seen
    return torch.einsum("bhts,bshd->bthd", scores, v).flatten(2)


def make_linear(hf: Any) -> None:
    """Gives every other layer of a transformers model of Qwen2 linear attention in its attention's
    weights, without their biases."""
    for layer in hf.model.layers[::2]:
        attention = layer.self_attn
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            linear.bias = None
        attention.forward = forward_of(attention)


def forward_of(attention: Any) -> Any:
    def forward(hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        linears = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (
            linear(hidden_states).unflatten(-1, (-1, attention.head_dim)) for linear in linears
        )
        length = q.shape[1]
        out = mixed(q, k, v, torch.ones(length, length).tril())
        return attention.o_proj(out), None

    return forward


def _linear(name: str) -> Param:
    return Param(
        f"self_attention.linear_{name}.weight",
        (f"self_attn.{name}_proj.weight",),
        ColumnParallel(ALL, H),
    )


TOY = Toy(
    name="toy_linear",
    architecture="ToyLinearForCausalLM",
    qkv_bias=True,
    recurrent_params=(*map(_linear, "qkv"), PROJ),
    ignored_fields=("attention_bias",),
)
register(TOY)
