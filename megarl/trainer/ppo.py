"""PPO with a critic (arXiv 1707.06347): the RL recipe with a value function beside the policy."""

from __future__ import annotations

import copy

from megarl.algos import Role
from megarl.config.check import model_path
from megarl.config.recipes import PPOConfig
from megarl.trainer import rl
from megarl.trainer.roles import MegatronCritic, MegatronRewardModel
from megarl.trainer.rollout_metrics import rollout_metrics


def run(cfg: PPOConfig) -> None:
    """The whole run, on every rank. Needs generation servers (rollout.addresses)."""
    rl.run(cfg, PPOTrainer)


class PPOTrainer(rl.RLTrainer):
    cfg: PPOConfig

    def set_up_others(self) -> dict[str, Role]:
        cfg = self.cfg
        config = copy.deepcopy(cfg.critic)
        config.path = model_path(cfg, "critic")
        self.critic = MegatronCritic(config, seed=cfg.seed)
        self.critic.initialize(None, self.spec)
        self.check.watch(self.critic)
        self.reward_model: MegatronRewardModel | None = None
        if cfg.reward_model is not None:
            self.reward_model = MegatronRewardModel(cfg.reward_model, seed=cfg.seed)
            self.reward_model.initialize(None, None)
        return {"critic": self.critic}

    def step(self, step: int) -> dict[str, float]:
        """One step of PPO."""
        cfg = self.cfg
        self.check.begin_step(step + 1)
        with self.timers.phase("step"):
            with self.timers.phase("rollout"):
                batch = self.next_batch()
            if self.reward_model is not None:
                with self.timers.phase("reward_model"):
                    batch["rewards"] = self.reward_model.compute_rewards(batch)
            self.check.has_trained_tokens(batch)
            stats = rollout_metrics(batch, version=self.actor.get_version())
            self.check.rewards_differ(stats)
            with self.timers.phase("logp"):
                self.actor.compute_prox_logp(batch)
            self.compare_with_ref(batch)
            with self.timers.phase("values"):
                self.critic.compute_values(batch)
            self.actor.compute_gae(
                batch,
                discount=cfg.discount,
                gae_lambda=cfg.gae_lambda,
                kl_ctl=cfg.kl_ctl,
                bootstrap=cfg.bootstrap_truncated,
            )
            with self.timers.phase("train_critic"):
                critic_stats = self.critic.ppo_update(batch)
                self.critic.step_lr_scheduler()
            stats |= {f"critic/{name}": value for name, value in critic_stats.items()}
            with self.timers.phase("train"):
                stats |= self.actor.ppo_update(batch)
                self.actor.step_lr_scheduler()
            stats |= self.publish(batch, step + 1)
        self.critic.set_version(step + 1)
        return stats

    def destroy(self) -> None:
        if self.reward_model is not None:
            self.reward_model.destroy()
        self.critic.destroy()
        super().destroy()
