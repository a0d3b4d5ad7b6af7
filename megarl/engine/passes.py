"""A pass of a batch through the model: planned, run through megatron-core's pipeline schedules, and
its results brought home.

Scaling. The step is the gradient of sum(loss_sum) / W over all sequences. megatron-core's two-value
loss path multiplies a micro-batch's loss by CP and divides it by M micro-batches; the data-parallel
wrapper averages gradients over DP * CP ranks. So a micro-batch's loss is loss_sum * M * DP / W.
(Its three-value path keeps weights as integers and would truncate fractional ones.)

Everything here is collective, in the scope of the engine's groups. B sequences, S positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megarl.api.batch import Batch, Padded, Tokens
from megarl.api.engine import LossFn, LossWeightFn, Metrics, NoGradient
from megarl.api.failures import attempt, from_every_rank
from megarl.engine import micro_batch
from megarl.engine.input_check import check_input
from megarl.engine.lm_head import HeadJob, output_widths
from megarl.engine.micro_batch import GIVEN_IDS, Frame, MicroBatch
from megarl.engine.probe import Probe
from megarl.engine.routing import ROUTED, Routing
from megarl.engine.setup import EngineState
from megarl.models.flops import sequence_cost
from megarl.models.fp8 import token_unit
from megarl.models.names import unwrap
from megarl.observability import stats_tracker
from megarl.parallel import exchange, mcore
from megarl.parallel.groups import ProcessGroups
from megarl.parallel.packing import MicroBatchPlan, plan_micro_batches, unpack
from megarl.parallel.pipeline_shapes import known_shapes
from megarl.parallel.placement import units_of
from megarl.parallel.vocab_parallel import GIVEN, TOP_IDS

from megatron.core import parallel_state as ps  # isort: skip
from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip
from megatron.core.pipeline_parallel.schedules import get_schedule_table  # isort: skip
from megatron.core.tensor_parallel import mappings  # isort: skip

Sums = dict[str, tuple[Any, Any]]  # name -> (sum, weight); numbers or scalar tensors
MIN_BYTES = 64 << 10  # smaller ones stay: their copies cost more than their memory

_Packed = Tensor | tuple[torch.device, Tensor]


def loss_pass(
    state: EngineState,
    given: Batch | Padded,
    loss_fn: LossFn,
    loss_weight_fn: LossWeightFn,
    *,
    outputs: Sequence[str] = ("logprobs",),
    temperature: float = 1.0,
    whole_groups: bool = False,
    keep: Sequence[str] = (),
    backward: bool,
) -> Metrics:
    """Returns the loss and the weighted means of its stats, the same on every rank, with the
    outputs `keep`; with `backward` it leaves the gradients in the wrappers' buffers. Raises
    ValueError where the weights of the whole batch do not sum to a positive number, or an output is
    to be kept that is not computed, NoGradient where a loss that goes backward has no gradient on
    any rank, and an error on every rank where one of the functions raises on one."""
    if missing := [name for name in keep if name not in outputs]:
        raise ValueError(f"keep={missing}: not among what the pass computes, outputs={outputs}")
    check_input(
        state,
        "train_batch" if backward else "eval_batch",
        given,
        outputs,
        backward=backward,
        temperature=temperature,
        whole_groups=whole_groups,
        keep=tuple(keep),
    )
    batch = micro_batch.settle(state, micro_batch.as_batch(given), whole_groups=whole_groups)
    mine = _micro_batches(state, batch, outputs, whole_groups=whole_groups, backward=backward)
    weight = _whole_weight(batch, loss_weight_fn)
    job = Pass(
        outputs=tuple(outputs),
        temperature=float(temperature),
        cp_group=state.groups.cp,
        loss_fn=loss_fn,
        loss_scale=len(mine) * state.layout.dp / weight,
        routing=state.routing,
        offload=backward and bool(state.config.options.get("offload_activations")),
        keep=tuple(keep),
    )
    with _taped(state), stats_tracker.muted(not speaks(state.groups)):
        run(state.chunks, mine, job, backward=backward)
    job.sums.extend(micro_batch.prefix_ratios(mine))
    sums = reduce_sums(job, state.groups)
    kept = _collected(state, given, batch, mine, job) if keep else {}
    routing = state.routing.metrics(len(mine)) if state.routing else {}
    loss_sum, with_gradient = sums.pop("loss")
    if backward and not with_gradient:
        raise NoGradient(
            "loss_fn: on no rank does the loss require grad, so it would train nothing; it has to "
            f"depend on the outputs {tuple(outputs)} without detach() or no_grad() on the way"
        )
    loss = loss_sum / weight
    means = {k: s / w if w else math.nan for k, (s, w) in sums.items()}
    weights = {k: w for k, (_, w) in sums.items()}
    return Metrics({"loss": loss, **means, **routing}, weights, kept)


def _whole_weight(batch: Batch, loss_weight_fn: LossWeightFn) -> float:
    """Returns W, the weight of the whole batch. Raises ValueError unless it is positive."""
    weight = math.fsum(batch.row_sums(loss_weight_fn, what="loss_weight_fn").tolist())
    if not weight > 0:
        raise ValueError(
            f"loss_weight_fn gave {weight} for the whole batch, but the loss is divided by it; "
            "is there nothing to train on (loss_mask all False)?"
        )
    return weight


def forward_pass(
    state: EngineState,
    given: Batch | Padded,
    outputs: Sequence[str],
    temperature: float,
    probe: Probe | None = None,
) -> dict[str, Any]:
    """Returns {name: Tokens of the rows that this rank holds} for each of `outputs`; of a plain
    dict, {name: [B,S,...]} on every rank. A `probe` collects what it heard."""
    check_input(state, "forward", given, outputs, backward=False, temperature=temperature)
    needed = [name for name in ("input_ids", ROUTED) if name in given]
    if isinstance(given, Batch):
        micro_batch.place(state, given)
        view = given.select(torch.arange(len(given)), needed)
    else:
        view = micro_batch.as_batch(given, needed)
    batch = micro_batch.settle(state, view)
    mine = _micro_batches(state, batch, outputs, backward=False)
    computed = tuple(o for o in outputs if o != ROUTED)
    job = Pass(
        outputs=computed,
        temperature=float(temperature),
        cp_group=state.groups.cp,
        routing=state.routing,
        keep=computed,
    )
    with _taped(state, record=ROUTED in outputs):
        run(state.chunks, mine, job, backward=False)
        return _collected(state, given, batch, mine, job, routes=ROUTED in outputs, probe=probe)


def _collected(
    state: EngineState,
    given: Batch | Padded,
    batch: Batch,
    mine: list[MicroBatch],
    job: Pass,
    *,
    routes: bool = False,
    probe: Probe | None = None,
) -> dict[str, Any]:
    """Returns what a pass over `batch` kept, with `routes` what it recorded and with `probe` what
    that saw, as `given` is: a Batch at its home, or a plain dict. Collective."""
    frame = Frame.of(batch, everyone=not isinstance(given, Batch))
    given_ids = batch[GIVEN_IDS].values.shape[-1] if GIVEN_IDS in batch else 0
    widths = output_widths(state.model.vocab_size, state.config.lm_head_topk, given_ids)
    result = collect_outputs(job, mine, frame, state.groups, extra=widths)
    if state.routing is not None and routes:
        result[ROUTED] = state.routing.collect(mine, frame)
    if probe is not None:
        probe.collect(mine, frame)
    if not isinstance(given, Batch):
        width = given["input_ids"].shape[1]
        return {name: tokens.padded(width=width) for name, tokens in result.items()}
    return {  # what was computed at a borrowed place goes to where `given` is at home
        name: exchange.move(tokens, given.lengths, batch.home, given.home, given.comm)
        for name, tokens in result.items()
    }


def plan(
    state: EngineState, given: Batch | Padded, *, whole_groups: bool = False, backward: bool
) -> MicroBatchPlan:
    """Returns the rows of every micro-batch, [dp rank][micro-batch], of passes that share no
    prefixes. Under the interleaved schedule the micro-batches are a multiple of pp."""
    batch, layout, spec = micro_batch.as_batch(given), state.layout, state.config.mb_spec
    larger = None if backward else spec.forward_max_tokens_per_mb
    groups = micro_batch.group_ids(batch, whole_groups=True) if whole_groups else None
    home = micro_batch.home_of(state, batch, whole_groups=whole_groups)
    return plan_micro_batches(
        batch.lengths.tolist(),
        dp=layout.dp,
        max_tokens=(larger or spec.max_tokens_per_mb) * layout.cp,  # the setting is a device's
        align=micro_batch.alignment(layout, token_unit(state.config.fp8)),
        multiple_of=layout.pp if layout.vpp > 1 else 1,
        cost=sequence_cost(state.model),
        groups=None if groups is None else units_of(groups),
        index=home.of_row.tolist(),
    )


def _micro_batches(
    state: EngineState,
    batch: Batch,
    outputs: Sequence[str],
    *,
    whole_groups: bool = False,
    backward: bool,
) -> list[MicroBatch]:
    """Returns this rank's micro-batches, with the given ids where `outputs` are about them. The
    batch has been placed. Collective."""
    c, share = state.groups.coords, state.config.mb_spec.share_prefixes
    if share:
        mine = micro_batch.trie_rows(state, batch, whole_groups=whole_groups, backward=backward)
    else:
        mine = plan(state, batch, whole_groups=whole_groups, backward=backward)[c.dp]
    return micro_batch.build(
        batch,
        mine,
        state.layout,
        cp_rank=c.cp,
        token_unit=token_unit(state.config.fp8),
        given=not set(GIVEN).isdisjoint(outputs),
        share_prefixes=share,
        beside=micro_batch.match_field(state, batch),
    )


def _taped(state: EngineState, *, record: bool = False) -> AbstractContextManager[None]:
    if state.routing is not None:
        return state.routing.of_pass(record=record)
    if record:
        raise ValueError(f"outputs: {ROUTED!r} needs a mixture-of-experts model")
    return nullcontext()


def by_sequence(
    outputs: Padded,
    batch: Padded,
    output_seqlens: Sequence[int] | None,
    post_hook: Callable[[Padded, Padded], Any] | None,
) -> list[Any]:
    """Returns for every sequence its outputs {name: [n]} (the first output_seqlens[i] positions,
    all S by default), with its row of the batch through `post_hook` if there is one. Raises
    ValueError for another number of output_seqlens, and for several outputs without a post_hook."""
    rows = len(batch["input_ids"])
    if output_seqlens is not None and len(output_seqlens) != rows:
        raise ValueError(f"output_seqlens has {len(output_seqlens)} entries for {rows} sequences")
    if post_hook is None and len(outputs) > 1:
        raise ValueError(f"several outputs {tuple(outputs)} by sequence need a post_hook")
    results = []
    for i in range(rows):
        n = None if output_seqlens is None else output_seqlens[i]
        mine = {name: values[i, :n] for name, values in outputs.items()}
        row = {name: values[i] for name, values in batch.items()}
        results.append(post_hook(mine, row) if post_hook else next(iter(mine.values())))
    return results


# ---- the schedule -------------------------------------------------------------------------------


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
        said = from_every_rank("loss_fn", mine, error, exchange.world_comm())
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


# ---- activations in host memory -----------------------------------------------------------------


def offload_activations(on: bool) -> AbstractContextManager[None]:
    """Returns a context in which tensors that autograd saves go to (pinned) host memory, and come
    back when the backward pass asks for them; values stay the same to the bit.

    Parameters, whose gradients megatron-core accumulates beside them, and small tensors stay where
    they are. With full recomputation the inputs of the recomputed layers are what goes.
    """
    return saved_tensors_hooks(_pack, _unpack) if on else nullcontext()


def _pack(tensor: Tensor) -> _Packed:
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, torch.nn.Parameter):
        return tensor
    if not tensor.is_floating_point() or tensor.nbytes < MIN_BYTES:
        return tensor.detach()
    pinned = tensor.device.type == "cuda"
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    # in the stream that made it: its memory is not given to others before the copy is over
    host.copy_(tensor.detach(), non_blocking=pinned)
    return tensor.device, host


def _unpack(packed: _Packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, host = packed
    return host.to(device, non_blocking=host.is_pinned())
