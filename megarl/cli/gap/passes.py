"""Runs the same tokens through the trainer, the embedded server and transformers, and keeps what
every part of every layer put out.

T tokens of all samples, sample after sample; L layers, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
from megarl.models.shapes import MoEShape
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
class Sample:
    """Holds tokens to compare on; the policy wrote those from position `prompt` on."""

    ids: list[int]
    prompt: int

    def __post_init__(self) -> None:
        if not 0 < self.prompt < len(self.ids):
            raise ValueError(
                f"a sample of {len(self.ids)} tokens with a prompt of {self.prompt}: both prompt "
                "and answer need a token"
            )


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
    seq = _sequence(prompt)
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


def _sequence(prompt: list[int]) -> ServedSequence:
    return ServedSequence(
        rid="gap",
        prompt=prompt,
        params=SamplingParams(),
        max_new_tokens=0,
        stop_ids=frozenset(),
        seed=0,
        call=None,  # type: ignore[arg-type]  # nobody waits for it
        wants_logprobs=False,
    )


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
        wide = value.detach() if value.dtype == torch.float64 else value.detach().float()
        self.parts.setdefault(part, []).append(wide.flatten(0, -2).cpu().clone())

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
        wide = logits if logits.dtype == torch.float64 else logits.float()
        labels = torch.tensor(sample.ids[sample.prompt :], device=wide.device)[:, None]
        found = wide.log_softmax(-1).gather(1, labels)
        self.parts.setdefault(part, []).append(found.cpu())

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
    wide = logits if logits.dtype == torch.float64 else logits.float()
    weights = (wide.sigmoid() if experts.sigmoid else wide.softmax(-1)).gather(1, chosen)
    if experts.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * experts.scale
