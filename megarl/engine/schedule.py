"""One pass of a batch through megatron-core's pipeline schedules.

Scaling. The step is the gradient of sum(loss_sum) / W over all sequences. megatron-core's two-value
loss path multiplies a micro-batch's loss by CP and divides it by M micro-batches; the data-parallel
wrapper averages gradients over DP * CP ranks. So a micro-batch's loss is loss_sum * M * DP / W.
(Its three-value path keeps weights as integers and would truncate fractional ones.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megarl.api.batch import Padded, Tokens
from megarl.api.engine import LossFn
from megarl.api.failures import attempt, from_every_rank
from megarl.engine.activations import offload_activations
from megarl.engine.lm_head import HeadJob
from megarl.engine.micro_batch import Frame, MicroBatch
from megarl.engine.routing import ROUTED, Routing
from megarl.models.names import unwrap
from megarl.parallel import mcore
from megarl.parallel.exchange import world_comm
from megarl.parallel.groups import ProcessGroups
from megarl.parallel.packing import unpack
from megarl.parallel.pipeline_shapes import known_shapes
from megarl.parallel.vocab_parallel import TOP_IDS

from megatron.core import parallel_state as ps  # isort: skip
from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip
from megatron.core.pipeline_parallel.schedules import get_schedule_table  # isort: skip
from megatron.core.tensor_parallel import mappings  # isort: skip

Sums = dict[str, tuple[Any, Any]]  # name -> (sum, weight); numbers or scalar tensors


@dataclass(kw_only=True)
class Pass:
    """Says what a pass computes, and collects its results on the ranks of the last pipeline stage.

    With `loss_fn` its sums are collected in `sums`, one entry a micro-batch; the outputs `keep` of
    every micro-batch in `kept`, in the order of the micro-batches. Every context-parallel rank
    computes the loss of whole sequences, and sends back the gradient of its share. What `loss_fn`
    raises is kept in `error`, for `reduce_sums` to tell all ranks: the pass goes on to its end
    without losses, because the other ranks would wait for this one.
    """

    outputs: tuple[str, ...]
    temperature: float
    cp_group: dist.ProcessGroup
    loss_fn: LossFn | None = None
    loss_scale: float = 1.0
    routing: Routing | None = None
    offload: bool = False  # activations to host memory
    keep: tuple[str, ...] = ()
    sums: list[Sums] = field(default_factory=list)
    kept: list[Padded] = field(default_factory=list)
    error: Exception | None = None


def run(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    job: Pass,
    *,
    backward: bool,
) -> None:
    """Runs all micro-batches through all chunks; with `backward`, gradients go into the wrappers'
    buffers."""
    iterators: list[Iterator[MicroBatch]] = [iter(micro_batches) for _ in chunks]
    interleaved = len(chunks) > 1
    lengths = [len(mb.packed.input_ids) for mb in micro_batches]
    with known_shapes(*_coming(lengths, len(chunks), unwrap(chunks[0]).config)):
        get_forward_backward_func()(
            forward_step_func=partial(_forward_step, job),
            data_iterator=iterators if interleaved else iterators[0],
            model=list(chunks) if interleaved else chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=max(lengths),
            micro_batch_size=1,
            forward_only=not backward,
        )


def _coming(
    lengths: Sequence[int], chunks: int, config: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the shapes of what comes from the stage before and from the stage after, in order.
    lengths: of the micro-batches, packed tokens of this context-parallel rank."""
    share = config.tensor_model_parallel_size if config.sequence_parallel else 1
    shapes = [[n // share, 1, config.hidden_size] for n in lengths]
    first = ps.is_pipeline_first_stage(ignore_virtual=True)
    last = ps.is_pipeline_last_stage(ignore_virtual=True)
    order = [(i, 0) for i in range(len(lengths))]
    if chunks > 1:
        group = config.microbatch_group_size_per_vp_stage
        order = get_schedule_table(len(lengths), chunks, group)
    # backward goes through the chunks in reverse: the first of each group is the last chunk
    return (
        [shapes[i] for i, chunk in order if not (first and chunk == 0)],
        [shapes[i] for i, chunk in order if not (last and chunk == 0)],
    )


def _forward_step(job: Pass, micro_batches: Iterator[MicroBatch], chunk: Any) -> tuple[Any, Any]:
    mb = next(micro_batches)
    model: Any = unwrap(chunk)
    if job.routing is not None:
        job.routing.prepare(model, mb)
    if model.post_process:
        model.output_layer.prepare(
            HeadJob(
                labels=mb.packed.labels,
                outputs=job.outputs,
                temperature=job.temperature,
                given=mb.packed.given,
                at=mb.packed.at,
            )
        )
    ids, positions = mb.packed.input_ids[None], mb.packed.position_ids[None]
    with offload_activations(job.offload):
        out = chunk(ids, positions, None, packed_seq_params=mb.params())
    return out, partial(_finish, job, mb, getattr(model, "output_layer", None))


def _finish(job: Pass, mb: MicroBatch, head: Any, out: torch.Tensor) -> tuple[Any, Any]:
    """Turns the last stage's [1,T/cp,K] into the micro-batch's (scaled loss, None)."""
    whole = mappings.gather_from_sequence_parallel_region(  # [T,K]; backward takes the rank's slice
        out[0], tensor_parallel_output_grad=False, group=job.cp_group
    )
    given = 0 if mb.packed.given is None else mb.packed.given.shape[-1]
    per_token = head.split(whole, job.outputs, given)
    outputs = {name: unpack(values, mb.packed) for name, values in per_token.items()}
    nothing = out.sum() * 0.0  # keeps the graph alive where no loss depends on the outputs
    if not mb.rows or job.error is not None:
        return nothing, None
    if job.keep:
        job.kept.append({name: outputs[name].detach() for name in job.keep})
    if job.loss_fn is None:
        return nothing, None
    loss_sum, job.error = attempt(_loss, job, job.loss_fn, mb, outputs)
    return nothing if loss_sum is None else loss_sum * job.loss_scale + nothing, None


def _loss(job: Pass, loss_fn: LossFn, mb: MicroBatch, outputs: Padded) -> torch.Tensor:
    """Returns the micro-batch's loss_sum, and keeps its sums; that of the loss weighs 1 where it
    has a gradient. Raises ValueError for what is none,
    or stats that the engine cannot take."""
    padded = mb.padded([k for k in mb.source if k != ROUTED])
    batch = {k: v.to(mcore.device(), non_blocking=True) for k, v in padded.items()}
    loss_sum, stats = loss_fn(outputs, batch)
    if loss_sum.ndim:
        raise ValueError(
            f"loss_fn gave a loss of shape {tuple(loss_sum.shape)}: it must be a sum, a scalar"
        )
    if "loss" in stats:
        raise ValueError("loss_fn's stats must not contain 'loss': the engine reports it")
    job.sums.append({"loss": (loss_sum.detach(), float(loss_sum.requires_grad)), **stats})
    return loss_sum


def reduce_sums(job: Pass, groups: ProcessGroups) -> dict[str, tuple[float, float]]:
    """Returns the sums over all micro-batches and data-parallel ranks, on every rank. Collective.
    Where the loss failed on one rank, all raise an error that names the rank.

    Numbers are added in rank order, in fp64.
    """
    mine, error = attempt(_add_up, job.sums if speaks(groups) else [])
    error, job.error = job.error or error, None  # an error holds the frames that hold the job
    try:
        said = from_every_rank("loss_fn", mine, error, world_comm())
    finally:
        del error
    total: dict[str, tuple[float, float]] = {}
    for sums in said:
        _accumulate(total, sums)
    return total


def speaks(groups: ProcessGroups) -> bool:
    """Returns whether this rank reports for its data-parallel replica: the last stage's first
    tensor- and context-parallel rank does."""
    c = groups.coords
    return groups.is_last_stage and c.tp == 0 and c.cp == 0


def _add_up(parts: Sequence[Sums]) -> dict[str, tuple[float, float]]:
    """Returns the sums over micro-batches. All numbers leave the device in one transfer."""
    flat = [x for sums in parts for pair in sums.values() for x in pair]
    tensors = [x.detach().double().reshape(()) for x in flat if torch.is_tensor(x)]
    device = mcore.device()
    on_host = iter(torch.stack([t.to(device) for t in tensors]).tolist() if tensors else [])
    numbers = iter([next(on_host) if torch.is_tensor(x) else float(x) for x in flat])
    total: dict[str, tuple[float, float]] = {}
    for sums in parts:
        _accumulate(total, {name: (next(numbers), next(numbers)) for name in sums})
    return total


def _accumulate(
    total: dict[str, tuple[float, float]], sums: dict[str, tuple[float, float]]
) -> None:
    for name, (value, weight) in sums.items():
        v, w = total.get(name, (0.0, 0.0))
        total[name] = (v + value, w + weight)


def collect_outputs(
    job: Pass,
    micro_batches: Sequence[MicroBatch],
    frame: Frame,
    groups: ProcessGroups,
    extra: dict[str, int],
) -> dict[str, Tokens]:
    """Returns what was kept, one number a token (or extra[name] numbers), of the tokens of `frame`
    on the ranks it says. Every rank of the last stage has them; for the rest of the world, each
    number has one owner. Collective."""
    filled = [mb for mb in micro_batches if mb.rows]
    result = {}
    for name in job.keep:
        inner = [extra[name]] if name in extra else []
        full = frame.zeros(inner, torch.long if name == TOP_IDS else torch.float32)
        if speaks(groups) if frame.everyone else groups.is_last_stage:
            for mb, outputs in zip(filled, job.kept, strict=True):
                frame.put(full, mb, outputs[name])
        if frame.everyone and groups.layout.world_size > 1:
            dist.all_reduce(full)
        elif groups.layout.pp > 1 and not frame.everyone:
            dist.broadcast(full, group=groups.pp, group_src=groups.layout.pp - 1)
        result[name] = frame.tokens(full)
    return result
