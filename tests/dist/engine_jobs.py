"""What the engine tests run on every rank, and the Hugging Face reference they compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megarl.api.records import FinetuneSpec
from megarl.config.engine import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from megarl.config.parallel import ParallelConfig
from tests.tiny import hf_named, random_batch

Tensors = dict[str, torch.Tensor]
TEMPERATURE = 0.8
# a large epsilon keeps Adam's first step from being the sign of gradients near zero
OPTIMIZER: dict[str, Any] = dict(lr=1e-2, weight_decay=0.1, beta2=0.95, eps=1e-3)


def batch() -> Tensors:
    """Ragged sequences with a weight per sequence, so that no two of them count alike."""
    b = dict(random_batch(n=7, seed=3))
    b["advantages"] = torch.linspace(-1.0, 1.5, len(b["input_ids"]))
    return b


def loss_fn(outputs: Tensors, b: Tensors) -> tuple[torch.Tensor, dict[str, Any]]:
    mask = b["loss_mask"].float()
    pg = -(b["advantages"][:, None] * outputs["logprobs"] * mask).sum()
    entropy = (outputs["entropy"] * mask).sum()
    # a part that is not a sum over tokens: it needs whole sequences
    means = (outputs["logprobs"] * mask).sum(1) / mask.sum(1).clamp(min=1)
    stats = {"entropy": (entropy.detach(), mask.sum()), "rows": (len(mask), 1.0)}
    return pg - 0.1 * entropy + means.square().sum(), stats


def weight_fn(b: Tensors) -> float:
    return 0.37 * float(b["loss_mask"].sum())


def make_engine(path: str, parallel: dict[str, Any], *, trained: bool = True, **over: Any) -> Any:
    from megarl.engine import MegatronEngine

    optimizer = OptimizerConfig(**{**OPTIMIZER, **over.pop("optimizer", {})}) if trained else None
    cfg = TrainEngineConfig(
        path=path, parallel=ParallelConfig(**parallel), optimizer=optimizer,
        mb_spec=MicroBatchSpec(
            max_tokens_per_mb=over.pop("max_tokens", 40),
            forward_max_tokens_per_mb=over.pop("forward_max_tokens", None),
        ),
        **{"lm_head_chunk_tokens": 16, **over},
    )  # fmt: skip
    engine = MegatronEngine(cfg)
    engine.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=8, train_batch_size=1))
    return engine


def state(engine: Any, **kw: Any) -> Tensors:
    return {n: t.clone() for n, t in engine.hf_state(**kw)}


def run_all(path: str, parallel: dict[str, Any], **over: Any) -> dict[str, Any]:
    """Outputs, gradients (without ZeRO-1), figures of the first step, the weights after it and
    after two more."""
    engine = make_engine(path, parallel, **over)
    names = ("logprobs", "entropy", "greedy_match")
    result: dict[str, Any] = {"outputs": engine.forward(
        batch(), outputs=(*names, "logits"), temperature=TEMPERATURE
    )}  # fmt: skip
    kw = dict(outputs=names, temperature=TEMPERATURE)
    result["eval"] = engine.eval_batch(batch(), loss_fn, weight_fn, **kw)
    if not engine.config.optimizer.distributed:
        engine.backward_batch(batch(), loss_fn, weight_fn, **kw)
        result["grads"] = state(engine, grads=True)
    result["stats"] = engine.train_batch(batch(), loss_fn, weight_fn, **kw)
    result["weights"] = state(engine)
    for _ in range(2):
        engine.train_batch(batch(), loss_fn, weight_fn, **kw)
    result["weights after 3 steps"] = state(engine)
    engine.destroy()
    return result


def hf_outputs(hf: Any, b: Tensors) -> Tensors:
    """The outputs of contract 3 by dense formulas: position t speaks about input_ids[:, t]."""
    logits = hf(b["input_ids"], attention_mask=b["attention_mask"].long()).logits.float()
    logp = torch.log_softmax(logits / TEMPERATURE, -1)[:, :-1]
    ids = b["input_ids"][:, 1:]
    mask = b["attention_mask"][:, 1:]

    def shifted(x: torch.Tensor) -> torch.Tensor:
        m = mask.reshape(*mask.shape, *[1] * (x.ndim - 2))
        return torch.cat([torch.zeros_like(x[:, :1]), torch.where(m, x, 0.0)], 1)

    return {
        "logprobs": shifted(logp.gather(-1, ids[..., None])[..., 0]),
        "entropy": shifted(-(logp.exp() * logp).sum(-1)),
        "greedy_match": shifted((logp.argmax(-1) == ids).float()),
        "logits": shifted(logits[:, :-1] / TEMPERATURE),
    }


def hf_reference(hf: Any) -> dict[str, Any]:
    """What `run_all` should give, from Hugging Face's model, autograd and torch's AdamW."""
    optimizer = torch.optim.AdamW(
        [
            dict(params=[p for p in hf.parameters() if p.ndim > 1], weight_decay=0.1),
            dict(params=[p for p in hf.parameters() if p.ndim == 1], weight_decay=0.0),
        ],
        lr=OPTIMIZER["lr"], betas=(0.9, 0.95), eps=OPTIMIZER["eps"],
    )  # fmt: skip
    first = _hf_step(hf, optimizer)
    for _ in range(2):
        last = _hf_step(hf, optimizer)
    return {**first, "weights after 3 steps": last["weights"]}


def _hf_step(hf: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    b = batch()
    optimizer.zero_grad()
    outputs = hf_outputs(hf, b)
    loss_sum, stats = loss_fn(outputs, b)
    loss = loss_sum / weight_fn(b)
    loss.backward()
    grads = hf_named(hf, {n: p.grad.clone() for n, p in hf.named_parameters()})
    norm = float(torch.nn.utils.clip_grad_norm_(hf.parameters(), 1.0))
    optimizer.step()
    return {
        "outputs": {k: v.detach() for k, v in outputs.items()},
        "grads": grads,
        "loss": float(loss.detach()),
        "entropy": float(stats["entropy"][0] / stats["entropy"][1]),
        "grad_norm": norm,
        "weights": hf_named(hf, {n: p.detach().clone() for n, p in hf.named_parameters()}),
    }


def save_model(root: Path, kind: str, tie: bool) -> str:
    from tests.tiny import save_tiny

    path = root / f"{kind}-{'tied' if tie else 'untied'}"
    if not path.exists():
        save_tiny(path, kind, tie=tie)
    return str(path)
