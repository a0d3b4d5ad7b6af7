"""Critic trains the value function of PPO, beside the policy."""

from __future__ import annotations

from functools import partial

from megarl.algos.aggregation import LOSS_WEIGHTS
from megarl.algos.losses import critic_loss
from megarl.algos.metrics import explained_variance
from megarl.algos.minibatches import mean_metrics, minibatches
from megarl.algos.role import Role, among_its_ranks
from megarl.algos.rollouts import refuse_branches
from megarl.algos.rows import Data, as_batch, put, trained_tokens
from megarl.api.engine import TrainEngine
from megarl.config.algo import PPOCriticConfig
from megarl.config.check_parts import check_critic
from megarl.parallel.placement import split_minibatches

INPUTS = ("input_ids", "attention_mask", "loss_mask", "values", "returns")


class Critic(Role):
    """Trains the value function. One training step in verbs:

    critic.compute_values(batch)
    actor.compute_gae(batch, ...)       # advantages and returns
    stats = critic.ppo_update(batch)
    critic.step_lr_scheduler()
    """

    def __init__(self, config: PPOCriticConfig, engine: TrainEngine, *, seed: int = 0) -> None:
        """Takes the critic's section and its engine. seed: of the order of mini-batches."""
        super().__init__(engine)
        check_critic(config)
        self.config, self.seed = config, seed
        self._weight = LOSS_WEIGHTS[config.loss_agg]
        self._loss = partial(
            critic_loss,
            value_clip=config.value_clip,
            huber=config.value_huber,
            loss_agg=config.loss_agg,
        )

    def compute_values(self, batch: Data) -> None:
        """Adds batch["values"] [B,S], v(state before x_t), and batch["last_value"] [B]. Raises
        ValueError for rollouts of several rows."""
        refuse_branches(batch, "compute_values")
        values, batch["last_value"] = self.forward_values(batch)
        put(batch, "values", values)

    @among_its_ranks
    def ppo_update(self, batch: Data) -> dict[str, float]:
        """Makes ppo_n_minibatches optimizer steps towards batch["returns"] [B,S]; returns metrics
        averaged over them, and explained_variance of the values before the update. Raises
        ValueError for a missing field, or a batch without a trained token."""
        if missing := [key for key in INPUTS if key != "attention_mask" and key not in batch]:
            raise ValueError(
                f"ppo_update: the batch has no {missing[0]!r}: call critic.compute_values(batch) "
                "and actor.compute_gae(batch) first"
            )
        whole = as_batch(batch)
        explained = explained_variance(whole)
        seed = self.seed * 1_000_003 + self.engine.get_version()
        parts = split_minibatches(whole.unit_ids, self.config.ppo_n_minibatches, seed=seed)
        updates = [
            self.train_batch(minibatch, self._loss, self._weight, outputs=("values",))
            for _, minibatch in minibatches(batch, INPUTS, parts, trained_tokens(whole))
        ]
        return mean_metrics(updates) | {"explained_variance": explained}
