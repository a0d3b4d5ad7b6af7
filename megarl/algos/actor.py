"""Actor: the trained policy of PPO-like algorithms (GRPO and its relatives)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarl.algos.advantages import (
    gae,
    grpo_advantages,
    place_rewards,
    shape_rewards,
    spread_over_tokens,
    whiten,
)
from megarl.algos.kl import kl_estimate
from megarl.algos.losses import LOSS_WEIGHTS, grpo_loss
from megarl.algos.metrics import Decode, logp_gap_stats, show_gaps, spell_ids, worst_logp_gaps
from megarl.algos.minibatches import mean_metrics, minibatches, skipped_metrics
from megarl.algos.role import Role
from megarl.algos.rows import Data, as_batch, map_rows, put, trained_tokens
from megarl.api.batch import Batch, Padded, Tokens
from megarl.api.engine import TrainEngine
from megarl.config.algo import PPOActorConfig
from megarl.observability.logging import get_logger, warn_once_per_world
from megarl.parallel.placement import split_minibatches

log = get_logger(__name__)


class Actor(Role):
    """One training step in verbs:

        actor.compute_prox_logp(batch)                     # recompute_logprob
        batch["ref_logp"] = ref.compute_logp(batch)        # kl_coef > 0
        actor.compute_advantages(batch)
        stats = actor.ppo_update(batch)
        actor.step_lr_scheduler()

    Which logprobs the clipped ratio starts from:
      recompute_logprob, use_decoupled_loss   prox_logp, times exp(prox_logp - logprobs)
      recompute_logprob                       prox_logp: the trainer's own view of the policy, which
                                              leaves out the server's rounding (common practice)
      neither                                 logprobs, as the server reported them
    """

    def __init__(
        self,
        config: PPOActorConfig,
        engine: TrainEngine,
        *,
        temperature: float,
        seed: int = 0,
        decode: Decode = spell_ids,
    ) -> None:
        """temperature: that of generation (gconfig.temperature), without a default: at another one
        the ratio would start from the logprobs of a different policy. seed: of the order of
        mini-batches; decode: token ids to text, for warnings that show tokens.
        """
        super().__init__(engine)
        _check(config, temperature)
        self.config, self.temperature, self.seed = config, temperature, seed
        self.decode = decode
        self._old = "prox_logp" if config.recompute_logprob else "logprobs"
        self._weight = LOSS_WEIGHTS[config.loss_agg]
        self._loss = partial(
            grpo_loss,
            eps_clip=config.eps_clip,
            eps_clip_higher=config.eps_clip_higher,
            c_clip=config.c_clip,
            old_logp=self._old,
            decoupled=config.use_decoupled_loss,
            behav_imp_weight_cap=config.behav_imp_weight_cap,
            kl_coef=config.kl_coef,
            kl_estimator=config.kl_estimator,
            loss_agg=config.loss_agg,
        )

    def compute_logp(self, batch: Data) -> Any:
        """Returns log-probabilities under the current weights, 0 at t=0: Tokens for a Batch, [B,S]
        for a plain dict."""
        self._plan(batch)
        return self.forward_logp(batch, self.temperature)

    def compute_prox_logp(self, batch: Data) -> None:
        """With recompute_logprob adds batch["prox_logp"] [B,S], the logprobs before the update;
        with moe.router_replay also the routing behind them, which the update will repeat.
        """
        if self.config.recompute_logprob and self.config.moe.router_replay:
            self._plan(batch)
            names = ("logprobs", "routed_experts")
            found = self.forward(batch, names, self.temperature)
            batch["prox_logp"], batch["routed_experts"] = (found[name] for name in names)
        elif self.config.recompute_logprob:
            batch["prox_logp"] = self.compute_logp(batch)

    def compute_advantages(self, batch: Data) -> None:
        """Adds batch["advantages"] [B,S] from rewards [B], group_ids [B], loss_mask [B,S]."""
        rewards = self._shaped_rewards(batch["rewards"])
        group_ids = batch.get("group_ids")
        if group_ids is None:
            if self.config.adv_norm in ("group", "group_mean"):
                raise ValueError(f"adv_norm={self.config.adv_norm!r} needs batch['group_ids']")
            group_ids = torch.arange(len(rewards))
        mode = "none" if self.config.adv_norm == "batch" else self.config.adv_norm
        advantages = grpo_advantages(rewards, group_ids, mode)
        whole = as_batch(batch)
        (whole["advantages"],) = map_rows(
            whole,
            lambda rows, part: (spread_over_tokens(advantages[rows], part["loss_mask"]),),
            ["loss_mask"],
        )
        put(batch, "advantages", self._normed(whole))

    def compute_gae(
        self, batch: Data, *, discount: float, gae_lambda: float, kl_ctl: float, bootstrap: bool
    ) -> None:
        """PPO with a critic: adds batch["advantages"], ["returns"] and ["token_rewards"] [B,S] from
        rewards [B], values [B,S] and last_value [B].

        kl_ctl: weight of the KL to the reference (ref_logp) as a penalty in every token's reward.
        bootstrap: an answer that was cut (`truncated`) ends with the value of going on.
        """
        keys = ["rewards", "values", "last_value"]
        keys += ["truncated"] if bootstrap else []
        keys += ["ref_logp", self._old] if kl_ctl else []
        _need(batch, keys, what="compute_gae")
        rewards = self._shaped_rewards(batch["rewards"])
        cut = batch["truncated"] if bootstrap else torch.zeros_like(batch["last_value"])

        def of_rows(rows: Tensor, part: Padded) -> tuple[Tensor, ...]:
            earned = place_rewards(rewards[rows], part["loss_mask"])
            if kl_ctl:
                kl = kl_estimate(part[self._old], part["ref_logp"], "k1")
                earned -= kl_ctl * kl.where(part["loss_mask"].bool(), 0.0)
            advantages, returns = gae(
                earned,
                part["values"],
                part["loss_mask"],
                last_value=(part["last_value"] * cut[rows]),
                discount=discount,
                gae_lambda=gae_lambda,
            )
            return earned, returns, advantages

        whole, names = as_batch(batch), ("token_rewards", "returns", "advantages")
        for name, made in zip(names, map_rows(whole, of_rows, [*keys, "loss_mask"]), strict=True):
            whole[name] = made
            put(batch, name, self._normed(whole) if name == "advantages" else made)

    def place(self, batch: Batch) -> None:
        """Gives the batch's tokens to the ranks on which this actor will train on them.

        Collective. compute_logp does so by itself; call it where another role, in another layout,
        would be the first to get the batch.
        """
        self._plan(batch)
        self.engine.place(batch)

    def _plan(self, data: Data) -> None:
        """Tells a batch its mini-batches before its first pass, which balances them over ranks."""
        if isinstance(data, Batch) and data.minibatches is None:
            data.minibatches = self._minibatches(data)

    def _minibatches(self, batch: Batch) -> list[list[int]]:
        seed = self.seed * 1_000_003 + self.engine.get_version()
        return split_minibatches(batch.unit_ids, self.config.ppo_n_minibatches, seed=seed)

    def _normed(self, batch: Batch) -> Tokens:
        if self.config.adv_norm == "batch":
            return whiten(batch, "advantages")
        advantages: Tokens = batch["advantages"]
        return advantages

    def _shaped_rewards(self, rewards: Tensor) -> Tensor:
        bad = (~rewards.isfinite()).nonzero().flatten().tolist()
        if bad:  # clipping would hide an infinite one, and a NaN spoils its whole group
            raise ValueError(
                f"rewards of rows {bad[:8]} are {rewards[bad[:8]].tolist()}: a reward must be a "
                "finite number; mend the reward function, or reject the episode"
            )
        return shape_rewards(rewards, self.config)

    def ppo_update(self, batch: Data) -> dict[str, float]:
        """ppo_n_minibatches optimizer steps over the batch; metrics averaged over them.

        Beside the loss's metrics: first_ratio_abs_dev (mean |ratio - 1| of the first mini-batch,
        where the weights are still the old ones: 0 up to rounding), n_updates, skipped_updates
        (refused because something was not finite; they enter no mean), skipped_sequences and
        skipped_tokens (theirs), and the trainer/server logprob gap. Adds batch["skipped"] [B], true
        where a sequence's update was skipped.
        """
        keys = ["input_ids", "attention_mask", "loss_mask", "logprobs", "advantages"]
        keys += ["prox_logp"] if self._old == "prox_logp" else []
        keys += ["ref_logp"] if self.config.kl_coef or "ref_logp" in batch else []
        keys += ["routed_experts"] if self.config.moe.router_replay else []
        _need(batch, keys)
        whole = as_batch(batch)
        gap, trained = self._logp_gap(whole), trained_tokens(whole)
        parts = self._minibatches(whole)
        updates = []
        skipped = torch.zeros(len(whole), dtype=torch.bool)
        for rows, minibatch in minibatches(batch, keys, parts, trained):
            update = self.train_batch(
                minibatch,
                self._loss,
                self._weight,
                outputs=("logprobs", "entropy"),
                temperature=self.temperature,
            )
            skipped[rows] = not update["update_successful"]
            updates.append(update)
        batch["skipped"] = skipped
        return _merge(updates) | gap | skipped_metrics(trained, skipped)

    def _logp_gap(self, batch: Batch) -> dict[str, float]:
        """The trainer/server gap; warns with the worst tokens if they are not a staleness effect.

        Tokens that older weights wrote differ rightly, so only tokens of the current version warn.
        """
        if "prox_logp" not in batch:
            return {}
        bound = self.config.logp_gap_warn
        worst = worst_logp_gaps(batch, version=self.engine.get_version(), above=bound)
        if worst:
            warn_once_per_world(
                log,
                "trainer and server disagree about tokens of the current weights by more than "
                "logp_gap_warn=%g (wrong temperature, stale weights or a numerical problem):\n  %s",
                bound,
                "\n  ".join(show_gaps(worst, batch, decode=self.decode)),
            )
        return logp_gap_stats(batch)


def _merge(updates: list[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps; root mean squares and sample size derived."""
    stats = mean_metrics(updates)
    if not stats["n_updates"]:
        return stats
    first = next(u for u in updates if u["update_successful"])
    stats["first_ratio_abs_dev"] = first["ratio_abs_dev"]
    stats["ratio_rms_dev"] = math.sqrt(stats.pop("ratio_sq_dev"))
    square = stats.pop("behav_imp_weight_sq")
    # Kish's effective sample size, as a fraction of the tokens
    stats["behav_ess"] = stats["behav_imp_weight"] ** 2 / square if square else 0.0
    return stats


def _need(batch: Data, keys: list[str], *, what: str = "ppo_update") -> None:
    hints = {
        "prox_logp": "actor.compute_prox_logp(batch) (recompute_logprob is on)",
        "routed_experts": "actor.compute_prox_logp(batch) (moe.router_replay is on)",
        "ref_logp": "batch['ref_logp'] = ref.compute_logp(batch) (kl_coef is not 0)",
        "advantages": "actor.compute_advantages(batch)",
        "values": "critic.compute_values(batch)",
    }
    for key in keys:
        if key not in batch and key != "attention_mask":  # a Batch has lengths instead
            hint = f": call {hints[key]} first" if key in hints else ""
            raise ValueError(f"{what}: the batch has no {key!r}{hint}")


def _check(config: PPOActorConfig, temperature: float) -> None:
    """Cross-field checks; each error names the value and the fix."""
    if temperature <= 0:
        raise ValueError(
            f"temperature={temperature}: training needs sampled tokens: set gconfig.temperature > 0"
        )
    if config.ppo_n_minibatches < 1:
        raise ValueError(f"actor.ppo_n_minibatches={config.ppo_n_minibatches}: must be at least 1")
    if not 0 < config.eps_clip < 1:
        raise ValueError(f"actor.eps_clip={config.eps_clip}: must lie between 0 and 1")
    if config.eps_clip_higher is not None and config.eps_clip_higher <= 0:
        raise ValueError(f"actor.eps_clip_higher={config.eps_clip_higher}: must be positive")
    if config.c_clip is not None and config.c_clip <= 1:
        raise ValueError(f"actor.c_clip={config.c_clip}: the dual clip must exceed 1 (3 is usual)")
    if config.use_decoupled_loss and not config.recompute_logprob:
        raise ValueError(
            "actor.use_decoupled_loss=true needs the proximal logprobs: set "
            "actor.recompute_logprob=true"
        )
    if config.behav_imp_weight_cap is not None and not config.use_decoupled_loss:
        raise ValueError(
            f"actor.behav_imp_weight_cap={config.behav_imp_weight_cap} acts on the decoupled loss "
            "only: set actor.use_decoupled_loss=true, or leave it null"
        )
    if config.behav_imp_weight_cap is not None and config.behav_imp_weight_cap <= 0:
        raise ValueError(
            f"actor.behav_imp_weight_cap={config.behav_imp_weight_cap}: must be positive"
        )
    if config.reward_clip <= 0:
        raise ValueError(f"actor.reward_clip={config.reward_clip}: must be positive")
