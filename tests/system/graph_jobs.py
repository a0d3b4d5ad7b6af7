"""What the workers of tests/system/test_graph.py do, and the same steps without a graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.api.batch import Batch
from megarl.api.records import FinetuneSpec
from megarl.config.algo import PPOActorConfig, PPOCriticConfig
from megarl.config.base import SeamConfig
from megarl.config.engine import OptimizerConfig, ParallelConfig, TrainEngineConfig
from megarl.trainer.roles import MegatronActor, MegatronCritic, MegatronRef, MegatronSFT
from megarl.utils.child import wait_until
from tests.dist.engine_jobs import state
from tests.tiny import random_batch

N, STEPS = 16, 3
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=N * STEPS, train_batch_size=N)
GAE: dict[str, Any] = dict(discount=0.9, gae_lambda=0.95, kl_ctl=0.1, bootstrap=True)


def samples(step: int) -> dict[str, Tensor]:
    """Returns a batch as rollouts bring it, another one in every step."""
    batch = dict(random_batch(n=N, seed=3 + step))
    drawn = torch.Generator().manual_seed(7 + step)
    mask = batch["loss_mask"]
    batch["logprobs"] = mask * (0.1 * torch.randn(mask.shape, generator=drawn) - 4.8)
    batch["versions"] = torch.where(mask, step, -1).int()
    batch["rewards"] = torch.randn(N, generator=drawn)
    batch["baseline"] = torch.randn(N, generator=drawn)
    batch["truncated"] = torch.arange(N) % 3 == 0
    batch["episode_ids"] = torch.arange(N) // 4
    batch["group_ids"] = batch["episode_ids"].clone()
    return batch


def make_batch(step: int) -> Batch:
    """Returns the batch, all of which the one worker that calls this holds."""
    return Batch.from_padded(samples(step))


class _Meets:
    """Has an update wait, where there is a directory `meeting`, until that of the other model, or
    what else leaves a file there, has begun: what does not run at the same time never ends."""

    meeting: Path | None = None

    def ppo_update(self, batch: Any) -> dict[str, float]:
        if self.meeting is not None:
            step = self.get_version()  # type: ignore[attr-defined]
            (self.meeting / f"{type(self).__name__} {step}").touch()
            both = lambda: len(list(self.meeting.glob(f"* {step}"))) == 2  # noqa: E731
            wait_until(both, timeout=60.0)
            assert both(), "nothing else has begun meanwhile"
        return super().ppo_update(batch)  # type: ignore[misc]


class MeetingActor(_Meets, MegatronActor):
    pass


class MeetingCritic(_Meets, MegatronCritic):
    pass


def roles(
    path: str,
    *names: str,
    critic: ParallelConfig | None = None,
    meeting: Path | None = None,
    **actor: Any,
) -> Any:
    """Returns roles that are not initialized, by model. meeting: see _Meets."""
    every: dict[str, Any] = dict(path=path, dtype="float32")
    trained = every | dict(optimizer=OptimizerConfig(lr=1e-3))
    updates = dict(ppo_n_minibatches=2)
    policy = PPOActorConfig(**trained, **updates, logp_gap_warn=100.0, **actor)
    value = PPOCriticConfig(**trained, **updates, parallel=critic or ParallelConfig())
    made: dict[str, Any] = {
        "actor": MeetingActor(policy, temperature=1.0),
        "critic": MeetingCritic(value),
        "ref": MegatronRef(TrainEngineConfig(**every), temperature=1.0),
        "model": MegatronSFT(TrainEngineConfig(**trained)),
    }
    made["actor"].meeting = made["critic"].meeting = meeting
    return {name: made[name] for name in names}


def remax() -> SeamConfig:
    """Returns the section that chooses ReMax."""
    return SeamConfig(type="remax")


def state_of(role: Any) -> dict[str, Tensor]:
    """Returns the weights by HF name, on the first of the role's workers."""
    role.onload()
    return state(role.engine)


def weight_bytes(role: Any) -> int:
    """Returns the bytes of weights that this worker holds of the role."""
    params = role.engine.state.params.values() if role.engine.is_member else ()
    return sum(p.untyped_storage().nbytes() for p in params)


def publish(role: Any, version: int) -> dict[str, float]:
    """Stands for the weight publisher where no server is."""
    role.set_version(version)
    return {}


# ---- the same steps by the roles' verbs, as the trainers write them


def _ppo(actor: Any, critic: Any, batch: Batch) -> None:
    actor.compute_prox_logp(batch)
    critic.compute_values(batch)
    actor.compute_gae(batch, **GAE | dict(kl_ctl=0.0))
    critic.ppo_update(batch)
    critic.step_lr_scheduler()
    actor.ppo_update(batch)


def _compared(actor: Any, ref: Any, batch: Batch) -> None:
    actor.compute_prox_logp(batch)
    if ref is not None:
        batch["ref_logp"] = ref.compute_logp(batch)
    actor.compute_advantages(batch)
    actor.ppo_update(batch)


def plain(path: str, *names: str, **how: Any) -> dict[str, dict[str, Tensor]]:
    """Returns the weights of the trained models after all steps, made without a graph."""
    made = roles(path, *names, **how)
    for name, role in made.items():
        role.initialize(None, None if name == "ref" else SPEC)
    for step in range(STEPS):
        batch = Batch.from_local(samples(step) if dist.get_rank() == 0 else None)
        if "critic" in made:
            _ppo(made["actor"], made["critic"], batch)
        elif "actor" in made:
            _compared(made["actor"], made.get("ref"), batch)
        else:
            made["model"].train(batch)
        for role in made.values():
            role.set_version(step + 1)
        made["actor" if "actor" in made else "model"].step_lr_scheduler()
    weights = {name: state_of(role) for name, role in made.items() if name != "ref"}
    for role in made.values():
        role.destroy()
    return weights
