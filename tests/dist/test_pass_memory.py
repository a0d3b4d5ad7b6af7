"""After a pass, no tensor of the pass is left, whatever is recomputed and whoever sends tokens to
their experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.dist.engine_jobs import SP, batch, loss_fn, make_engine, save_model, state, weight_fn

SELECTIVE = dict(recompute_granularity="selective")
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": dict(recompute_granularity="full"),
    "selective": SELECTIVE,
    "moe": SELECTIVE | dict(options={"recompute_modules": ["moe"]}),
    "overlap": dict(options={"moe_shared_expert_overlap": True}),
}


def storages(values: Any) -> dict[int, torch.UntypedStorage]:
    tensors = [x for x in tree_leaves(values) if torch.is_tensor(x)]
    return {x.untyped_storage()._cdata: x.untyped_storage() for x in tensors}


class Allocations(TorchDispatchMode):
    """Records every storage that is allocated inside, in autograd's graphs too."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        there = storages((args, kwargs))
        out = func(*args, **(kwargs or {}))
        for key, storage in storages(out).items():
            if key not in there:  # neither a view of an argument nor written in place
                self.made[key] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive(self) -> int:
        """Returns the bytes of the storages that still exist."""
        return sum(size for ref, size in self.made.values() if not ref.expired())


def leftovers(path: str, parallel: dict[str, Any], dispatcher: str, over: dict[str, Any]) -> Any:
    """Returns for a second step: bytes allocated, bytes left, gradients; and the bytes left and the
    gradients if dispatchers keep their tensors."""
    from megarl.parallel import mcore

    engine = make_engine(path, parallel, optimizer=dict(distributed=False), **over)
    if dispatcher == "allgather":
        replace_dispatchers(engine)

    def step() -> tuple[int, int, dict[str, torch.Tensor]]:
        with Allocations() as seen:
            engine.backward_batch(batch(), loss_fn, weight_fn, outputs=("logprobs", "entropy"))
        return sum(size for _, size in seen.made.values()), seen.alive(), state(engine, grads=True)

    engine.train_batch(batch(), loss_fn, weight_fn, outputs=("logprobs", "entropy"))
    allocated, left, grads = step()
    with mock.patch.object(mcore, "drop_pass", lambda _: None):
        _, kept, same = step()
    engine.destroy()
    return allocated, left, grads, kept, same


def replace_dispatchers(engine: Any) -> None:
    """Gives every layer of experts megatron-core's dispatcher that gathers all tokens."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

    groups = engine.state.models[0].pg_collection
    for layer in (m for model in engine.state.models for m in model.modules()):
        if isinstance(layer, MoELayer):
            layer.token_dispatcher = MoEAllGatherTokenDispatcher(
                layer.num_local_experts, layer.local_expert_indices, layer.config, groups
            )


@pytest.mark.parametrize(
    ("n", "family", "parallel", "dispatcher", "way"),
    [
        *((1, "deepseek_v3", {}, "alltoall", way) for way in WAYS),
        (1, "deepseek_v3", {}, "allgather", "none"),
        (1, "deepseek_v3", {}, "allgather", "full"),
        (1, "deepseek_v3", {}, "allgather", "moe"),
        (2, "qwen2_moe", dict(**SP, ep=2), "allgather", "full"),
        (2, "qwen2_moe", dict(**SP, ep=2), "alltoall", "full"),
        (1, "gpt_oss", {}, "alltoall", "full"),
    ],
)
def test_a_pass_leaves_nothing(
    n: int,
    family: str,
    parallel: dict[str, Any],
    dispatcher: str,
    way: str,
    worlds: Any,
    models: Path,
) -> None:
    path = save_model(models, family, tie=False)
    for result in worlds(n).run(leftovers, path, parallel, dispatcher, WAYS[way]):
        allocated, left, grads, kept, same = result
        assert allocated > 1_000_000
        assert left == 0 < kept
        assert all(torch.equal(grads[name], same[name]) for name in same)
