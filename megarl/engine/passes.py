"""A pass of a batch through the model: planned, run, and its results brought home.

Everything here is collective, in the scope of the engine's groups. B sequences, S positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megarl.api.batch import Batch, Padded
from megarl.api.engine import LossFn, LossWeightFn, Metrics, NoGradient
from megarl.engine import intake, micro_batch, schedule, sharing
from megarl.engine.input_check import check_input
from megarl.engine.lm_head import output_widths
from megarl.engine.micro_batch import GIVEN_IDS, Frame, MicroBatch
from megarl.engine.probe import Probe
from megarl.engine.routing import ROUTED
from megarl.engine.setup import EngineState
from megarl.models.flops import sequence_cost
from megarl.models.fp8 import token_unit
from megarl.observability import stats_tracker
from megarl.parallel import exchange
from megarl.parallel.packing import MicroBatchPlan, plan_micro_batches
from megarl.parallel.placement import units_of
from megarl.parallel.vocab_parallel import GIVEN


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
    batch = intake.settle(state, intake.as_batch(given), whole_groups=whole_groups)
    mine = _micro_batches(state, batch, outputs, whole_groups=whole_groups, backward=backward)
    weight = _whole_weight(batch, loss_weight_fn)
    job = schedule.Pass(
        outputs=tuple(outputs),
        temperature=float(temperature),
        cp_group=state.groups.cp,
        loss_fn=loss_fn,
        loss_scale=len(mine) * state.layout.dp / weight,
        routing=state.routing,
        offload=backward and bool(state.config.options.get("offload_activations")),
        keep=tuple(keep),
    )
    with _taped(state), stats_tracker.muted(not schedule.speaks(state.groups)):
        schedule.run(state.chunks, mine, job, backward=backward)
    job.sums.extend(sharing.measured(mine))
    sums = schedule.reduce_sums(job, state.groups)
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
        intake.place(state, given)
        view = given.select(torch.arange(len(given)), needed)
    else:
        view = intake.as_batch(given, needed)
    batch = intake.settle(state, view)
    mine = _micro_batches(state, batch, outputs, backward=False)
    computed = tuple(o for o in outputs if o != ROUTED)
    job = schedule.Pass(
        outputs=computed,
        temperature=float(temperature),
        cp_group=state.groups.cp,
        routing=state.routing,
        keep=computed,
    )
    with _taped(state, record=ROUTED in outputs):
        schedule.run(state.chunks, mine, job, backward=False)
        return _collected(state, given, batch, mine, job, routes=ROUTED in outputs, probe=probe)


def _collected(
    state: EngineState,
    given: Batch | Padded,
    batch: Batch,
    mine: list[MicroBatch],
    job: schedule.Pass,
    *,
    routes: bool = False,
    probe: Probe | None = None,
) -> dict[str, Any]:
    """Returns what a pass over `batch` kept, with `routes` what it recorded and with `probe` what
    that saw, as `given` is: a Batch at its home, or a plain dict. Collective."""
    frame = Frame.of(batch, everyone=not isinstance(given, Batch))
    given_ids = batch[GIVEN_IDS].values.shape[-1] if GIVEN_IDS in batch else 0
    widths = output_widths(state.model.vocab_size, state.config.lm_head_topk, given_ids)
    result = schedule.collect_outputs(job, mine, frame, state.groups, extra=widths)
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
    batch, layout, spec = intake.as_batch(given), state.layout, state.config.mb_spec
    larger = None if backward else spec.forward_max_tokens_per_mb
    groups = intake.group_ids(batch, whole_groups=True) if whole_groups else None
    home = intake.home_of(state, batch, whole_groups=whole_groups)
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
        mine = sharing.plan(state, batch, whole_groups=whole_groups, backward=backward)
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
        beside=sharing.beside(state, batch),
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
