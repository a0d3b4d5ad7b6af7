"""A training step and a forward pass, whose waits for a GPU are counted (tests/waits.py), and how
many they have."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

import megarl.parallel.mcore  # noqa: F401  before megatron
from megarl.api.batch import Batch
from tests.dist import engine_jobs
from tests.dist.engine_jobs import Parallel, Tensors, make_engine
from tests.waits import Place, pretend_device

from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

# ---- what all micro-batches of a pass wait for together, with the reason
SUMS = {"megarl/engine/passes.py:_add_up": 1}  # the loss and its statistics, in one transfer
NORM = {"megatron/core/optimizer/clip_grads.py:get_grad_norm_fp32": 1}  # is the update made?
LOADS = {"megarl/engine/routing.py:metrics": 1}  # experts' loads, flips, losses, in one transfer
# ranks compare the request and what all of them hold: a hash goes to the device and back
RANKS = {"megarl/engine/inputs.py:_same_everywhere": 2}
RESULT = "megarl/engine/micro_batch.py:collect"  # one a kind of output

# ---- what megatron-core waits for, in a layer with experts and a micro-batch
SANCTIONED = {
    # how many tokens go to which rank and expert: shapes of what follows
    "megatron/core/transformer/moe/token_dispatcher.py:_maybe_dtoh_and_synchronize": 1,
    # the tokens of each expert, picked by a mask; fused by Transformer Engine
    "megatron/core/transformer/moe/moe_utils.py:permute": 2,
}


@dataclass
class Pass:
    """`waits` of a pass over so many micro-batches of a rank."""

    waits: Counter[Place] = field(default_factory=Counter)
    micro_batches: int = 0


def loss(outputs: Tensors, b: Tensors) -> tuple[torch.Tensor, dict[str, Any]]:
    """Returns a loss with statistics on the device, on the host and as numbers."""
    value, stats = engine_jobs.loss_fn(outputs, b)
    return value, {**stats, "host": (torch.tensor(1.0), 1.0)}


def passes(
    path: str, parallel: Parallel, b: Tensors, outputs: tuple[str, ...] = ("logprobs",), **over: Any
) -> dict[str, Pass]:
    """Returns the waits of a later forward pass for `outputs`, and of a later training step."""
    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # it is of an earlier engine
    with pretend_device() as device:
        engine = make_engine(path, parallel, **over)
        calls: list[None] = []
        engine.state.models[0].register_forward_pre_hook(lambda *_: calls.append(None))
        found: dict[str, Pass] = {}

        def take(verb: str) -> None:
            found[verb] = Pass(device.take(), len(calls))
            calls.clear()

        for _ in range(2):  # the first makes what stays
            take("before")
            engine.forward(Batch.from_padded(b), outputs=outputs)
            take("forward")
            engine.train_batch(
                Batch.from_padded(b), loss, engine_jobs.weight_fn, outputs=("logprobs", "entropy")
            )
            take("train")
        engine.destroy()
    del found["before"]
    return found
