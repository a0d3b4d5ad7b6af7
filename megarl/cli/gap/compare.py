"""Runs the same tokens through trainer, embedded server and transformers, and says at which part of
which layer they differ by more than rounding.

What rounding does is measured on the very tokens: transformers runs them once in the dtype of the
two programs (the coarser one, where they differ) and once in a wider one, and the two runs differ
by nothing but rounding. At every part of every layer, with the norms over a token's numbers,

    gap(t)      = |a(t) - b(t)| / |exact(t)|          a, b: the two programs
    rounding(t) = |rounded(t) - exact(t)| / |exact(t)|

A correct program is as far from the exact run as transformers is, so two of them are apart by about
1.4 times as much where their roundings are independent, and less where they are alike; the tests
hold every family, in float32 and bfloat16, to half of the bounds. A gap is a bug where its mean
over tokens is MEAN_FACTOR times rounding's, or its largest is TOKEN_FACTOR times rounding's
largest: one wrong token hides in a mean. The head is compared in nats: its sizes are 1. Of a choice
of experts the gap is 1 at a token with other experts, else 0.

Rounding grows from layer to layer, and is measured at each. So the first part that has a gap is
where the programs part; parts behind it read what it put out.

T tokens of all samples, sample after sample; L layers, k experts per token.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.api.records import SaveLoadMeta
from megarl.cli.gap import Sample
from megarl.config.engine import TrainEngineConfig
from megarl.engine import MegatronEngine
from megarl.engine.probe import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    ROUTER,
    Part,
    listening,
    parts_of_layer,
)
from megarl.engine.routing import ROUTED
from megarl.models.hf_config import load_transformers, read_hf_config
from megarl.models.shapes import MoEShape
from megarl.parallel.worlds import init_distributed
from megarl.server.args import ServerArgs
from megarl.server.protocol import SamplingParams
from megarl.server.runner import ModelRunner
from megarl.server.sequence import ServedSequence

MEAN_FACTOR, TOKEN_FACTOR = 4.0, 8.0
FEW_FLIPS = 4.0  # tokens whose experts rounding may change, where it happened to change fewer
CHOICE = "router choice"

# what each part put out, [T,...]; of the head, [n,1] log-probabilities of the n tokens of answers;
# of a choice, the experts [T,k] in ascending order
Parts = dict[Part, Tensor]


# gaps


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Holds the runs that are compared. `first` is the trainer's, `second` the server's (or
    transformers'), `rounded` and `exact` are transformers'; all of them have the trainer's experts.
    unit: half the distance of 1 to the next number of the coarser dtype."""

    first: Parts
    second: Parts
    rounded: Parts
    exact: Parts
    unit: float


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Compares two programs at one part. mean, rounding: means over tokens; worst, worst_rounding:
    the largest. token: where the worst is."""

    part: Part
    mean: float
    rounding: float
    worst: float
    worst_rounding: float
    token: int

    @property
    def times(self) -> float:
        """Returns the gap in multiples of its bound: above 1 it is a bug."""
        return max(
            self.mean / (MEAN_FACTOR * self.rounding),
            self.worst / (TOKEN_FACTOR * self.worst_rounding),
        )

    @property
    def is_bug(self) -> bool:
        """Returns whether the gap is more than rounding; NaN is."""
        return not self.times <= 1


def compare(runs: Runs) -> list[Gap]:
    """Returns the gaps between the first and the second run, in the order of computation."""
    parts = [part for part in runs.exact if part in runs.first and part in runs.second]
    return [gap_at(part, runs.first, runs.second, runs) for part in parts]


def gap_at(part: Part, a: Parts, b: Parts, runs: Runs) -> Gap:
    """Compares what the programs of `a` and `b` put out at `part`."""
    apart = _apart(part, a, b, runs.exact)
    rounding = _apart(part, runs.rounded, runs.exact, runs.exact)
    is_choice = part.name == CHOICE
    return Gap(
        part=part,
        mean=float(apart.mean()),
        rounding=max(float(rounding.mean()), FEW_FLIPS / len(apart) if is_choice else runs.unit),
        worst=float(apart.max()),
        worst_rounding=max(float(rounding.max()), 1.0 if is_choice else runs.unit),
        token=int(apart.argmax()),
    )


def _apart(part: Part, a: Parts, b: Parts, exact: Parts) -> Tensor:
    """Returns how far apart two programs are at each token [T], as the module says."""
    if part.name == CHOICE:
        return (a[part] != b[part]).any(-1).double()
    size = (a[part] - b[part]).double().norm(dim=-1)
    if part.name == HEAD:
        return size
    return size / exact[part].double().norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)


def first_bug(gaps: Sequence[Gap]) -> Gap | None:
    """Returns the first gap that is a bug, None where all is rounding."""
    return next((gap for gap in gaps if gap.is_bug), None)


def sides(part: Part, runs: Runs) -> tuple[float, float]:
    """Returns how far from the exact run the first program is at `part`, and the second, as
    Gap.times."""
    first, second = (gap_at(part, a, runs.exact, runs).times for a in (runs.first, runs.second))
    return first, second


def report(gaps: Sequence[Gap], runs: Runs, other: str) -> Iterator[str]:
    """Yields the gaps, a line for each layer, and a verdict; `other`: the program beside the
    trainer."""
    yield "Gaps as multiples of what rounding does at the same place:"
    for layer, of_layer in groupby(gaps, lambda gap: _place(gap.part).rpartition(", ")[0]):
        cells = (
            f"{gap.part.name} {gap.mean / gap.rounding:.3g}{' (!)' if gap.is_bug else ''}"
            for gap in of_layer
        )
        yield f"  {layer:12}{', '.join(cells)}"
    head = next(gap for gap in gaps if gap.part.name == HEAD)
    answers = len(runs.exact[head.part])
    yield (
        f"Log-probabilities of {answers} tokens of answers: a gap of {head.mean:.2g} nats in the "
        f"mean, {head.worst:.2g} at most."
    )
    bug = first_bug(gaps)
    if bug is None:
        yield f"All of it is rounding: trainer and {other} compute the same model."
        return
    unit = {HEAD: " nats", CHOICE: " of the tokens"}.get(bug.part.name, "")
    yield (
        f"{_place(bug.part)}: the first gap that is more than rounding. It is {bug.mean:.2g}{unit} "
        f"where rounding makes {bug.rounding:.2g}, and at most {bug.worst:.2g}, at token "
        f"{bug.token}, where rounding makes {bug.worst_rounding:.2g}."
    )
    off = [who for who, times in zip(("trainer", other), sides(bug.part, runs)) if not times <= 1]
    who = f"the {off[0]} alone" if len(off) == 1 else "both" if off else "neither by itself"
    yield f"transformers, in a wider dtype, disagrees with {who}."


def _place(part: Part) -> str:
    """Returns where a part is: its layer, and what it is."""
    single = part.name in (EMBEDDING, FINAL_NORM, HEAD)
    return part.name if single else f"layer {part.layer}, {part.name}"


# what each program makes of the samples


def trained(engine: MegatronEngine, samples: Sequence[Sample]) -> Parts:
    """Returns what the trainer's parts put out. Collective."""
    width = max(len(s.ids) for s in samples)
    ids = torch.tensor([s.ids + [0] * (width - len(s.ids)) for s in samples])
    real = torch.arange(width) < torch.tensor([len(s.ids) for s in samples])[:, None]
    written = real & (torch.arange(width) >= torch.tensor([s.prompt for s in samples])[:, None])
    result, parts = engine.probe({"input_ids": ids, "attention_mask": real})
    for layer in [part.layer for part in parts if part.name == ROUTER]:
        parts[Part(layer, CHOICE)] = result[ROUTED][real][:, layer].float().sort(-1).values
    head = Part(engine.model_config.num_layers, HEAD)
    return parts | {head: result["logprobs"][written][:, None]}


@torch.inference_mode()
def served(
    runner: ModelRunner, samples: Sequence[Sample], given: Parts, experts: MoEShape | None
) -> Parts:
    """Returns what the parts of a server's model put out as it would write the samples: the prompt
    at once, then token by token. given, experts: see _Listener."""
    listener = _Listener(runner.model, given, experts)
    with listener.listening():
        for sample in samples:
            seq = ServedSequence(
                rid="gap",
                prompt=sample.ids[: sample.prompt],
                params=SamplingParams(),
                max_new_tokens=0,
                stop_ids=frozenset(),
                seed=0,
                done=None,  # type: ignore[arg-type]  # nobody waits for it
                wants_logprobs=False,
            )
            runner.make_room([seq], used=0)
            logits = [runner.prefill([seq], 0)[1]]
            for token in sample.ids[sample.prompt :]:
                seq.output.append(token)
                runner.make_room([seq], used=1)
                logits.append(runner.decode([seq]))
            listener.note_head(torch.cat(logits[:-1]), sample)
    return listener.parts()


@torch.inference_mode()
def by_transformers(
    model: Any, samples: Sequence[Sample], given: Parts, experts: MoEShape | None
) -> Parts:
    """Returns what the parts of a model of transformers put out, each sample in one pass. given,
    experts: see _Listener."""
    listener = _Listener(model, given, experts)
    with listener.listening():
        for sample in samples:
            ids = torch.tensor([sample.ids], device=model.device)
            logits = model(ids, use_cache=False).logits[0]
            listener.note_head(logits[sample.prompt - 1 : -1], sample)
    return listener.parts()


class _Listener:
    """Notes what the modules of a transformers model put out. Its routers, of the shape `experts`,
    send tokens where the choices of `given` say."""

    def __init__(self, model: Any, given: Parts, experts: MoEShape | None) -> None:
        self._base, self._given, self._experts = model.base_model, given, experts
        self._last = len(self._base.layers)
        self._heard: defaultdict[Part, list[Tensor]] = defaultdict(list)

    def listening(self) -> AbstractContextManager[None]:
        """Listens to the passes made inside."""
        return listening(self._parts(), self._hear)

    def _parts(self) -> Iterator[tuple[Part, Any]]:
        yield Part(-1, EMBEDDING), self._base.embed_tokens
        for i, layer in enumerate(self._base.layers):
            yield from parts_of_layer(layer, i)
        yield Part(self._last, FINAL_NORM), self._base.norm

    def _hear(self, part: Part, _module: Any, _args: Any, out: Any) -> Any:
        if part.name == ROUTER:
            return self._route(part, *out)
        self._note(part, out[0] if isinstance(out, tuple) else out)
        return None

    def _note(self, part: Part, value: Tensor) -> None:
        self._heard[part].append(_wide(value.detach()).flatten(0, -2).cpu().clone())

    def _route(self, part: Part, logits: Tensor, weights: Tensor, own: Tensor) -> Any:
        """Notes a router's logits and choice; returns its answer with the given choice. The weights
        of experts stay its own where it would have chosen them."""
        choice = Part(part.layer, CHOICE)
        first = sum(map(len, self._heard.get(choice, ())))
        self._note(part, logits)
        self._note(choice, own.sort(-1).values)
        if self._experts is None:
            return None
        given = self._given[choice][first : first + len(own)].to(own)
        other = (given != own.sort(-1).values).any(-1)[:, None]
        others = _weights(logits, given, self._experts).to(weights.dtype)
        return logits, torch.where(other, others, weights), torch.where(other, given, own)

    def note_head(self, logits: Tensor, sample: Sample) -> None:
        """Notes the log-probabilities of the tokens that `sample`'s policy wrote, under `logits`
        [n,V]."""
        labels = torch.tensor(sample.ids[sample.prompt :], device=logits.device)[:, None]
        self._note(Part(self._last, HEAD), _wide(logits).log_softmax(-1).gather(1, labels))

    def parts(self) -> Parts:
        """Returns what was noted, in the order of computation."""
        return {part: torch.cat(values) for part, values in self._heard.items()}


def _weights(logits: Tensor, chosen: Tensor, experts: MoEShape) -> Tensor:
    """Returns the weights [T,k] of the chosen experts, of a router with `logits` [T,E]."""
    wide = _wide(logits)
    weights = (wide.sigmoid() if experts.sigmoid else wide.softmax(-1)).gather(1, chosen)
    if experts.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * experts.scale


def _wide(values: Tensor) -> Tensor:
    """Returns the values in float32 at least."""
    return values if values.dtype == torch.float64 else values.float()


# the programs, one after the other: at any time one model is in memory


def run_all(
    engine_config: TrainEngineConfig,
    samples: Sequence[Sample],
    *,
    checkpoint: Path | None = None,
    server_dtype: str = "auto",
    against: str = "server",
) -> Runs | None:
    """Returns the runs of all programs; on ranks but the first None. Collective.

    The model is the engine's directory, or the training checkpoint of a run, whose weights then
    also go to the other programs as the trainer saves them; of `checkpoint` and `samples` those of
    the first rank count. server_dtype: "auto" is the trainer's. against: "server" or "hf". Raises
    ValueError where the model, the layout or the world do not fit.
    """
    if (recipe := engine_config.fp8) != "none":
        raise ValueError(
            f"actor.fp8={recipe}: rounding in FP8 is not measured here; use actor.fp8=none"
        )
    init_distributed()
    agreed: list[Any] = [checkpoint, samples]
    dist.broadcast_object_list(agreed)  # a run that goes on may have written more in between
    checkpoint, samples = agreed
    path, override = engine_config.path, engine_config.override_config
    if checkpoint is not None:
        path = str(checkpoint.parents[2] / ".gap")  # in the run's, where all ranks find it
    try:
        engine = MegatronEngine(replace(engine_config, optimizer=None, offload=False))
        engine.initialize()
        if checkpoint is not None:
            engine.load(SaveLoadMeta(path=str(checkpoint), weight_format="dist"))
            engine.save(SaveLoadMeta(path=path, weight_format="hf"))
        first, dtype = trained(engine, samples), engine.dtype
        engine.destroy()
        if dist.get_rank() != 0:
            return None
        experts = read_hf_config(path, override=override).moe
        other = dtype if server_dtype == "auto" else getattr(torch, server_dtype)
        coarse, fine = sorted((dtype, other), key=lambda d: torch.finfo(d).eps, reverse=True)
        rounded = by_transformers(load_model(path, coarse, override), samples, first, experts)
        model = load_model(path, fine, override)
        model = model.double() if fine == torch.float32 else model.float()
        exact = by_transformers(model, samples, first, experts)
        del model
        second = rounded
        if against == "server":
            server = start_server(path, other, samples, override)
            second = served(server, samples, first, experts)
    finally:
        if checkpoint is not None and dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
    unit = torch.finfo(coarse).eps / 2
    return Runs(first=first, second=second, rounded=rounded, exact=exact, unit=unit)


def load_model(path: str, dtype: torch.dtype, override: dict[str, Any] | None = None) -> Any:
    """Returns transformers' model of a directory. Its experts compute one by one, in any dtype."""
    how = dict(attn_implementation="sdpa", experts_implementation="eager")
    model = load_transformers(path, override, dtype=dtype, **how)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def start_server(
    path: str,
    dtype: torch.dtype,
    samples: Sequence[Sample],
    override: dict[str, Any] | None = None,
) -> ModelRunner:
    """Returns the model of an embedded server that has room for one sample."""
    args = ServerArgs(
        model_path=path,
        dtype=str(dtype).removeprefix("torch."),
        json_model_override_args=json.dumps(override or {}),
        context_length=max(5, *(len(s.ids) for s in samples)) + 1,
        max_running_requests=1,
    )
    return ModelRunner(args)
