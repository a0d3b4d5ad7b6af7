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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any

import torch

from megarl.api.batch import Batch, Padded
from megarl.api.engine import OUTPUTS, LossFn, LossWeightFn, Metrics, NoGradient
from megarl.api.failures import attempt
from megarl.engine import inputs
from megarl.engine.activations import HostActivations
from megarl.engine.inputs import Request
from megarl.engine.micro_batch import (
    GIVEN_IDS,
    MicroBatch,
    Result,
    ResultRows,
    Writes,
    ahead,
    prefix_ratios,
)
from megarl.engine.probe import Probe
from megarl.engine.routing import ROUTED
from megarl.engine.setup import EngineState
from megarl.observability import stats_tracker
from megarl.parallel import exchange, mcore
from megarl.parallel.mcore import known_shapes
from megarl.parallel.packing import unpack
from megarl.parallel.ranks import Ranks

from megatron.core import parallel_state as ps
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.tensor_parallel import mappings

Sums = dict[str, tuple[Any, Any]]  # name -> (sum, weight); numbers or scalar tensors


def run(state: EngineState, given: Batch, ask: Request, probe: Probe | None = None) -> Metrics:
    """Makes the pass that is asked for. Returns the loss and the weighted means of its stats, the
    same on every rank, with the outputs `keep` (and what a `probe` heard) of the rows that this
    rank holds of `given`; with `backward` the gradients are in the wrappers' buffers.

    Raises ValueError for what check_input refuses and where the weights of the whole batch do not
    sum to a positive number, NoGradient where a loss that goes backward has no gradient on any
    rank, and an error on every rank where one of the functions raises on one."""
    inputs.check_input(state, given, ask)
    reads = ("input_ids", ROUTED) if ask.loss is None else None
    batch = inputs.place(state, given, reads, whole_groups=ask.whole_groups)
    micro_batches = inputs.micro_batches(state, batch, ask)
    weight = _whole_weight(batch, ask.weight) if ask.weight is not None else 1.0
    job = Job(state=state, ask=ask, loss_scale=len(micro_batches) * state.layout.dp / weight)
    record = ROUTED in ask.keep
    tapes = state.routing.of_pass(record=record) if state.routing else nullcontext()
    with tapes, stats_tracker.muted(not state.groups.speaks):
        _run_schedule(state, micro_batches, job)
        metrics = Metrics({}, {}) if ask.loss is None else _metrics(job, micro_batches, weight)
        sources: list[Any] = [
            job,
            *([state.routing] if record else []),
            *([probe] if probe else []),
        ]
        at = ResultRows(batch, state.groups)
        for source in sources:
            for name, inner, dtype, writes in source.results(micro_batches, at):
                tokens = at.collect(inner, dtype, writes)
                # what was computed at a borrowed place goes to where `given` is at home
                metrics.kept[name] = exchange.move(
                    tokens, given.lengths, batch.home, given.home, given.comm
                )
    return metrics


def _whole_weight(batch: Batch, loss_weight_fn: LossWeightFn) -> float:
    """Returns W, the weight of the whole batch. Raises ValueError unless it is positive."""
    weight = math.fsum(batch.row_sums(loss_weight_fn, what="loss_weight_fn").tolist())
    if not weight > 0:
        raise ValueError(
            f"loss_weight_fn gave {weight} for the whole batch, but the loss is divided by it; "
            "is there nothing to train on (loss_mask all False)?"
        )
    return weight


def _metrics(job: Job, micro_batches: Sequence[MicroBatch], weight: float) -> Metrics:
    """Returns the loss and the means of its stats, and how experts were loaded. Collective."""
    job.sums.extend(prefix_ratios(micro_batches))
    sums = _reduce_sums(job)
    loss_sum, with_gradient = sums.pop("loss")
    routing = job.state.routing.metrics(len(micro_batches)) if job.state.routing else {}
    if job.ask.backward and not with_gradient:
        raise NoGradient(
            "loss_fn: on no rank does the loss require grad, so it would train nothing; it has to "
            f"depend on the outputs {tuple(job.ask.outputs)} without detach() or no_grad() between"
        )
    means = {k: s / w if w else math.nan for k, (s, w) in sums.items()}
    weights = {k: w for k, (_, w) in sums.items()}
    return Metrics({"loss": loss_sum / weight, **means, **routing}, weights)


# ---- the schedule -------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Job:
    """Computes what a pass is asked for, and collects its results on the ranks of the last pipeline
    stage.

    The loss's sums are collected in `sums`, one entry a micro-batch; the outputs to keep of every
    micro-batch with rows in `kept`, in their order. Every context-parallel rank computes the loss
    of whole sequences, and sends back the gradient of its share. What the loss raises is kept in
    `error`, for all ranks to hear of at the end: the pass goes on without losses, because the other
    ranks would wait for this one.
    """

    state: EngineState
    ask: Request
    loss_scale: float
    sums: list[Sums] = field(default_factory=list)
    kept: list[Padded] = field(default_factory=list)
    error: Exception | None = None
    activations: HostActivations | None = None

    def forward_step(self, data: Iterator[tuple[Any, MicroBatch]], chunk: Any) -> tuple[Any, Any]:
        """Returns the output of a chunk for the next micro-batch, and what makes a loss of it;
        megatron-core's schedule calls both."""
        model, mb = next(data)
        how = {}
        if self.state.routing is not None:
            self.state.routing.prepare(model, mb)
            how["padding_mask"] = self.state.routing.padding_mask(model, mb)
        if model.post_process:
            model.output_layer.prepare(mb.packed, self.ask.of_head, self.ask.temperature)
        ids, positions = mb.packed.input_ids[None], mb.packed.position_ids[None]
        with self.activations.of(model.decoder) if self.activations else nullcontext():
            out = chunk(ids, positions, None, packed_seq_params=mb.params(), **how)
        return out, partial(self._finish, mb, getattr(model, "output_layer", None))

    def _finish(self, mb: MicroBatch, head: Any, out: torch.Tensor) -> tuple[Any, Any]:
        """Turns the last stage's [1,T/cp,K] into the micro-batch's (scaled loss, None)."""
        # [T,K]; backward takes the rank's slice
        whole = mappings.gather_from_sequence_parallel_region(
            out[0], tensor_parallel_output_grad=False, group=self.state.groups.cp
        )
        per_token = head.split(whole, self.ask.of_head, mb.packed)
        outputs = {name: unpack(values, mb.packed) for name, values in per_token.items()}
        nothing = out.sum() * 0.0  # keeps the graph alive where no loss depends on the outputs
        if not mb.rows or self.error is not None:
            return nothing, None
        self.kept.append({name: outputs[name].detach() for name in self._kept_names})
        if self.ask.loss is None:
            return nothing, None
        loss_sum, self.error = attempt(self._loss, self.ask.loss, mb, outputs)
        return nothing if loss_sum is None else loss_sum * self.loss_scale + nothing, None

    def _loss(self, loss_fn: LossFn, mb: MicroBatch, outputs: Padded) -> torch.Tensor:
        """Returns the micro-batch's loss_sum, and keeps its sums; that of the loss weighs 1 where
        it has a gradient. Raises ValueError for what is none, or stats that the engine cannot
        take."""
        loss_sum, stats = loss_fn(outputs, mb.fields)
        if loss_sum.ndim:
            raise ValueError(
                f"loss_fn gave a loss of shape {tuple(loss_sum.shape)}: it must be a sum, a scalar"
            )
        if "loss" in stats:
            raise ValueError("loss_fn's stats must not contain 'loss': the engine reports it")
        self.sums.append({"loss": (loss_sum.detach(), float(loss_sum.requires_grad)), **stats})
        return loss_sum

    def results(self, micro_batches: Sequence[MicroBatch], at: ResultRows) -> Iterator[Result]:
        """Yields the outputs to keep."""
        batch, topk = micro_batches[0].source, self.state.config.lm_head_topk
        given = batch[GIVEN_IDS].values.shape[-1] if GIVEN_IDS in batch else 0
        sizes = {"topk": topk, "given": given, "vocab": self.state.model.vocab_size}
        for name in self._kept_names:
            width = OUTPUTS[name].width
            inner = [sizes[width]] if width else []
            dtype = torch.long if name == "topk_ids" else torch.float32
            yield name, inner, dtype, self._writes(name, micro_batches, at)

    def _writes(self, name: str, micro_batches: Sequence[MicroBatch], at: ResultRows) -> Writes:
        if not self.state.groups.speaks:
            return
        with_rows = [mb for mb in micro_batches if mb.rows]
        for mb, outputs in zip(with_rows, self.kept, strict=True):
            places, of = at.of_sequences(mb, outputs[name].shape[1])
            yield places, outputs[name].flatten(0, 1)[of]

    @property
    def _kept_names(self) -> list[str]:
        return [name for name in self.ask.keep if name != ROUTED]  # routers record these


def _run_schedule(state: EngineState, micro_batches: Sequence[MicroBatch], job: Job) -> None:
    """Runs all micro-batches through all chunks; backward, too, gradients go into the wrappers'
    buffers."""
    chunks, interleaved = state.chunks, len(state.chunks) > 1
    lengths = [mb.length for mb in micro_batches] if state.layout.pp > 1 else []
    shapes = known_shapes(*_coming(lengths, len(chunks), state.models[0].config))
    to_loss = [k for k in micro_batches[0].source if k != ROUTED] if job.ask.loss else []
    with shapes, ThreadPoolExecutor(1, "packing") as thread, ExitStack() as after:
        if job.ask.backward and state.config.options.get("offload_activations"):
            job.activations = after.enter_context(closing(HostActivations()))
        iterators = [
            zip(repeat(m), ahead(micro_batches, thread, to_loss if m.post_process else []))
            for m in state.models
        ]
        get_forward_backward_func()(
            forward_step_func=job.forward_step,
            data_iterator=iterators if interleaved else iterators[0],
            model=chunks if interleaved else chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=1,  # read only where all are as long
            micro_batch_size=1,
            forward_only=not job.ask.backward,
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


def _reduce_sums(job: Job) -> dict[str, tuple[float, float]]:
    """Returns the sums over all micro-batches and data-parallel ranks, on every rank. Collective.
    Where the loss failed on one rank, all raise an error that names the rank.

    Numbers are added in rank order, in fp64.
    """
    errors, job.error = [job.error] if job.error else [], None  # it holds frames that hold the job
    ranks, parts = Ranks.of(), job.sums if job.state.groups.speaks else []
    total: dict[str, tuple[float, float]] = {}
    own = ranks.together(_add_up, parts, errors, what="loss_fn")
    for sums in ranks.gather(own, "loss_fn"):
        _accumulate(total, sums)
    return total


def _add_up(parts: Sequence[Sums], errors: list[Exception]) -> dict[str, tuple[float, float]]:
    """Returns the sums over micro-batches, or raises the error of one. All numbers leave the device
    in one transfer."""
    if errors:
        raise errors.pop()
    flat = [x for sums in parts for pair in sums.values() for x in pair]
    device = mcore.device()
    there = [torch.is_tensor(x) and x.device == device for x in flat]
    tensors = [x.detach().double().reshape(()) for x, on_device in zip(flat, there) if on_device]
    on_host = iter(torch.stack(tensors).tolist() if tensors else [])
    numbers = iter([next(on_host) if on_device else float(x) for x, on_device in zip(flat, there)])
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
