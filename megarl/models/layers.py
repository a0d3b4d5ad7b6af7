"""RMSNorm for megatron-core's local layer spec, with Hugging Face's numerics."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
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
