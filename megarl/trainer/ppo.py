"""PPO with a critic (arXiv 1707.06347): the RL recipe with a value function beside the policy."""

from __future__ import annotations

from typing import Any

from megarl.algos import Role
from megarl.config.algo import GAEConfig
from megarl.config.recipes import PPOConfig
from megarl.observability.stats_tracker import record_timing
from megarl.trainer import rl
from megarl.trainer.roles import make_critic
from megarl.trainer.rollout_metrics import rollout_metrics, trained_metrics


class PPOTrainer(rl.RLTrainer):
    """Trains a policy by PPO: an RLTrainer with a critic as its second trained role."""

    cfg: PPOConfig

    def set_up_others(self) -> dict[str, Role]:
        """Makes the critic and the settings of its advantages; returns {"critic": the critic}.
        Collective."""
        cfg = self.cfg
        self.critic = self.ctx.trainers.make(make_critic, cfg)
        self.critic.initialize(None, self.spec)
        self.check.watch(self.critic)
        self.gae = gae_settings(cfg)
        return {"critic": self.critic}

    def step(self, step: int) -> dict[str, float]:
        """Makes step `step` (from 0) of PPO; returns its metrics."""
        with record_timing("rollout"):
            batch = self.session.prepare_batch()
        batch = self.score(batch)
        self.check.has_trained_tokens(batch)
        version = self.actor.get_version()
        stats = rollout_metrics(batch, version=version)
        self.check.rewards_differ(stats)
        with record_timing("logp"):
            self.compute_prox_logp(batch, read=False)
        self.compare_with_ref(batch)
        with record_timing("values"):
            self.critic.compute_values(batch)
        self.actor.compute_gae(batch, **self.gae)
        with record_timing("train_critic"):
            critic_stats = self.critic.ppo_update(batch)
            self.critic.step_lr_scheduler()
        stats |= {f"critic/{name}": value for name, value in critic_stats.items()}
        with record_timing("train"):
            stats |= self.actor.ppo_update(batch)
            self.actor.step_lr_scheduler()
        stats |= trained_metrics(batch, version=version)
        stats |= self.session.account(batch)
        with record_timing("update_weights"):
            stats |= self.publisher.publish(step + 1)
        self.critic.set_version(step + 1)
        return stats | self.speed(batch)

    def destroy(self) -> None:
        """Destroys the critic, then the other roles. Collective."""
        self.critic.destroy()
        super().destroy()


def gae_settings(cfg: PPOConfig) -> dict[str, Any]:
    """Returns what a recipe's actor.compute_gae takes beside the batch."""
    return dict(
        discount=cfg.discount,
        gae_lambda=cfg.gae_lambda,
        kl_ctl=cfg.kl_ctl,
        **vars(GAEConfig(**cfg.gae)),
    )
