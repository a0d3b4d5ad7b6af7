"""A small TrainEngine: a bigram model on padded tensors, plain autograd; and batches for it."""

from __future__ import annotations

import math
from typing import Any

import torch

from megarl.algos import Actor
from megarl.api.batch import Batch, Tokens
from megarl.api.engine import PARTS, Metrics, TrainEngine
from megarl.config.algo import PPOActorConfig

VOCAB = 11


class BigramEngine(TrainEngine):
    """logits of x_t are a row of a table chosen by x_{t-1}; micro-batches of `rows` sequences."""

    def __init__(self, lr: float = 0.5, rows: int = 2, *, seed: int = 0, topk: int = VOCAB) -> None:
        g = torch.Generator().manual_seed(seed)
        self.topk = topk
        self.table = torch.randn(VOCAB, VOCAB, generator=g, requires_grad=True)
        self.lr, self.rows, self.version, self.calls = lr, rows, 0, []

    def logits(self, ids):
        """Those of x_t at t-1, from tokens [b,S]."""
        return self.table[ids[:, :-1]]

    def _outputs(self, batch, outputs, temperature):
        ids = batch["input_ids"]
        logits = self.logits(ids) / temperature
        logp = logits.log_softmax(-1)
        made = {
            "logprobs": logp.gather(-1, ids[:, 1:, None])[..., 0],
            "entropy": -(logp.exp() * logp).sum(-1),
            "greedy_match": (logits.argmax(-1) == ids[:, 1:]).float(),
        }
        made["topk_logprobs"], made["topk_ids"] = top = logp.topk(self.topk)
        made["topk_tail"] = _outside(logp, top.indices)
        if "given_ids" in batch:
            ids = batch["given_ids"][:, 1:].long().clamp(min=0)  # -1 names none: nothing is read
            made["given_logprobs"] = logp.gather(-1, ids)
            made["given_tail"] = _outside(logp, ids)
        first = {k: torch.zeros_like(v[:, :1]) for k, v in made.items()}
        return {k: torch.cat([first[k], made[k]], 1) for k in outputs}

    def _run(self, batch, loss_fn, weight_fn, outputs, temperature, backward):
        total, figures, self.made = 0.0, {}, []
        weight = weight_fn(batch)
        for i in range(0, len(batch["input_ids"]), self.rows):
            part = {k: v[i : i + self.rows] for k, v in batch.items()}
            self.made.append(self._outputs(part, outputs, temperature))
            loss, stats = loss_fn(self.made[-1], part)
            if backward:
                (loss / weight).backward()
            total += float(loss) / weight
            for k, (s, w) in stats.items():
                have = figures.get(k, (0.0, 0.0))
                figures[k] = (have[0] + float(s), have[1] + float(w))
        return {"loss": total} | {k: s / w for k, (s, w) in figures.items()}

    def place(self, batch):
        """Everything is here."""

    def train_batch(
        self,
        input_,
        loss_fn,
        loss_weight_fn,
        *,
        outputs=("logprobs",),
        temperature=1.0,
        whole_groups=False,
        keep=(),
    ):
        given, input_ = input_, input_.padded() if isinstance(input_, Batch) else input_
        self.calls.append(input_)
        stats = self._run(input_, loss_fn, loss_weight_fn, outputs, temperature, True)
        kept = {k: torch.cat([made[k].detach() for made in self.made]) for k in keep}
        if isinstance(given, Batch):
            kept = {k: Tokens.from_padded(v, given.lengths) for k, v in kept.items()}
        norm = self.table.grad.norm().item()
        updated = math.isfinite(norm) and math.isfinite(stats["loss"])
        with torch.no_grad():
            if updated:
                self.table -= self.lr * self.table.grad
            self.table.grad = None
        stats |= {
            "grad_norm": norm,
            "lr": self.lr / len(self.calls),
            "update_successful": float(updated),
        }
        return Metrics(stats, {}, kept)

    @torch.no_grad()
    def eval_batch(
        self,
        input_,
        loss_fn,
        loss_weight_fn,
        *,
        outputs=("logprobs",),
        temperature=1.0,
        whole_groups=False,
    ):
        input_ = input_.padded() if isinstance(input_, Batch) else input_
        return self._run(input_, loss_fn, loss_weight_fn, outputs, temperature, False)

    @torch.no_grad()
    def forward(
        self,
        input_,
        output_seqlens=None,
        post_hook=None,
        aggregate_fn=torch.cat,
        *,
        outputs=("logprobs",),
        temperature=1.0,
    ):
        if isinstance(input_, Batch):
            # no routes that another pass took
            assert set(input_) <= {"input_ids", "unit_ids", "rollout_ids"}
            made = self._outputs(input_.padded(names=["input_ids"]), outputs, temperature)
            made = {k: Tokens.from_padded(v, input_.lengths) for k, v in made.items()}
        else:
            assert set(input_) == {"input_ids", "attention_mask"}
            made = self._outputs(input_, outputs, temperature)
        return made[outputs[0]] if len(outputs) == 1 else made

    dtype = torch.float32

    def hf_state(self):
        yield "table", self.table.detach()

    def set_version(self, version):
        self.version = version

    def get_version(self):
        return self.version

    def _note(self, *call):
        self.calls.append(call)

    def initialize(self, addr=None, ft_spec=None):
        self._note("initialize", addr, ft_spec)

    def destroy(self):
        self._note("destroy")

    def step_lr_scheduler(self):
        self._note("step_lr_scheduler")

    def train(self, mode=True):
        return self

    def onload(self, parts=PARTS, *, behind=False):
        self._note("onload")

    def offload(self, parts=PARTS):
        self._note("offload")

    def save(self, meta):
        self._note("save", meta)

    def load(self, meta):
        self._note("load", meta)

    def get_scheduling_config(self):
        return {"cpu": 1}

    def upload_weights(self, meta):
        self._note("upload_weights", meta)
        return {"bytes": 8.0}


def _outside(logp: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    inside = torch.zeros_like(logp, dtype=torch.bool).scatter(-1, ids, True)
    if inside.all():
        return torch.full(logp.shape[:-1], -torch.inf)
    return logp.masked_fill(inside, -torch.inf).logsumexp(-1)


def rollout(engine: BigramEngine, temperature: float = 1.0, groups: int = 4, n: int = 4) -> dict:
    """Samples of the engine's own policy; a reward for every token 7."""
    g = torch.Generator().manual_seed(1)
    b, s = groups * n, 8
    ids = torch.randint(VOCAB, (b, 1), generator=g)
    for _ in range(s - 1):
        p = (engine.table.detach()[ids[:, -1]] / temperature).softmax(-1)
        ids = torch.cat([ids, torch.multinomial(p, 1, generator=g)], 1)
    mask = torch.arange(s)[None].expand(b, s) >= 2
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(mask), "loss_mask": mask}
    logp = engine.forward(
        {k: batch[k] for k in ("input_ids", "attention_mask")}, temperature=temperature
    )
    return batch | {
        "logprobs": logp * mask,
        "versions": torch.where(mask, 0, -1).int(),
        "rewards": ((ids == 7) & mask).sum(1).float(),
        "group_ids": torch.arange(b) // n,
        "baseline": torch.full((b,), 0.25),
        "reward_part/right": ((ids == 7) & mask).sum(1).float(),
        "reward_part/short": -((ids == 8) & mask).sum(1).float(),
    }


def prepared(config: PPOActorConfig, temperature: float = 1.0) -> tuple[Any, dict]:
    actor: Any = Actor(config, BigramEngine(), temperature=temperature)
    batch = rollout(actor.engine, temperature)
    actor.compute_prox_logp(batch)
    actor.compute_advantages(batch)
    return actor, batch


def whole(**fields: torch.Tensor) -> Batch:
    """A Batch of padded fields without padding."""
    ids = torch.zeros(next(iter(fields.values())).shape, dtype=torch.long)
    mask = torch.ones_like(ids, dtype=torch.bool)
    return Batch.from_padded({"input_ids": ids, "attention_mask": mask, **fields})
