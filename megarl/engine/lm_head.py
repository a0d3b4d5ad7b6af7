"""LMHead is the output layer that answers with per-token numbers instead of logits.

It takes the place of GPTModel.output_layer and keeps its parameter, so that the data-parallel
wrapper's gradient hooks, the shared embedding and checkpoints see what they saw before. Before each
forward pass the engine tells it the labels, the temperature and the wanted outputs.

T packed tokens, H hidden, V vocabulary, K numbers per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megarl.api.engine import GIVEN, OUTPUTS
from megarl.parallel import mcore  # noqa: F401  before megatron
from megarl.parallel.packing import Packed
from megarl.parallel.vocab_parallel import VocabShard, columns, gathered_logits, token_outputs

from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class LMHead(torch.nn.Module):
    """Maps [T,1,H] hidden states to [T,1,K] numbers; `split` takes the K numbers apart by name."""

    def __init__(
        self,
        output_layer: Any,
        *,
        vocab_size: int,
        tp_group: dist.ProcessGroup,
        sequence_parallel: bool,
        chunk_tokens: int,
        keep_bytes: int = 0,
        topk: int = 1,
    ) -> None:
        """Takes over the weight of `output_layer`. See `token_outputs` for the last three
        arguments."""
        super().__init__()
        # None where the embedding's weight is passed in (tied, one pipeline stage)
        self.weight = output_layer.weight
        self.vocab_size, self.tp_group = vocab_size, tp_group
        self.sequence_parallel = sequence_parallel
        self.chunk_tokens, self.keep_bytes = chunk_tokens, keep_bytes
        self.topk = topk
        self._job: tuple[Packed, Sequence[str], float] | None = None
        self._used: set[str] = set()  # outputs of the last pass whose gradients came back

    def prepare(self, packed: Packed, outputs: Sequence[str], temperature: float) -> None:
        """Says what the next forward pass computes: `outputs` about the labels [T] of `packed`, and
        those of GIVEN about its given ids [T,n], at `temperature`. With places [N] there are N
        labels and given ids instead, each after the token at that place, and N answers."""
        self._job = packed, outputs, temperature

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Returns ([T,1,K], None) of what `prepare` says, from hidden states [T,1,H], or
        [T/tp,1,H] under sequence parallelism; of places, [N,1,K]. `weight` [V/tp,H]: that of a tied
        embedding."""
        assert self._job is not None, "prepare() comes before every forward pass"
        (packed, outputs, temperature), self._job = self._job, None
        self._used = set()
        weight = self.weight if weight is None else weight
        assert weight is not None
        if self.sequence_parallel:  # [T/tp,1,H] -> [T,1,H]; backward sums and scatters
            hidden = mappings.gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        else:  # backward sums the shards' parts
            hidden = mappings.copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)
        if packed.at is not None:
            hidden = hidden.index_select(0, packed.at)
        rows = weight.shape[0]
        shard = VocabShard(
            start=self.tp_group.rank() * rows,
            rows=rows,
            vocab_size=self.vocab_size,
            group=self.tp_group,
        )
        parts, names = [], [name for name in outputs if name != "logits"]
        flat = hidden.flatten(0, 1)
        if names:
            parts.append(
                token_outputs(
                    flat,
                    weight,
                    packed.labels,
                    shard=shard,
                    outputs=names,
                    temperature=temperature,
                    chunk_tokens=self.chunk_tokens,
                    keep_bytes=self.keep_bytes,
                    topk=self.topk,
                    given=packed.given,
                    used=self._used,
                )
            )
        if "logits" in outputs:
            with torch.no_grad():
                parts.append(gathered_logits(flat, weight, shard=shard, temperature=temperature))
        out = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
        return out[:, None], None

    def split(
        self, out: torch.Tensor, outputs: Sequence[str], packed: Packed
    ) -> dict[str, torch.Tensor]:
        """Splits [T,K] about `packed` into {name: [T]}, [T,k] for the top k, [T,n] for n given ids,
        [T,V] for "logits"."""
        given = 0 if packed.given is None else packed.given.shape[-1]
        order = sorted(outputs, key="logits".__eq__)  # they are last
        at = columns(order, self.topk, given, self.vocab_size)
        by_name = {name: out[:, where] for name, where in at.items()}
        for name, x in by_name.items():
            if not OUTPUTS[name].width:
                by_name[name] = x[:, 0]
            elif name == "topk_ids":
                by_name[name] = x.long()
        if "entropy" in by_name and out.requires_grad:  # what is only watched costs no gradient
            used = self._used
            by_name["entropy"].register_hook(lambda grad: used.add("entropy"))
        return {name: by_name[name] for name in outputs}

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Returns the weight's part of a checkpoint, like megatron-core's ColumnParallelLinear."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


def check_outputs(
    outputs: Sequence[str], head: str = "lm", *, backward: bool = False, to_loss: bool = True
) -> tuple[str, ...]:
    """Returns the names of the outputs. Raises ValueError naming one that does not exist, that
    `head` cannot compute, that has no gradient to train by, or (of GIVEN) that only a loss gets."""
    names = tuple(outputs)
    if not names or len(set(names)) != len(names):
        raise ValueError(f"outputs={names}: name at least one output, each once")
    for name in names:
        if name not in OUTPUTS or OUTPUTS[name].head != head:
            problem = "needs another head" if name in OUTPUTS else "does not exist"
            has = tuple(o for o, output in OUTPUTS.items() if output.head == head)
            raise ValueError(
                f"outputs={names}: {name!r} {problem}; this engine (head={head}) has {has}"
            )
        if backward and not OUTPUTS[name].trains:
            raise ValueError(f"outputs={names}: {name!r} has no gradient; take it from forward()")
        if name in GIVEN and not to_loss:
            raise ValueError(
                f"outputs={names}: {name!r} is for the losses of train_batch, eval_batch"
            )
    return names
