"""Defines what megatron-core's layers lack: RMSNorm and multi-head latent attention with Hugging
Face's numerics, experts chosen by group, layers that also normalise their outputs, rotary
embeddings of layers with a window, and the output layer of a value model: one number per token, in
fp32.

T (packed) tokens, H hidden, E experts in equal groups, k experts per token.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megarl.models.rope import inv_freq
from megarl.models.shapes import ModelConfig, MoEShape, RopeScaling
from megarl.parallel import mcore  # noqa: F401  before megatron
from megarl.parallel.packing import Packed

from megatron.core import parallel_state as ps
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config as rotary_factor,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, mappings
from megatron.core.transformer import TransformerConfig, TransformerLayer, multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

# megatron-core 0.16 checks that its wrappers of Transformer Engine import, which they also do, as
# mocks, without Transformer Engine
if not isinstance(multi_latent_attention.TELinear, type):
    multi_latent_attention.HAVE_TE = False

# eps of the latents' norms: neither Hugging Face's nor DeepSeek's own read rms_norm_eps
LATENT_NORM_EPS = 1e-6

WithBias = tuple[Tensor, Tensor | None]


class RMSNorm(nn.RMSNorm):
    """Normalises in fp32, casts, then scales, as HF does.

    megatron-core's own torch norm refuses sequence parallelism, which needs only the attribute by
    which finalize_model_grads finds the weights whose gradients it sums over tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(
            hidden_size,
            eps=eps,
            dtype=config.params_dtype,
            device=None if config.use_cpu_initialization else torch.cuda.current_device(),
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Returns x [...,H] divided by its root mean square over H and multiplied with the weight
        [H] (Zhang and Sennrich, 2019, arXiv 1910.07467)."""
        if x.dtype == torch.float32 and x.device.type == "cpu":
            out: Tensor = _RMSNorm.apply(x, self.weight, self.eps)
            return out
        y = F.rms_norm(x.float(), self.normalized_shape, None, self.eps)
        return self.weight * y.to(x.dtype)


class ZeroCentredRMSNorm(RMSNorm):
    """Multiplies with 1 + weight, in fp32, and casts last, as HF does for Gemma and Qwen3-Next."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns x [...,H] divided by its root mean square over H, times 1 + the weight [H]."""
        weight = 1.0 + self.weight.float()
        if x.dtype == torch.float32 and x.device.type == "cpu":
            out: Tensor = _RMSNorm.apply(x, weight, self.eps)
            return out
        return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """w * x * r with r = 1 / sqrt(mean(x^2) + eps), x [..., H], r [..., 1].

    On a CPU autograd through F.rms_norm takes four times as long, all of it memory traffic.

        d/dw = sum over rows of g * x * r        d/dx = r * (g * w - x * r * mean(g * w * x * r))
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, r = ctx.saved_tensors
        normed = x * r
        product = g * normed
        d_weight = product.flatten(0, -2).sum(0)
        mean = (product @ weight).div_(x.shape[-1])[..., None]
        d_x = torch.mul(g, weight, out=product).addcmul_(normed, mean, value=-1).mul_(r)
        return d_x, d_weight, None


class WholeQueryNorm(RMSNorm):
    """Normalises a token's queries of all heads together, those of all tensor-parallel ranks. Every
    rank holds the whole weight; megatron-core adds up the parts of the gradient, as of all q and k
    norms."""

    heads_field = "num_attention_heads"

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        self.heads: int = getattr(config, self.heads_field)
        super().__init__(config, self.heads * hidden_size, eps)

    def forward(self, x: Tensor) -> Tensor:
        """Returns x [...,n,d], this rank's n heads, divided by the root mean square of all heads'
        numbers and multiplied with the weight's part."""
        group = ps.get_tensor_model_parallel_group()
        n, ranks = x.shape[-2], group.size()
        y, weight = x.float(), self.weight.view(self.heads, -1)
        squares = y.square().sum((-2, -1), keepdim=True)
        if ranks > 1:
            # the sum over ranks, and of its gradients, to which every rank's heads have a part
            squares = mappings.reduce_from_tensor_model_parallel_region(squares)
            squares = mappings.copy_to_tensor_model_parallel_region(squares)
            weight = weight.narrow(0, self.heads * group.rank() // ranks, n)
        # keys are repeated where there are more ranks than heads
        squares = squares / (ranks * n * x.shape[-1])
        return weight * (y * torch.rsqrt(squares + self.eps)).to(x.dtype)


class WholeKeyNorm(WholeQueryNorm):
    """Normalises a token's keys of all heads together; see WholeQueryNorm."""

    heads_field = "num_query_groups"


def normalise_whole_heads(spec: Any) -> None:
    """Has every attention of megatron-core's `spec` normalise q and k over all heads."""
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm, attention.k_layernorm = WholeQueryNorm, WholeKeyNorm


class GroupLimited:
    """Chooses a token's experts from its best groups alone. megatron-core judges a group by its
    best k // (groups a token may go to) experts; DeepSeek-V2 judges by the best one (2024, section
    2.2.2), V3 by the best two (2024, section 2.1.2)."""

    def __init__(self, shape: MoEShape) -> None:
        self.shape = shape

    def get_replay_topk(self, scores: Tensor, topk: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Returns (scores of the chosen experts, their numbers), both [T,k], for scores [T,E]."""
        shape = self.shape
        grouped = scores.unflatten(1, (shape.groups, -1))
        of_group = grouped.topk(shape.group_best, dim=-1).values.sum(-1)
        open_ = of_group.topk(shape.top_groups, dim=-1).indices
        closed = of_group.new_ones(of_group.shape).scatter(1, open_, 0.0).bool()
        masked = grouped.masked_fill(closed[..., None], -float("inf")).flatten(1)
        return masked.topk(topk, dim=1)


class SandwichLayer(TransformerLayer):
    """Also normalises what attention and MLP add to the residual stream, as GLM-4 does: x +
    norm(attention(norm(x))), then the same with the MLP. `norm`: the class of these two norms, with
    the arguments of megatron-core's."""

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


def sandwich(spec: Any) -> None:
    """Makes every layer of megatron-core's `spec` a SandwichLayer."""
    for layer in spec.layer_specs:
        layer.module, layer.params = SandwichLayer, {"norm": spec.layer_norm}


def normalise_no_inputs(spec: Any) -> None:
    """Takes the norms before attention and MLP out of the dense layers of megatron-core's `spec`.
    Transformer Engine's are a part of the linear layers behind them."""
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
        mlp = getattr(parts.mlp, "keywords", None) or vars(parts.mlp)  # newer ones are partial
        for linears, name in (
            (parts.self_attention.submodules, "linear_qkv"),
            (mlp["submodules"], "linear_fc1"),
        ):
            if getattr(linears, name) is not ColumnParallelLinear:
                from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

                setattr(linears, name, TEColumnParallelLinear)


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


def scale_embeddings(chunk: GPTModel, factor: float) -> None:
    """Multiplies the embeddings of tokens by `factor`, rounded to their dtype as HF does."""
    if chunk.pre_process:
        rounded = float(torch.tensor(factor).to(chunk.config.params_dtype))
        chunk.embedding.register_forward_hook(lambda _module, _args, out: out * rounded)


def tell_factor(config: Any, scaling: RopeScaling | None) -> None:
    """Sets what megatron-core multiplies cos and sin with, in a config without latent attention:
    0.1 mscale ln(scaling) + 1, of fields that TransformerConfig does not declare. Its fused kernels
    have no such factor."""
    factor = 1.0 if scaling is None else scaling.rotary_factor
    if factor != rotary_factor(config):
        config.yarn_rotary_scaling_factor, config.yarn_mscale_all_dim = math.exp(10), 0.0
        config.yarn_mscale = factor - 1.0
        config.apply_rope_fusion = False


def rotate_windows(chunk: GPTModel, model: ModelConfig) -> None:
    """Gives the layers with a sliding window the rotary embedding of `model.window_rope`, each as
    a part of its attention."""
    rotary = copy.copy(chunk.rotary_pos_emb)
    rotary.inv_freq = inv_freq(model, window=True).to(rotary.inv_freq.device)
    assert model.window_rope is not None
    config = copy.copy(chunk.config)
    tell_factor(config, model.window_rope[1])
    for layer in chunk.decoder.layers:
        if layer.layer_number - 1 in model.attention.window_layers:
            if rotary_factor(config) != rotary_factor(chunk.config):
                layer.self_attention.config = config  # the second is what newer ones read
                layer.self_attention._yarn_concentration_factor = rotary_factor(config)
            layer.self_attention.rotary_pos_emb = rotary
            layer.self_attention.register_forward_pre_hook(_rotate_by_own, with_kwargs=True)


def _rotate_by_own(attention: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Passes the attention the rotary angles of its own embedding instead of the model's."""
    rotary, packed = attention.rotary_pos_emb, kwargs["packed_seq_params"]
    length = rotary.get_rotary_seq_len(None, None, args[0], attention.config, packed)
    thd = packed is not None and packed.qkv_format == "thd"
    return args, {**kwargs, "rotary_pos_emb": rotary(length, packed_seq=thd)}


def add_bias_out_of_place(chunk: GPTModel) -> None:
    """Lets experts with biases train: megatron-core adds an expert's bias in place to what an
    autograd function returned (mlp.py, 0.16 and 0.19), which torch refuses. They get a copy."""
    for module in chunk.modules():
        if isinstance(module, SequentialMLP):
            for expert in module.local_experts:
                expert.linear_fc2.register_forward_hook(
                    lambda _m, _a, out: (out[0].clone(), out[1])
                )


def settle_mla(chunk: GPTModel) -> None:
    """Sets what MLASelfAttention's constructor takes no argument for: the eps of the latents'
    norms, and projections to a latent that are whole on every rank."""
    for module in chunk.modules():
        if isinstance(module, MLASelfAttention):
            _settle(module)


def _settle(attention: MLASelfAttention) -> None:
    for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
        module: Any = getattr(attention, name, None)
        if hasattr(module, "eps"):  # the norm, or Transformer Engine's linear with a norm inside
            module.eps = LATENT_NORM_EPS
    for name in ("linear_q_down_proj", "linear_kv_down_proj"):
        linear = getattr(attention, name, None)
        if isinstance(linear, ColumnParallelLinear):
            whole = WholeLinear(linear.config, linear.input_size, linear.output_size)
            setattr(attention, name, whole)


class WholeLinear(nn.Module):
    """Maps [...,cols] to [...,rows] on this rank's own tokens, whole on every tensor-parallel rank.

    Transformer Engine's spec has such projections to a latent. The local spec cuts them, for which
    every rank needs all tokens' hidden states; a latent is a fraction of their size.
    """

    def __init__(self, config: Any, cols: int, rows: int) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        empty = torch.empty(rows, cols, dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(empty)
        # its gradients are parts, to be summed over ranks as those of the norms are
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Returns (x times the weight transposed, no bias), as megatron-core's linear layers do."""
        return F.linear(x, self.weight), None


class ValueHead(torch.nn.Module):
    """Maps hidden states [T,1,H] to values [T,1,1]. Every tensor-parallel rank holds the whole
    head.

    Under sequence parallelism a rank scores its own tokens and the scores are gathered (H times
    less than gathering hidden states); the head's gradients are then parts, which
    finalize_model_grads adds up because of the same mark as the norms'. Otherwise all ranks compute
    the same. Memory: an fp32 copy of the rank's hidden states.
    """

    def __init__(
        self, config: TransformerConfig, *, bias: bool, tp_group: dist.ProcessGroup
    ) -> None:
        super().__init__()
        self.sequence_parallel, self.tp_group = config.sequence_parallel, tp_group
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        kw: dict[str, Any] = dict(dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, **kw))
        self.bias = torch.nn.Parameter(torch.empty(1, **kw)) if bias else None
        for param in self.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._at: torch.Tensor | None = None

    def prepare(self, packed: Packed, outputs: Sequence[str], temperature: float) -> None:
        """Takes from what comes in the next forward pass which tokens are asked about, `at` [N] or
        None for all: values need no labels and no temperature."""
        self._at = packed.at

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Returns (values [T,1,1] in fp32, no bias) of hidden states [T,1,H]; under sequence
        parallelism `hidden` has this rank's tokens, the values those of all. Of places
        there are [N,1,1]. The other arguments are ignored."""
        at, self._at = self._at, None
        bias = None if self.bias is None else self.bias.float()
        values = F.linear(hidden.float(), self.weight.float(), bias)
        if self.sequence_parallel:  # backward hands every rank its own tokens' part
            values = mappings.gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.tp_group
            )
        if at is not None:
            values = values.index_select(0, at)
        return values, None

    def split(
        self, out: torch.Tensor, outputs: Sequence[str], packed: Packed
    ) -> dict[str, torch.Tensor]:
        """Returns the values [T] of `out` [T,1] under each name of `outputs`. `packed` is for the
        LM head's outputs."""
        return dict.fromkeys(outputs, out[:, 0])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Returns megatron-core's sharded tensors of weight and bias, which every rank holds whole.
        Raises KeyError where `metadata` lacks "dp_cp_group"."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
