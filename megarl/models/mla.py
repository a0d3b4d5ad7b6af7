"""Makes megatron-core's multi-head latent attention equal to Hugging Face's DeepSeek."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.parallel import mcore  # noqa: F401  before megatron

from megatron.core.models.gpt import GPTModel  # isort: skip
from megatron.core.tensor_parallel import ColumnParallelLinear  # isort: skip
from megatron.core.transformer import multi_latent_attention  # isort: skip
from megatron.core.transformer.multi_latent_attention import MLASelfAttention  # isort: skip

# megatron-core 0.16 checks that its wrappers of Transformer Engine import, which they also do, as
# mocks, without Transformer Engine
if not isinstance(multi_latent_attention.TELinear, type):
    multi_latent_attention.HAVE_TE = False

# eps of the latents' norms: neither Hugging Face's nor DeepSeek's own read rms_norm_eps
LATENT_NORM_EPS = 1e-6


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


class WholeLinear(torch.nn.Module):
    """Maps [...,cols] to [...,rows] on this rank's own tokens, whole on every tensor-parallel rank.

    Transformer Engine's spec has such projections to a latent. The local spec cuts them, for which
    every rank needs all tokens' hidden states; a latent is a fraction of their size.
    """

    def __init__(self, config: Any, cols: int, rows: int) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        empty = torch.empty(rows, cols, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(empty)
        # its gradients are parts, to be summed over ranks as those of the norms are
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Returns (x times the weight transposed, no bias), as megatron-core's linear layers do."""
        return F.linear(x, self.weight), None
