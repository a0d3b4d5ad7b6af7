"""Actor trains the policy of PPO-like algorithms (GRPO and its relatives)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarl.algos.advantages import (
    gae,
    length_lambda,
    place_rewards,
    shape_rewards,
    spread_over_tokens,
    whiten,
)
from megarl.algos.batches import (
    CHECK,
    MADE,
    PROX,
    add_made,
    mean_metrics,
    minibatches,
    need,
    need_routes,
    reason_for_pass,
    shaped,
    skipped_metrics,
    takes_own_prox,
    with_own_prox,
)
from megarl.algos.kl import KLController, kl_estimate, kl_of_rows, kl_to_go
from megarl.algos.metrics import Decode, spell_ids, watched_gap
from megarl.algos.roles import Role, among_its_ranks
from megarl.algos.rows import (
    Data,
    Rollouts,
    as_batch,
    map_rows,
    put,
    refuse_branches,
    rollouts_of,
    trained_tokens,
)
from megarl.algos.specs import advantages_of, loss_of
from megarl.api.batch import Batch, Padded, Tokens
from megarl.api.engine import NoGradient, TrainEngine
from megarl.api.failures import on_every_rank
from megarl.config.algo import PPOActorConfig
from megarl.config.check_parts import check_actor
from megarl.observability.logging import get_logger
from megarl.parallel.packing import split_minibatches

log = get_logger(__name__)


class Actor(Role):
    """Trains the policy. One training step in verbs:

        actor.compute_prox_logp(batch)                     # recompute_logprob, see reason_for_pass
        batch["ref_logp"] = ref.compute_logp(batch)        # kl_coef > 0
        actor.compute_advantages(batch)
        stats = actor.ppo_update(batch)
        actor.step_lr_scheduler()

    Which logprobs the clipped ratio starts from:
      recompute_logprob, correction   prox_logp, times exp(prox_logp - logprobs)
      recompute_logprob                       prox_logp: the trainer's own view of the policy, which
                                              leaves out the server's rounding (common practice)
      recompute_logprob=interpolate           between logprobs and those of the update's own pass,
                                              by the token's staleness (batches.interpolated)
      recompute_logprob=false                 logprobs, as the server reported them

    With recompute_logprob=auto and no `reason_for_pass`, compute_prox_logp may be left out: the
    update then takes prox_logp from its own pass, which saves one.
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
        self.kl = KLController(config)
        self._warned_of_clip = False
        update_reads = ["input_ids", "attention_mask", "loss_mask", "logprobs", config.old_logp]
        update_reads += ["routed_experts"] if config.replays else []
        update_reads += ["ref_logp"] if config.kl_controller is not None else []
        self._update_reads = dict.fromkeys([*update_reads, *self.loss.needs])

    def kl_state(self) -> dict[str, Any]:
        """Returns the state of the controller of the KL's weight."""
        return self.kl.state_dict()

    def load_kl_state(self, state: dict[str, Any]) -> None:
        """Continues from what `kl_state` returned."""
        self.kl.load_state_dict(state)

    def compute_logp(self, batch: Data, temperature: float | None = None) -> Any:
        """Returns log-probabilities under the current weights, 0 at t=0: Tokens for a Batch, [B,S]
        for a plain dict. temperature: None is that of generation."""
        self._plan(batch)
        temperature = self.temperature if temperature is None else temperature
        return self.forward(batch, ("logprobs",), temperature)

    def reason_for_pass(self, *, kl_ctl: float = 0.0) -> str:
        """Returns why compute_prox_logp has to come before the update, "" where the update's own
        pass tells prox_logp. kl_ctl: that of compute_advantages or compute_gae."""
        specs = self.loss, self.advantages
        return reason_for_pass(self.config, *specs, kl_ctl=kl_ctl, also=self.also)

    def compute_prox_logp(self, batch: Data) -> None:
        """With recompute_logprob adds batch["prox_logp"] [B,S], the logprobs before the update;
        with router_replay also the routing behind them, which the update will repeat: of
        router_replay=rollout the batch's routes, with what was unknown filled in; and the outputs
        that `also` names. Without recompute_logprob it gives a Batch's tokens to this actor's
        ranks (`place`), which else comes of the pass. Raises ValueError where the batch lacks the
        routes to replay.
        """
        need_routes(self.config, batch)
        names = (*(("routed_experts",) if self.config.replays else ()), *self.also)
        if self.config.recomputes:
            batch[PROX], *others = self._before_update(batch, names)
            for name, values in zip(names, others, strict=True):
                batch[name] = values
        elif isinstance(batch, Batch):
            self.place(batch)

    def compute_check_logp(self, batch: Data) -> None:
        """Adds batch["check_logp"] [B,S], the numbers that compute_prox_logp computes, for the self
        checks of an update that takes prox_logp from its own pass."""
        (batch[CHECK],) = self._before_update(batch, ())

    def _before_update(self, batch: Data, names: Sequence[str]) -> list[Any]:
        """Returns the logprobs and the outputs `names` of the policy, routed as in the update."""
        of_rollout = ["routed_experts"] if self.config.router_replay == "rollout" else []
        self._plan(batch)
        asked = ("logprobs", *names)
        found = self.forward(batch, asked, self.temperature, also=of_rollout)
        return [found[name] for name in asked] if names else [found]

    @among_its_ranks
    def compute_advantages(self, batch: Data, *, kl_ctl: float = 0.0) -> None:
        """Adds batch["advantages"] [B,S] by the AdvantageSpec of config.advantages, from rewards
        [B], group_ids [B] and loss_mask [B,S]; rows of one rollout (rollout_ids [B]) count as one
        sample, and get its advantage. Raises ValueError for a missing field, a reward that is not
        finite, or rewards that differ within a rollout, and an error on every rank where the
        spec's functions raise on one.

        kl_ctl: weight of the KL to the reference (ref_logp), estimated by k1 and summed over the
        trained tokens of a rollout, as a penalty in its reward; kl_controller adapts it.
        """
        spec, whole, kl_ctl = self.advantages, as_batch(batch), self.kl.in_reward(kl_ctl)
        keys = ["ref_logp", self.config.old_logp] if kl_ctl else []
        to_go = kl_ctl if spec.kl_to_go else 0.0
        names = list(dict.fromkeys([*spec.reads, "loss_mask", *(keys if to_go else [])]))
        need(batch, ["rewards", *keys, *names], what="compute_advantages")
        rollouts = rollouts_of(whole)
        samples = self._of_rollouts(whole, rollouts, 0.0 if to_go else kl_ctl)
        self._mask_truncated(batch, whole)
        named = f"actor.advantages={self.config.advantages.type}"

        def of_held_rows() -> tuple[Tokens, ...]:
            numbers = spec.per_sample(samples)
            shaped(numbers, (len(rollouts),), f"{named}: per_sample", "one for each rollout")
            numbers = rollouts.spread(numbers)

            def of_rows(rows: Tensor, part: Padded) -> tuple[Tensor, ...]:
                made = spread_over_tokens(numbers[rows], part["loss_mask"])
                if spec.per_token is not None:
                    made = spec.per_token(numbers[rows], part)
                    shaped(made, part["loss_mask"].shape, f"{named}: per_token", "as loss_mask")
                if to_go:
                    made = made - to_go * kl_to_go(part, self.config.old_logp)
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
            kl = rollouts.sums(kl_of_rows(batch, self.config.old_logp))
            rewards = rewards - kl_ctl * kl.float()
        samples["rewards"] = rewards
        samples["trained_tokens"] = rollouts.sums(trained_tokens(batch))
        if "group_ids" not in samples:
            if self.advantages.needs_groups:
                raise ValueError(f"adv_norm={self.config.adv_norm!r} needs batch['group_ids']")
            samples["group_ids"] = torch.arange(len(rollouts))
        return samples

    @among_its_ranks
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

        kl_ctl: weight of the KL to the reference (ref_logp) as a penalty in every token's reward;
        kl_controller adapts it.
        bootstrap: an answer that was cut (`truncated`) ends with the value of going on.
        length_alpha: the advantages' lambda is length_lambda's instead. critic_lambda: that of the
        returns (decoupled GAE, arXiv 2503.01491); None is the advantages' own.
        """
        kl_ctl, keys = self.kl.in_reward(kl_ctl), ["rewards", "values", "last_value"]
        keys += ["truncated"] if bootstrap else []
        keys += ["ref_logp", self.config.old_logp] if kl_ctl else []
        need(batch, keys, what="compute_gae")
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

    def compute_advantages_and_returns(
        self, batch: Data, *, kl_ctl: float = 0.0, **gae: Any
    ) -> dict[str, Any]:
        """Adds batch["advantages"], and returns it with the "returns", both [B,S]: Tokens of a
        Batch, tensors of a plain dict.

        A batch with `values` gets both from `compute_gae`, which takes `gae` (discount, gae_lambda,
        bootstrap, ...). Without a value function `compute_advantages` computes the advantages, and
        the returns are the same numbers.
        """
        if "values" in batch:
            self.compute_gae(batch, kl_ctl=kl_ctl, **gae)
        else:
            self.compute_advantages(batch, kl_ctl=kl_ctl, **gae)
        returns = batch["returns" if "values" in batch else "advantages"]
        return {"advantages": batch["advantages"], "returns": returns}

    def _mask_truncated(self, batch: Data, whole: Batch) -> None:
        """With mask_truncated takes rollouts that were cut out of loss_mask [B,S] of the data and
        of `whole`, the same as a Batch, unless nothing would be left."""
        if not self.config.mask_truncated:
            return
        need(batch, ["truncated"], what="actor.mask_truncated=true")
        rollouts = rollouts_of(whole)
        cut = rollouts.spread(rollouts.any(whole["truncated"].bool()))
        if not (trained_tokens(whole)[~cut] > 0).any():
            log.warning("every answer of the batch was cut, so mask_truncated masks none of them")
            return

        def kept(rows: Tensor, part: Padded) -> tuple[Tensor, ...]:
            return (part["loss_mask"].bool() & ~cut[rows][:, None],)

        whole["loss_mask"] = map_rows(whole, kept, ["loss_mask"])[0]
        put(batch, "loss_mask", whole["loss_mask"])

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
        low, high = self.config.reward_limits
        clipped = int(((rewards < low) | (rewards > high)).sum())
        if clipped and not self._warned_of_clip:
            self._warned_of_clip = True
            log.warning(
                "actor.reward_clip=%g: %d of %d rewards lie outside %g to %g and count as the "
                "limit; set reward_clip=null unless that is meant (metric reward/clipped)",
                *(self.config.reward_clip, clipped, len(rewards), low, high),
            )
        return shape_rewards(rewards, self.config)

    @among_its_ranks
    def ppo_update(self, batch: Data) -> dict[str, float]:
        """Makes ppo_n_minibatches optimizer steps over the batch; returns metrics averaged over
        them. A loss gets the fields that it needs of `batches.MADE` from here.

        Beside the loss's metrics there are n_updates, skipped_updates (refused because something
        was not finite; they enter no mean), the skipped_sequences and skipped_tokens of those, and
        the trainer/server logprob gap, and the weights of the KL (KLController). Adds
        batch["skipped"] [B], true where a sequence's update was skipped; and where the batch has no
        prox_logp and the update's own pass tells it (recompute_logprob=auto), batch["prox_logp"]
        [B,S] and the outputs that `also` names. Raises ValueError for a missing field, or a batch
        without a trained token."""
        need_routes(self.config, batch)
        spec, own = self.loss, takes_own_prox(self.config, batch, self.reason_for_pass())
        if own and isinstance(batch, Batch):
            self.place(batch)  # else what the update keeps would be of other rows than held here
        keys = self._update_keys(batch, own)
        whole = as_batch(batch)
        gap, trained = self._gap(whole), trained_tokens(whole)
        parts = self._minibatches(whole)
        version = self.engine.get_version()
        add_made(batch, keys, parts, trained, kl_scale=self.kl.scale, version=version)
        updates = []
        skipped = torch.zeros(len(whole), dtype=torch.bool)
        for rows, minibatch in minibatches(batch, keys, parts, trained):
            updates.append(self._update(minibatch, own))
            skipped[rows] = not updates[-1]["update_successful"]
        batch["skipped"] = skipped
        if own:
            # an update that was refused before its pass kept nothing
            for name, values in getattr(updates[0], "kept", {}).items():
                batch[PROX if name == "logprobs" else name] = values
            gap = self._gap(as_batch(batch))
        stats = mean_metrics(updates)
        if stats["n_updates"]:
            first = next(u for u in updates if u["update_successful"])
            derive = partial(spec.derive, stats, first)
            stats = on_every_rank(f"actor.loss={self.config.loss.type}", derive, whole.comm)
        stats |= self.kl.after_update(as_batch(batch))
        return stats | gap | skipped_metrics(trained, skipped)

    def _update(self, minibatch: Data, own: bool) -> Any:
        """Makes one optimizer step; returns its Metrics, with `own` with what it tells of PROX.
        Raises NoGradient, by the name of the loss, for one without a gradient."""
        try:
            return self.train_batch(
                minibatch,
                with_own_prox(self.loss.fn) if own else self.loss.fn,
                self.loss.weight,
                outputs=self.loss.outputs,
                temperature=self.temperature,
                **({"keep": ("logprobs", *self.also)} if own else {}),
            )
        except NoGradient as e:
            loss, surrogate = self.config.loss.type, self.config.surrogate.type
            raise NoGradient(f"actor.loss={loss}, actor.surrogate={surrogate}: {e}") from None

    def _update_keys(self, batch: Data, own: bool) -> list[str]:
        """Returns the fields that the update reads, with `own` not the PROX that its own pass
        tells. Raises ValueError for one that is missing."""
        keys = [key for key in self._update_reads if not (own and key == PROX)]
        need(batch, [key for key in keys if key not in MADE])
        return keys + [k for k in (*self.loss.uses, CHECK) if k in batch and k not in keys]

    def _gap(self, batch: Batch) -> dict[str, float]:
        bound, version = self.config.logp_gap_warn, self.engine.get_version()
        return watched_gap(batch, version=version, above=bound, decode=self.decode)
