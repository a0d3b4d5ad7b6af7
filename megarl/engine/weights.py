"""Moves an engine's weights in and out: files, generation servers, full tensors by HF name.

Everything here is collective, in the scope of the engine's groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from megarl.api.records import SaveLoadMeta
from megarl.ckpt.hf import save_hf
from megarl.ckpt.peft import load_peft, save_peft
from megarl.engine import average, checkpoint, optimizer
from megarl.engine.setup import EngineState, head_seed, load_base
from megarl.models.gather import BucketGatherer, plan_buckets
from megarl.models.tensor_hash import weight_hashes
from megarl.parallel import mcore
from megarl.utils.files import Fingerprint
from megarl.weight_sync.sender import WeightSender
from megarl.weight_sync.transports import WeightSource

_STATE_BUCKET_BYTES = 256 << 20


def save(state: EngineState, meta: SaveLoadMeta, version: int) -> None:
    """Writes to meta.path in meta.weight_format: a training checkpoint, adapters, or an HF
    directory."""
    optimizer.gather_params(state.chunks)
    base = meta.base_model_path or state.config.path
    if meta.weight_format == "dist":
        checkpoint.save(state, meta.path, meta.with_optim, version)
    elif meta.weight_format == "peft":
        assert state.adapters is not None  # check_meta has seen to it
        save_peft(
            meta.path,
            state.adapters,
            state.layout,
            state.groups.rank,
            base_model_path=base,
            tokenizer=meta.tokenizer,
        )
    else:
        save_hf(
            meta.path,
            state.table,
            state.layout,
            state.groups.rank,
            state.whole_weights(),
            base_model_path=base,
            tokenizer=meta.tokenizer,
        )
    state.groups.barrier()


def load(state: EngineState, meta: SaveLoadMeta) -> int | None:
    """Loads meta.path; returns the version that a training state was saved with, None for weights
    alone."""
    version = None
    if meta.weight_format == "dist":
        found = checkpoint.load(state, meta.path, meta.with_optim)
        version = found["version"] if meta.with_optim else None
    elif meta.weight_format == "peft":
        assert state.adapters is not None
        load_peft(meta.path, state.adapters)
    else:
        load_base(
            meta.path, state.table, state.groups, state.params, head_seed(state.config, state.seed)
        )
        average.end(state)
        if state.adapters is not None:  # whole weights come without: these start anew
            state.adapters.reset(state.seed)
    if state.optimizer is not None and not meta.with_optim:
        optimizer.reload_main_params(state.optimizer)
    state.groups.barrier()
    return version


def sender(state: EngineState) -> WeightSender:
    """Makes the sender of this engine's weights to servers."""
    source = WeightSource(
        state.table,
        state.layout,
        state.groups.rank,
        state.whole_weights(),
        state.groups.world,
        dtype=state.dtype if state.adapters else None,
        adapters=state.adapters,
        base_model_path=state.config.path,
    )
    return WeightSender(source)


def fingerprints(state: EngineState) -> dict[str, Fingerprint]:
    """Returns the fingerprints of the trained weights; see MegatronEngine.fingerprints."""
    optimizer.gather_params(state.chunks)
    table = state.adapters.table if state.adapters else state.table.trained
    found = weight_hashes(table, state.groups.rank, state.params, mcore.device())
    for per_tensor in found:
        dist.all_reduce(per_tensor, group=state.groups.world)
    hashes, squares = (per_tensor.tolist() for per_tensor in found)
    kind = str(state.dtype).removeprefix("torch.")
    return {
        tensor.name: Fingerprint(
            f"{number % (1 << 64):016x}", math.sqrt(square), shape=f"{kind} {list(tensor.shape)}"
        )
        for tensor, number, square in zip(table.tensors, hashes, squares, strict=True)
    }


def hf_state(
    state: EngineState, grads: bool, scope: Callable[[], AbstractContextManager[None]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields full tensors by HF name; see MegatronEngine.hf_state. `scope` is left while the caller
    has a bucket's tensors. Raises ValueError for `grads` without an optimizer."""
    values, table, dtype = state.whole_weights(), state.table, state.dtype
    if grads:
        if state.optimizer is None:
            raise ValueError("this engine has no optimizer, so it keeps no gradients")
        table, dtype = state.adapters.table if state.adapters else table.trained, torch.float32
        trained = {n: p for n, p in state.params.items() if p.requires_grad}
        values = {n: p.main_grad for n, p in trained.items()}  # type: ignore[attr-defined]
    buckets = plan_buckets(table, dtype, _STATE_BUCKET_BYTES)
    gatherer = BucketGatherer(
        table, state.layout, state.groups.rank, values, buckets, device=mcore.device()
    )
    for bucket in buckets:
        with scope():
            optimizer.gather_params(state.chunks)
            flat = gatherer.gather(bucket)
        if flat is not None:
            yield from bucket.views(flat)
