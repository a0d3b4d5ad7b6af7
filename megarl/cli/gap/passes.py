"""Runs the same tokens through the trainer, the embedded server and transformers, and keeps what
every part of every layer put out.

T tokens of all samples, sample after sample; L layers, k experts per token.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.api.records import SaveLoadMeta
from megarl.cli.gap.tokens import Sample
from megarl.config.engine import TrainEngineConfig
from megarl.engine import MegatronEngine
from megarl.engine.probe import (
    ATTENTION,
    ATTENTION_NORM,
    ATTENTION_POST_NORM,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    MLP,
    MLP_NORM,
    MLP_POST_NORM,
    ROUTER,
    Part,
)
from megarl.engine.routing import ROUTED
from megarl.models.hf_config import read_hf_config, transformers_config
from megarl.models.shapes import MoEShape
from megarl.parallel.groups import init_distributed
from megarl.server.args import ServerArgs
from megarl.server.runner import ModelRunner
from megarl.server.sampling_params import SamplingParams
from megarl.server.sequence import ServedSequence

# the parts of a layer by transformers' names, which are the same in every family
_MODULES = {
    ATTENTION_NORM: "input_layernorm",
    ATTENTION: "self_attn",
    ATTENTION_POST_NORM: "post_self_attn_layernorm",
    MLP_NORM: "post_attention_layernorm",
    ROUTER: "mlp.gate",
    MLP: "mlp",
    MLP_POST_NORM: "post_mlp_layernorm",
}


@dataclass(frozen=True)
class Passed:
    """Holds what one program made of the samples.

    parts: what each part put out, [T,...]; of the head, [n,1] log-probabilities of the n tokens
    that the policy wrote. routes: which experts its routers chose, [T,L,k], with 0 in dense layers;
    None of a model without.
    """

    parts: Mapping[Part, Tensor]
    routes: Tensor | None


@dataclass(frozen=True)
class Routes:
    """Prescribes where tokens go: `given` [T,L,k], in a model whose experts have the shape
    `experts`."""

    given: Tensor
    experts: MoEShape


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Holds the runs that are compared. `first` is the trainer's, `second` the server's (or
    transformers'), `rounded` and `exact` are transformers'; all of them have the trainer's experts.
    unit: half the distance of 1 to the next number of the coarser dtype."""

    first: Passed
    second: Passed
    rounded: Passed
    exact: Passed
    unit: float


def trained(engine: MegatronEngine, samples: Sequence[Sample]) -> Passed:
    """Returns what the trainer makes of the samples. Collective."""
    width = max(len(s.ids) for s in samples)
    ids = torch.tensor([s.ids + [0] * (width - len(s.ids)) for s in samples])
    real = torch.arange(width) < torch.tensor([len(s.ids) for s in samples])[:, None]
    written = real & (torch.arange(width) >= torch.tensor([s.prompt for s in samples])[:, None])
    result, parts = engine.probe({"input_ids": ids, "attention_mask": real})
    head = Part(engine.model_config.num_layers, HEAD)
    logprobs = result["logprobs"][written][:, None]
    chosen = result[ROUTED][real].long() if ROUTED in result else None
    return Passed({**parts, head: logprobs}, chosen)


@torch.inference_mode()
def served(runner: ModelRunner, samples: Sequence[Sample], routes: Routes | None = None) -> Passed:
    """Returns what the server makes of the samples as it would write them: the prompt at once, then
    token by token."""
    with _Listener(runner.model, routes).listening() as heard:
        for sample in samples:
            prompt, answer = sample.ids[: sample.prompt], sample.ids[sample.prompt :]
            logits = _written(runner, prompt, answer)
            heard.head(torch.cat(logits[:-1]), sample)
        return heard.passed()


def _written(runner: ModelRunner, prompt: list[int], answer: list[int]) -> list[Tensor]:
    """Returns the logits [1,V] behind the prompt and behind each token of the answer."""
    seq = ServedSequence(
        rid="gap",
        prompt=prompt,
        params=SamplingParams(),
        max_new_tokens=0,
        stop_ids=frozenset(),
        seed=0,
        call=None,  # type: ignore[arg-type]  # nobody waits for it
        wants_logprobs=False,
    )
    runner.make_room([seq], used=0)
    logits = [runner.prefill([seq], 0)[1]]
    for token in answer:
        seq.output.append(token)
        runner.make_room([seq], used=1)
        logits.append(runner.decode([seq]))
    return logits


@torch.inference_mode()
def by_transformers(model: Any, samples: Sequence[Sample], routes: Routes | None = None) -> Passed:
    """Returns what a model of transformers makes of the samples, each in one pass."""
    with _Listener(model, routes).listening() as heard:
        for sample in samples:
            ids = torch.tensor([sample.ids], device=model.device)
            logits = model(ids, use_cache=False).logits[0]
            heard.head(logits[sample.prompt - 1 : -1], sample)
        return heard.passed()


@dataclass
class _Listener:
    """Listens to the modules of a transformers model, and prescribes routes where there are any."""

    model: Any
    routes: Routes | None
    parts: dict[Part, list[Tensor]] = field(default_factory=dict)
    chosen: dict[int, list[Tensor]] = field(default_factory=dict)
    _passed: dict[int, int] = field(default_factory=dict)  # tokens by layer with a router

    @contextmanager
    def listening(self) -> Iterator[_Listener]:
        hooks = [module.register_forward_hook(self._hook(part)) for part, module in self._modules()]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _modules(self) -> Iterator[tuple[Part, Any]]:
        base = self.model.base_model
        yield Part(-1, EMBEDDING), base.embed_tokens
        for i, layer in enumerate(base.layers):
            for name, path in _MODULES.items():
                module = layer
                for attribute in path.split("."):
                    module = getattr(module, attribute, None)
                if isinstance(module, torch.nn.Module):
                    yield Part(i, name), module
        yield Part(len(base.layers), FINAL_NORM), base.norm

    def _hook(self, part: Part) -> Callable[[Any, Any, Any], Any]:
        if part.name == ROUTER:
            return lambda _module, _args, out: self._routed(part, out)
        return lambda _module, _args, out: self._note(part, out)

    def _note(self, part: Part, out: Any) -> None:
        value = out[0] if isinstance(out, tuple) else out
        self.parts.setdefault(part, []).append(_wide(value.detach()).flatten(0, -2).cpu().clone())

    def _routed(self, part: Part, out: tuple[Tensor, Tensor, Tensor]) -> Any:
        """Notes a router's logits and choice; returns its answer with the prescribed choice. The
        weights of experts stay its own where it would have chosen them."""
        logits, weights, own = out
        self._note(part, logits)
        self.chosen.setdefault(part.layer, []).append(own.cpu())
        if self.routes is None:
            return out
        first = self._passed.get(part.layer, 0)
        self._passed[part.layer] = first + len(own)
        given = self.routes.given[first : first + len(own), part.layer].to(own.device)
        other = differing(given, own)[:, None]
        others = _weights(logits, given, self.routes.experts).to(weights.dtype)
        return logits, torch.where(other, others, weights), torch.where(other, given, own)

    def head(self, logits: Tensor, sample: Sample) -> None:
        """Notes the log-probabilities of the tokens that `sample`'s policy wrote, under `logits`
        [n,V]."""
        part = Part(len(self.model.base_model.layers), HEAD)
        labels = torch.tensor(sample.ids[sample.prompt :], device=logits.device)[:, None]
        logprobs = _wide(logits).log_softmax(-1).gather(1, labels)
        self.parts.setdefault(part, []).append(logprobs.cpu())

    def passed(self) -> Passed:
        parts = {part: torch.cat(values) for part, values in self.parts.items()}
        if not self.chosen:
            return Passed(parts, None)
        by_layer = {layer: torch.cat(chosen) for layer, chosen in self.chosen.items()}
        some = next(iter(by_layer.values()))
        layers = len(self.model.base_model.layers)
        nothing = torch.zeros_like(some)
        return Passed(parts, torch.stack([by_layer.get(i, nothing) for i in range(layers)], 1))


def differing(a: Tensor, b: Tensor) -> Tensor:
    """Returns whether two choices of experts [...,k] differ, in whatever order they name them."""
    return (a.sort(-1).values != b.sort(-1).values).any(-1)


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


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Says what is compared: a Hugging Face directory as the engine's configuration names it, or
    the training checkpoint of a run, whose weights then also go to the other programs as the
    trainer saves them. server_dtype: "auto" is the trainer's. against: "server" or "hf"."""

    engine: TrainEngineConfig
    checkpoint: Path | None = None
    server_dtype: str = "auto"
    against: str = "server"


def run_all(subject: Subject, samples: Sequence[Sample]) -> Runs | None:
    """Returns the runs of all programs; on ranks but the first None. What the first rank was given
    counts. Collective. Raises ValueError where the model, the layout or the world do not fit."""
    if (recipe := subject.engine.fp8) != "none":
        raise ValueError(
            f"actor.fp8={recipe}: rounding in FP8 is not measured here; use actor.fp8=none"
        )
    init_distributed()
    if dist.get_world_size() > 1:  # a run that goes on may have written more in between
        agreed = [(subject, samples)]
        dist.broadcast_object_list(agreed)
        subject, samples = agreed[0]
    with _saved(subject) as path:
        engine = MegatronEngine(replace(subject.engine, optimizer=None, offload=False))
        engine.initialize()
        if subject.checkpoint is not None:
            engine.load(SaveLoadMeta(path=str(subject.checkpoint), weight_format="dist"))
            engine.save(SaveLoadMeta(path=path, weight_format="hf"))
        first, dtype = trained(engine, samples), engine.dtype
        engine.destroy()
        if dist.get_rank() != 0:
            return None
        return _runs(subject, path, first, dtype, samples)


@contextmanager
def _saved(subject: Subject) -> Iterator[str]:
    """Yields the Hugging Face directory of the other programs, which for a checkpoint is made
    inside its run's, where all ranks find it."""
    if subject.checkpoint is None:
        yield subject.engine.path
        return
    path = subject.checkpoint.parents[2] / ".gap"
    try:
        yield str(path)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)


def _runs(
    subject: Subject, path: str, first: Passed, dtype: torch.dtype, samples: Sequence[Sample]
) -> Runs:
    """Returns the trainer's run `first` with those of the server and of transformers."""
    override = subject.engine.override_config
    experts = read_hf_config(path, override=override).moe
    routes = None if first.routes is None or experts is None else Routes(first.routes, experts)
    other = dtype if subject.server_dtype == "auto" else getattr(torch, subject.server_dtype)
    coarse, fine = sorted((dtype, other), key=lambda d: torch.finfo(d).eps, reverse=True)

    model = load_model(path, coarse, override)
    rounded = by_transformers(model, samples, routes)
    del model
    wide = load_model(path, fine, override)
    wide = wide.double() if fine == torch.float32 else wide.float()
    exact = by_transformers(wide, samples, routes)
    del wide
    second = rounded
    if subject.against == "server":
        runner = start_server(path, other, samples, override)
        second = served(runner, samples, routes)
    return Runs(
        first=first,
        second=second,
        rounded=rounded,
        exact=exact,
        unit=torch.finfo(coarse).eps / 2,
    )


def load_model(path: str, dtype: torch.dtype, override: dict[str, Any] | None = None) -> Any:
    """Returns transformers' model of a directory. Its experts compute one by one, in any dtype."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        path,
        config=transformers_config(path, override),
        dtype=dtype,
        attn_implementation="sdpa",
        experts_implementation="eager",
    )
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
