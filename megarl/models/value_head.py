"""The output layer of a value model: one number per token, in fp32.

T packed tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megarl.parallel import mcore  # noqa: F401  before megatron
from megarl.parallel.packing import Packed

from megatron.core.tensor_parallel import mappings  # isort: skip
from megatron.core.transformer import TransformerConfig  # isort: skip
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # isort: skip


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
