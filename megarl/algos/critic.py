"""Critic: the value function of PPO, trained beside the policy."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from megarl.algos.losses import LOSS_WEIGHTS, critic_loss
from megarl.algos.metrics import explained_variance
from megarl.algos.minibatches import mean_metrics, minibatches
from megarl.algos.role import Role
from megarl.api.engine import TrainEngine
from megarl.config.algo import PPOCriticConfig

Batch = dict[str, Tensor]
INPUTS = ("input_ids", "attention_mask", "loss_mask", "values", "returns")


class Critic(Role):
    """One training step in verbs:

    critic.compute_values(batch)
    actor.compute_gae(batch, ...)       # advantages and returns
    stats = critic.ppo_update(batch)
    critic.step_lr_scheduler()
    """

    def __init__(self, config: PPOCriticConfig, engine: TrainEngine, *, seed: int = 0) -> None:
        """seed: of the order of mini-batches."""
        super().__init__(engine)
        self.config, self.seed = config, seed
        self._weight = LOSS_WEIGHTS[config.loss_agg]
        self._loss = partial(critic_loss, value_clip=config.value_clip, loss_agg=config.loss_agg)

    def compute_values(self, batch: Batch) -> None:
        """Adds batch["values"] [B,S], v(state before x_t), and batch["last_value"] [B]."""
        batch["values"], batch["last_value"] = self.forward_values(batch)

    def ppo_update(self, batch: Batch) -> dict[str, float]:
        """ppo_n_minibatches optimizer steps towards batch["returns"]; metrics averaged over them,
        and explained_variance of the values before the update.
        """
        if missing := [key for key in INPUTS if key not in batch]:
            raise ValueError(
                f"ppo_update: the batch has no {missing[0]!r}: call critic.compute_values(batch) "
                "and actor.compute_gae(batch) first"
            )
        explained = explained_variance(batch["values"], batch["returns"], batch["loss_mask"])
        seed = self.seed * 1_000_003 + self.engine.get_version()
        updates = [
            self.train_batch(minibatch, self._loss, self._weight, outputs=("values",))
            for _, minibatch in minibatches(
                {key: batch[key] for key in INPUTS},
                self.config.ppo_n_minibatches,
                self._weight,
                seed=seed,
            )
        ]
        return mean_metrics(updates) | {"explained_variance": explained}
