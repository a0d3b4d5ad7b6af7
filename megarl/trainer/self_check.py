"""SelfCheck looks at the run while it trains, and stops, skips or warns as configured.

What it looks at (megarl/algos/checks.py says how):
* at the first update after every start the training pass sees the policy compute_logp saw;
* before any update, actor and reference agree where they were loaded from the same weights;
* every batch has tokens to train on, and rewards that differ somewhere (a warning where not);
* no update is made of anything that is not finite, or of a gradient above optimizer.spike_norm.
  The engine refuses such an update on all ranks (weights and optimizer state stay as they are, to
  the bit), the mini-batch goes to <run>/nonfinite, and the run stops or goes on with the next
  mini-batch. The learning-rate schedule counts steps, not updates, so a skipped one does not hold
  it up. A role of which max_skips updates in a row are skipped ends the run, and so does, at the
  end of the run, a role that was never updated.

Every rank calls the same checks, which make all ranks know of each row what its holder found. So
all of them stop, or none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megarl.algos import Role, checks
from megarl.algos.batches import CHECK, PROX
from megarl.algos.checks import Finding
from megarl.algos.rows import Data, as_batch, trained_tokens
from megarl.api.batch import Batch, Tokens
from megarl.api.engine import LossFn, LossWeightFn, Metrics
from megarl.config.engine import TrainEngineConfig
from megarl.config.recipes import BaseConfig, GRPOConfig
from megarl.config.run import SelfCheckConfig
from megarl.config.secrets import public_tree
from megarl.engine import MegatronEngine
from megarl.observability.logging import get_logger, warn_on_rank_zero
from megarl.trainer.context import ProcessContext
from megarl.trainer.roles import (
    MegatronActor,
    MegatronLoRARef,
    MegatronRef,
)
from megarl.utils.files import DiskFull, full_disk_named

log = get_logger(__name__)

MAX_FILES = 20  # mini-batches saved per start: a run that skips now and then must not fill the disk


class SelfCheckError(RuntimeError):
    """Says that a check failed. Rank 0's message says everything, the others' only what failed."""


@dataclass
class _Updates:
    """Counts the updates of a role: those made, and those skipped since the last of them; nothing:
    whether the last had a gradient of 0."""

    role: str
    made: int = 0
    skipped: int = 0
    nothing: bool = False


class SelfCheck:
    """Checks the batches and updates of a run, and stops, skips or warns as `self_check` of the
    configuration says. Every rank makes the same calls."""

    def __init__(self, cfg: BaseConfig, ctx: ProcessContext) -> None:
        self.config = SelfCheckConfig(**cfg.self_check)
        self._checks = self.config.on_failure not in ("off", False)
        self._run_config = public_tree(cfg)
        self._dir = ctx.run_dir / "nonfinite"
        self._ranks, self._decode = ctx.ranks, ctx.tokenizer.decode
        self._step = self._minibatch = self._saved = 0
        self._resumed = False  # this start did not make the run's first step
        self._updates: dict[int, _Updates] = {}  # by id of the engine
        self._unchecked: str | None = None
        compares = isinstance(cfg, GRPOConfig) and bool(cfg.actor.compares_by)
        self._streaks = checks.Streaks(compares_groups=compares)
        self._told_of_untrained = False

    def begin_step(self, step: int) -> None:
        """Begins a step, which the messages name: `step` counts from 1, as the metrics do."""
        self._resumed |= self._step == 0 and step > 1
        self._step, self._minibatch = step, -1

    def watch(
        self,
        role: Role,
        *,
        first_ratio_to: str | None = None,
    ) -> None:
        """Has every update of `role` checked from now on.

        first_ratio_to: the batch key of the logprobs from which the first update's ratio must be
        1; None leaves that check out. Where the batch lacks it, `look_before_update` can put the
        same numbers beside.
        """
        if first_ratio_to is not None and self._checks:
            self._unchecked = first_ratio_to
        self._updates[id(role.engine)] = _Updates(type(role).__name__)
        role.update_check = self

    def end(self) -> None:
        """Raises SelfCheckError where a run ends that has skipped every update of a role. A start
        that continues a run takes the run's earlier updates as made. Collective."""
        for updates in self._updates.values():
            if updates.skipped and not updates.made and not self._resumed:
                finding = Finding(
                    f"step {self._step}: the run ends without an update: all {updates.skipped} of "
                    f"{updates.role} were skipped"
                )
                self._stop(finding, f"the skipped mini-batches are in {self._dir}")

    # ---- every batch ---------------------------------------------------------------------------

    def has_trained_tokens(self, batch: Data) -> None:
        """Raises SelfCheckError for a batch without a trained token. Warns, the first time, of
        single rows without one, which are only left out. Collective."""
        trained = trained_tokens(as_batch(batch))
        finding = checks.no_trained_token(trained, f"step {self._step}: rollout batch")
        if finding is None:
            return
        if not trained.any():
            self._stop(finding, "there is nothing to train on: look at what rollout.workflow marks")
        if not self._told_of_untrained:
            self._told_of_untrained = True
            warn_on_rank_zero(log, "%s: nothing is learned from them", finding)

    def rewards_differ(self, metrics: dict[str, float]) -> None:
        """Warns, once per streak, where the rewards of several steps in a row teach nothing."""
        if finding := self._streaks.step(metrics):
            warn_on_rank_zero(log, "step %d: %s", self._step, finding)

    # ---- the first step ------------------------------------------------------------------------

    def look_before_update(self, batch: Batch, actor: MegatronActor) -> None:
        """Before the first update of `actor` adds batch["check_logp"] [B,S], a pass of its own for
        the checks of that update; later it does nothing. Collective."""
        if self._unchecked is not None:
            actor.compute_check_logp(batch)

    def actor_equals_ref(
        self, data: Data, actor: MegatronActor, ref: MegatronRef | MegatronLoRARef
    ) -> None:
        """Checks that prox_logp (or check_logp) and ref_logp agree, if the actor still has the
        weights the reference has. Raises SelfCheckError, or warns by self_check.on_failure, where
        they do not."""
        ours = next((name for name in (PROX, CHECK) if name in data), None)
        if not self._checks or ours is None:
            return
        if actor.get_version() > 0 or not same_weights(actor.config, ref.config):
            return
        dtypes = {actor.engine.dtype, ref.engine.dtype}
        bounds = checks.ROUNDING[min(dtypes, key=lambda d: torch.finfo(d).bits)]
        if dtypes == {torch.float32} and same_shapes(actor.config, ref.config):
            bounds = checks.SAME_SHAPES
        batch = as_batch(data)
        finding = checks.same_policy(
            checks.gaps_of(batch, batch[ours], batch["ref_logp"]),
            bounds,
            batch,
            what=f"actor and reference disagree, though both hold {actor.config.path} as it was",
            sides=("actor", "reference"),
            causes="a layout that loads or computes something wrongly, weights changed before the "
            "first update, two temperatures",
            decode=self._decode,
        )
        self._conclude(finding, "actor and reference, of the same weights, agree")

    def _check_ratio(self, of_pass: Tokens, key: str, batch: Batch, dtype: torch.dtype) -> None:
        self._unchecked = None
        finding = checks.same_policy(
            checks.gaps_of(batch, of_pass, batch[key]),
            checks.ROUNDING[dtype],
            batch,
            what="the first update does not start from ratio 1: the training pass and "
            "compute_logp see different policies",
            sides=("training pass", key),
            causes=f"dropout, a stale {key} (weights changed after it was computed), two "
            "temperatures, attention across the borders of packed sequences, numerics",
            decode=self._decode,
        )
        self._conclude(finding, "the first update starts from ratio 1 and KL 0")

    def _conclude(self, finding: Finding | None, passed: str) -> None:
        if finding is None:
            log.info("self check: %s", passed)
        elif self.config.on_failure == "warn":
            warn_on_rank_zero(log, "step %d: %s", self._step, finding)
        else:
            finding = replace(finding, headline=f"step {self._step}: {finding.headline}")
            self._stop(finding, "self_check.on_failure=warn goes on all the same")

    # ---- every update --------------------------------------------------------------------------

    def train_batch(
        self,
        engine: MegatronEngine,
        data: Data,
        loss_fn: LossFn,
        weight_fn: LossWeightFn,
        *,
        keep: Sequence[str] = (),
        **how: Any,
    ) -> dict[str, float]:
        """Makes the optimizer step of engine.train_batch with the checks around it, and returns its
        metrics; those of a skipped update are update_successful = 0 alone, with what its pass kept.
        Raises SelfCheckError where the run is to stop."""
        self._minibatch += 1
        batch = as_batch(data)
        if finding := checks.nonfinite_inputs(batch):
            return self._refuse(engine, batch, finding, {})
        names = (self._unchecked, CHECK) if self._unchecked is not None else ()
        if key := next((name for name in names if name in batch), None):
            keep = list(dict.fromkeys([*keep, "logprobs"]))
        stats = engine.train_batch(data, loss_fn, weight_fn, keep=keep, **how)
        if finding := checks.nonfinite_update(stats):
            by_row = partial(checks.row_losses, engine, data, loss_fn, weight_fn, **how)
            spike = checks.is_spike(stats)
            return self._refuse(engine, batch, finding, stats, None if spike else by_row)
        updates = self._updates[id(engine)]
        updates.skipped, updates.made = 0, updates.made + int(stats["update_successful"])
        self._gradient_is_there(updates, stats)
        if key is not None and isinstance(stats, Metrics):
            of_pass = stats.kept["logprobs"]
            if not isinstance(data, Batch):
                of_pass = Tokens.from_padded(of_pass, batch.lengths)
            self._check_ratio(of_pass, key, batch, engine.dtype)
        return stats

    def _gradient_is_there(self, updates: _Updates, stats: dict[str, float]) -> None:
        """Warns, once per streak, of updates whose gradient is exactly 0."""
        nothing = stats["grad_norm"] == 0.0
        if nothing and not updates.nothing:
            warn_on_rank_zero(
                log,
                "step %d, mini-batch %d: grad_norm is exactly 0, so this update of %s teaches "
                "nothing: the rewards of every group were equal, or the loss is a constant",
                self._step,
                self._minibatch,
                updates.role,
            )
        updates.nothing = nothing

    def _refuse(
        self,
        engine: MegatronEngine,
        batch: Batch,
        finding: Finding,
        stats: dict[str, float],
        row_losses: Callable[[], torch.Tensor] | None = None,
    ) -> dict[str, float]:
        """Says and saves what there is to know; then skips the update, or stops."""
        updates = self._updates[id(engine)]
        updates.skipped += 1
        details = list(finding.details)
        if broken := self._broken_weights(engine):
            details.append(f"the weights themselves are not finite: {broken}")
        elif row_losses is not None:
            details.append(checks.nonfinite_origin(row_losses(), batch, decode=self._decode))
        where = f"step {self._step}, mini-batch {self._minibatch}"
        finding = Finding(f"{where}: {finding.headline}", tuple(details))
        details.append(self._save(batch, finding, stats))
        finding = replace(finding, details=tuple(details))
        if broken:
            self._stop(finding, "skipping batches cannot mend them: continue from a checkpoint")
        if self.config.on_nonfinite == "stop":
            self._stop(finding, "self_check.on_nonfinite=skip would leave this update out")
        if updates.skipped >= self.config.max_skips:
            in_a_row = f"skipped updates in a row of {updates.role}: {updates.skipped}"
            self._stop(finding, f"{in_a_row} (self_check.max_skips)")
        warn_on_rank_zero(log, "%s\n  the update is skipped", finding)
        kept = stats.kept if isinstance(stats, Metrics) else {}
        return Metrics({"update_successful": 0.0}, {}, kept)

    def _broken_weights(self, engine: Any) -> str:
        """Returns the HF names of parameters with a NaN or Inf, "" where there are none.
        Collective: rank 0 is shown the tensors."""
        names = [name for name, value in engine.hf_state() if not value.isfinite().all()]
        names = self._ranks.from_zero(lambda: names)
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def _save(self, batch: Batch, finding: Finding, stats: dict[str, float]) -> str:
        """Writes the mini-batch, every holder its own rows; says where it is, and how to look at
        it. Collective.
        """
        if self._saved == MAX_FILES:
            return f"not saved: {self._dir} holds {MAX_FILES} mini-batches of this run already"
        self._saved += 1
        path = self._dir / f"step_{self._step:06d}_mb{self._minibatch}.pt"
        record = {"finding": str(finding), "stats": dict(stats), "step": self._step}
        record |= {"mini_batch": self._minibatch, "config": self._run_config}
        rank, home = batch.comm.rank if batch.comm else 0, batch.home
        writers = sorted({0, *(r for r in home.speakers() if len(home.rows(r)))})
        saved = self._ranks.from_zero(lambda: self._write(path, record | _held(batch)))
        if rank in writers[1:]:
            self._write(path.with_suffix(f".rank{rank}.pt"), _held(batch))
        if not saved:
            return f"not saved: no room for {path}"
        text = f"saved for inspection: torch.load({str(path)!r})['batch']"
        if others := ", ".join(map(str, writers[1:])):
            text += f", rank 0's rows; those of ranks {others} in {path.stem}.rank*.pt"
        return text

    def _write(self, path: Path, record: dict[str, Any]) -> bool:
        """Writes a file and returns whether it could: a disk that is full ends no run here."""
        try:
            with full_disk_named(f"saving {path}", self._dir):
                self._dir.mkdir(parents=True, exist_ok=True)
                torch.save(record, path)
        except (OSError, DiskFull) as e:
            log.warning("%s is not saved: %s", path, e)
            path.unlink(missing_ok=True)
            return False
        return True

    def _stop(self, finding: Finding, hint: str) -> None:
        everything = f"{finding}\n  {hint}"
        raise SelfCheckError(everything if self._ranks.is_zero else finding.headline)


def _held(batch: Batch) -> dict[str, Any]:
    """Returns the rows that this rank holds, padded, and their numbers."""
    return {"batch": batch.padded(), "rows": batch.rows.tolist()}


def same_weights(actor: TrainEngineConfig, ref: TrainEngineConfig) -> bool:
    """Returns whether both start from the same weights: the same directory, or the same seed (a run
    has one) for the same architecture, and new adapters, which add nothing. The reference's path is
    filled in already."""
    if actor.lora is not None and actor.lora.adapter_path:
        return False
    if actor.override_config != ref.override_config:
        return False
    paths = {os.path.realpath(c.path) if Path(c.path).exists() else c.path for c in (actor, ref)}
    return len(paths) == 1 and actor.init_from_scratch == ref.init_from_scratch


def same_shapes(actor: TrainEngineConfig, ref: TrainEngineConfig) -> bool:
    """Returns whether both compute logprobs alike, so that tokens differ by rounding at most."""
    keys = ("parallel", "mb_spec", "dtype", "attention", "options")
    return all(getattr(actor, k) == getattr(ref, k) for k in keys)
