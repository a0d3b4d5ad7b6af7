"""Actor trains the policy of PPO-like algorithms (GRPO and its relatives)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarl.algos.advantages import (
    discounted_sums,
    gae,
    length_lambda,
    place_rewards,
    shape_rewards,
    spread_over_tokens,
    whiten,
)
from megarl.algos.kl import kl_estimate
from megarl.algos.metrics import Decode, logp_gap_stats, show_gaps, spell_ids, worst_logp_gaps
from megarl.algos.minibatches import batch_shares, mean_metrics, minibatches, skipped_metrics
from megarl.algos.role import Role
from megarl.algos.rollouts import Rollouts, refuse_branches, rollouts_of
from megarl.algos.rows import Data, as_batch, map_rows, put, reduce_rows, trained_tokens
from megarl.algos.specs import advantages_of, loss_of
from megarl.api.batch import Batch, Padded, Tokens
from megarl.api.engine import TrainEngine
from megarl.api.failures import on_every_rank
from megarl.config.algo import PPOActorConfig
from megarl.config.check_actor import check_actor
from megarl.observability.logging import get_logger, warn_once_per_world
from megarl.parallel.placement import split_minibatches

log = get_logger(__name__)

MADE_HERE = ("rollout_tokens", "batch_share")  # fields that ppo_update makes for losses


class Actor(Role):
    """Trains the policy. One training step in verbs:

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
        """Takes the actor's section and its engine.

        temperature: that of generation (gconfig.temperature), without a default: at another one the
        ratio would start from the logprobs of a different policy. seed: of the order of
        mini-batches; decode: token ids to text, for warnings that show tokens."""
        super().__init__(engine)
        check_actor(config, temperature)
        self.config, self.temperature, self.seed = config, temperature, seed
        self.decode = decode
        self.also: tuple[str, ...] = ()  # further outputs of compute_prox_logp, such as entropy
        self.loss, self.advantages = loss_of(config), advantages_of(config)

    def compute_logp(self, batch: Data, temperature: float | None = None) -> Any:
        """Returns log-probabilities under the current weights, 0 at t=0: Tokens for a Batch, [B,S]
        for a plain dict. temperature: None is that of generation."""
        self._plan(batch)
        return self.forward_logp(batch, self.temperature if temperature is None else temperature)

    def compute_prox_logp(self, batch: Data) -> None:
        """With recompute_logprob adds batch["prox_logp"] [B,S], the logprobs before the update;
        with moe.router_replay also the routing behind them, which the update will repeat: of
        router_replay=rollout the batch's routes, with what was unknown filled in; and the outputs
        that `also` names. Without recompute_logprob it gives a Batch's tokens to this actor's ranks
        (`place`), which else comes of the pass. Raises ValueError where the batch lacks the routes
        to replay.
        """
        replay = self.config.moe.router_replay
        of_rollout = ["routed_experts"] if replay == "rollout" else []
        if of_rollout and of_rollout[0] not in batch:
            raise ValueError(
                "moe.router_replay=rollout: the batch has no 'routed_experts'; have the client ask "
                "for them (client.record_routes), and the workflow return what to_batch makes"
            )
        names = (*(("routed_experts",) if replay != "off" else ()), *self.also)
        if self.config.recompute_logprob and names:
            self._plan(batch)
            found = self.forward(batch, ("logprobs", *names), self.temperature, also=of_rollout)
            batch["prox_logp"] = found["logprobs"]
            for name in names:
                batch[name] = found[name]
        elif self.config.recompute_logprob:
            batch["prox_logp"] = self.compute_logp(batch)
        elif isinstance(batch, Batch):
            self.place(batch)

    def compute_advantages(self, batch: Data, *, kl_ctl: float = 0.0) -> None:
        """Adds batch["advantages"] [B,S] by the AdvantageSpec of config.advantages, from rewards
        [B], group_ids [B] and loss_mask [B,S]; rows of one rollout (rollout_ids [B]) count as one
        sample, and get its advantage. Raises ValueError for a missing field, a reward that is not
        finite, or rewards that differ within a rollout, and an error on every rank where the
        spec's functions raise on one.

        kl_ctl: weight of the KL to the reference (ref_logp), estimated by k1 and summed over the
        trained tokens of a rollout, as a penalty in its reward.
        """
        spec, whole = self.advantages, as_batch(batch)
        keys = ["ref_logp", self.config.old_logp] if kl_ctl else []
        to_go = kl_ctl if spec.kl_to_go else 0.0
        names = list(dict.fromkeys([*spec.reads, "loss_mask", *(keys if to_go else [])]))
        _need(batch, ["rewards", *keys, *names], what="compute_advantages")
        rollouts = rollouts_of(whole)
        samples = self._of_rollouts(whole, rollouts, 0.0 if to_go else kl_ctl)
        self._mask_truncated(batch, whole)
        named = f"actor.advantages={self.config.advantages.type}"

        def of_held_rows() -> tuple[Tokens, ...]:
            numbers = spec.per_sample(samples)
            _shaped(numbers, (len(rollouts),), f"{named}: per_sample", "one for each rollout")
            numbers = rollouts.spread(numbers)

            def of_rows(rows: Tensor, part: Padded) -> tuple[Tensor, ...]:
                made = spread_over_tokens(numbers[rows], part["loss_mask"])
                if spec.per_token is not None:
                    made = spec.per_token(numbers[rows], part)
                    _shaped(made, part["loss_mask"].shape, f"{named}: per_token", "as loss_mask")
                if to_go:
                    made = made - to_go * self._kl_to_go(part)
                return (made,)

            return map_rows(whole, of_rows, names)

        (whole["advantages"],) = on_every_rank(named, of_held_rows, whole.comm)
        put(
            batch, "advantages", whiten(whole, "advantages") if spec.whiten else whole["advantages"]
        )

    def _of_rollouts(self, batch: Batch, rollouts: Rollouts, kl_ctl: float) -> dict[str, Tensor]:
        """Returns what per_sample sees: the per-sample fields of each rollout's first row, [R], its
        shaped reward, and its group."""
        samples = {name: rollouts.of_first(values) for name, values in batch.per_sample.items()}
        rewards = rollouts.common(self._shaped_rewards(batch["rewards"]), "rewards")
        if kl_ctl:
            rewards = rewards - kl_ctl * rollouts.sums(self._kl_to_ref(batch)).float()
        samples["rewards"] = rewards
        samples["trained_tokens"] = rollouts.sums(trained_tokens(batch))
        if "group_ids" not in samples:
            if self.advantages.needs_groups:
                raise ValueError(f"adv_norm={self.config.adv_norm!r} needs batch['group_ids']")
            samples["group_ids"] = torch.arange(len(rollouts))
        return samples

    def compute_advantages_and_returns(self, batch: Data, **kw: Any) -> dict[str, Any]:
        """Computes the advantages (see compute_advantages) and returns them by name; without a
        critic the returns are the advantages."""
        self.compute_advantages(batch, **kw)
        advantages = batch["advantages"]
        return {"advantages": advantages, "returns": batch.get("returns", advantages)}

    def _kl_to_ref(self, batch: Batch) -> Tensor:
        """[B] float64: the KL to the reference summed over each sample's trained tokens."""
        old = self.config.old_logp

        def column(part: Padded) -> list[Tensor]:
            kl = kl_estimate(part[old], part["ref_logp"], "k1")
            return [kl.where(part["loss_mask"].bool(), 0.0)]

        return reduce_rows(batch, column, [old, "ref_logp", "loss_mask"])[:, 0]

    def compute_gae(
        self,
        batch: Data,
        *,
        discount: float,
        gae_lambda: float,
        kl_ctl: float,
        bootstrap: bool,
        length_alpha: float | None = None,
        critic_lambda: float | None = None,
    ) -> None:
        """Adds batch["advantages"], ["returns"] and ["earned"] [B,S] for PPO with a critic, from
        rewards [B], values [B,S] and last_value [B]. `earned` is token_rewards [B,S], if any, and
        the rest of the reward at the last trained token. Raises ValueError for a missing field, a
        reward that is not finite, or rollouts of several rows.

        kl_ctl: weight of the KL to the reference (ref_logp) as a penalty in every token's reward.
        bootstrap: an answer that was cut (`truncated`) ends with the value of going on.
        length_alpha: the advantages' lambda is length_lambda's instead. critic_lambda: that of the
        returns (decoupled GAE, arXiv 2503.01491); None is the advantages' own.
        """
        keys = ["rewards", "values", "last_value"]
        keys += ["truncated"] if bootstrap else []
        keys += ["ref_logp", self.config.old_logp] if kl_ctl else []
        _need(batch, keys, what="compute_gae")
        refuse_branches(batch, "compute_gae")
        self._mask_truncated(batch, as_batch(batch))
        keys += ["token_rewards"] if "token_rewards" in batch else []
        rewards = self._shaped_rewards(batch["rewards"])
        cut = batch["truncated"] if bootstrap else torch.zeros_like(batch["last_value"])

        def of_rows(rows: Tensor, part: Padded) -> tuple[Tensor, ...]:
            earned = self._placed_rewards(rewards[rows], part)
            if kl_ctl:
                kl = kl_estimate(part[self.config.old_logp], part["ref_logp"], "k1")
                earned -= kl_ctl * kl.where(part["loss_mask"].bool(), 0.0)
            estimate = partial(
                gae,
                earned,
                part["values"],
                part["loss_mask"],
                last_value=(part["last_value"] * cut[rows]),
                discount=discount,
            )
            mask = part["loss_mask"]
            own = gae_lambda if length_alpha is None else length_lambda(mask, length_alpha)
            advantages, returns = estimate(gae_lambda=own)
            if critic_lambda is not None:
                returns = estimate(gae_lambda=critic_lambda)[1]
            return earned, returns, advantages

        whole, names = as_batch(batch), ("earned", "returns", "advantages")
        for name, made in zip(names, map_rows(whole, of_rows, [*keys, "loss_mask"]), strict=True):
            whole[name] = made
            if name == "advantages" and self.config.adv_norm == "batch":
                made = whiten(whole, name)
            put(batch, name, made)

    def _mask_truncated(self, batch: Data, whole: Batch) -> None:
        """With mask_truncated takes rollouts that were cut out of loss_mask [B,S] of the data and
        of `whole`, the same as a Batch, unless nothing would be left."""
        if not self.config.mask_truncated:
            return
        _need(batch, ["truncated"], what="actor.mask_truncated=true")
        rollouts = rollouts_of(whole)
        cut = rollouts.spread(rollouts.any(whole["truncated"].bool()))
        if not (trained_tokens(whole)[~cut] > 0).any():
            log.warning("every answer of the batch was cut, so mask_truncated masks none of them")
            return

        def kept(rows: Tensor, part: Padded) -> tuple[Tensor, ...]:
            return (part["loss_mask"].bool() & ~cut[rows][:, None],)

        whole["loss_mask"] = map_rows(whole, kept, ["loss_mask"])[0]
        put(batch, "loss_mask", whole["loss_mask"])

    def _kl_to_go(self, part: Padded) -> Tensor:
        """Returns the KL to the reference from each trained token on, [b,S]; 0 at others."""
        mask = part["loss_mask"].bool()
        kl = kl_estimate(part[self.config.old_logp], part["ref_logp"], "k1").where(mask, 0.0)
        return discounted_sums(kl.double(), 1.0).float().where(mask, 0.0)

    def _placed_rewards(self, rewards: Tensor, part: Padded) -> Tensor:
        """Returns the shaped rewards [b] where they were earned, [b,S]."""
        if "token_rewards" not in part:
            return place_rewards(rewards, part["loss_mask"])
        early = part["token_rewards"].float() * self.config.reward_scaling
        return early + place_rewards(rewards - early.sum(1), part["loss_mask"])

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

    def _shaped_rewards(self, rewards: Tensor) -> Tensor:
        bad = (~rewards.isfinite()).nonzero().flatten().tolist()
        if bad:  # clipping would hide an infinite one, and a NaN spoils its whole group
            raise ValueError(
                f"rewards of rows {bad[:8]} are {rewards[bad[:8]].tolist()}: a reward must be a "
                "finite number; mend the reward function, or reject the episode"
            )
        return shape_rewards(rewards, self.config)

    def ppo_update(self, batch: Data) -> dict[str, float]:
        """Makes ppo_n_minibatches optimizer steps over the batch; returns metrics averaged over
        them. A loss that needs rollout_tokens [B], the trained tokens of each row's rollout, or
        batch_share [B] gets them from here.

        Beside the loss's metrics there are n_updates, skipped_updates (refused because something
        was not finite; they enter no mean), the skipped_sequences and skipped_tokens of those, and
        the trainer/server logprob gap. Adds batch["skipped"] [B], true where a sequence's update
        was skipped. Raises ValueError for a missing field, or a batch without a trained token."""
        spec = self.loss
        keys = ["input_ids", "attention_mask", "loss_mask", "logprobs", self.config.old_logp]
        keys += ["routed_experts"] if self.config.moe.replays else []
        keys = list(dict.fromkeys([*keys, *spec.needs]))
        _need(batch, [key for key in keys if key not in MADE_HERE])
        keys += [name for name in spec.uses if name in batch and name not in keys]
        whole = as_batch(batch)
        gap, trained = self._logp_gap(whole), trained_tokens(whole)
        parts = self._minibatches(whole)
        if "rollout_tokens" in keys:
            rollouts = rollouts_of(whole)
            batch["rollout_tokens"] = rollouts.spread(rollouts.sums(trained)).long()
        if "batch_share" in keys:
            batch["batch_share"] = batch_shares(parts, trained)
        updates = []
        skipped = torch.zeros(len(whole), dtype=torch.bool)
        for rows, minibatch in minibatches(batch, keys, parts, trained):
            update = self.train_batch(
                minibatch,
                spec.fn,
                spec.weight,
                outputs=spec.outputs,
                temperature=self.temperature,
            )
            skipped[rows] = not update["update_successful"]
            updates.append(update)
        batch["skipped"] = skipped
        stats = mean_metrics(updates)
        if stats["n_updates"]:
            first = next(u for u in updates if u["update_successful"])
            derive = partial(spec.derive, stats, first)
            stats = on_every_rank(f"actor.loss={self.config.loss.type}", derive, whole.comm)
        return stats | gap | skipped_metrics(trained, skipped)

    def _logp_gap(self, batch: Batch) -> dict[str, float]:
        """Returns the trainer/server gap; warns with the worst tokens if they are not a staleness
        effect.

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


def _shaped(made: Tensor, shape: tuple[int, ...], who: str, why: str) -> None:
    if made.shape != shape:
        raise ValueError(
            f"{who} gave a tensor of shape {tuple(made.shape)}; it must be {list(shape)}, {why}"
        )


def _need(batch: Data, keys: list[str], *, what: str = "ppo_update") -> None:
    hints = {
        "prox_logp": "actor.compute_prox_logp(batch) (recompute_logprob is on)",
        "routed_experts": "actor.compute_prox_logp(batch) (moe.router_replay is on)",
        "ref_logp": "batch['ref_logp'] = ref.compute_logp(batch) (kl_coef is not 0)",
        "advantages": "actor.compute_advantages(batch)",
        "values": "critic.compute_values(batch)",
        **dict.fromkeys(
            ("given_ids", "teacher_logprobs", "teacher_tail", "teacher_logp"),
            "teacher.teach(batch)",
        ),
    }
    for key in keys:
        if key not in batch and key != "attention_mask":  # a Batch has lengths instead
            hint = f": call {hints[key]} first" if key in hints else ""
            raise ValueError(f"{what}: the batch has no {key!r}{hint}")
