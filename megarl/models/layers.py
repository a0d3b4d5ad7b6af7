"""RMSNorm for megatron-core's local layer spec, with Hugging Face's numerics."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """Normalises in fp32, casts, then scales, as HF does.

    megatron-core's own torch norm refuses sequence parallelism. All that needs is the attribute by
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
        y = F.rms_norm(x.float(), self.normalized_shape, None, self.eps)
        return self.weight * y.to(x.dtype)
