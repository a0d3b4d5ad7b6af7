"""Evaluates the model of a user's script on the validation sets, when it is due."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from megarl.api.inference import RolloutWorkflow
from megarl.config.loader import run_dir
from megarl.config.recipes import GRPOConfig
from megarl.config.run import EvaluatorConfig
from megarl.config.script import REWARD_KEYS, note_read
from megarl.data.dataset import RowDataset
from megarl.observability.stats_tracker import record_timing
from megarl.parallel.rank_zero import on_rank_zero
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.rewards import shared_pool
from megarl.trainer.frequency import EvaluationTimes
from megarl.trainer.held_out import HeldOut


class Evaluator:
    """Has the servers answer the validation sets when it is due, and measures the rewards.
    Collective."""

    def __init__(
        self, config: EvaluatorConfig, held_out: HeldOut, rollout: RemoteSGLangEngine, path: Path
    ) -> None:
        """Takes the client, open or not yet, and the file of the completions to read, beside which
        the rewards go."""
        self._held_out, self._rollout, self._path = held_out, rollout, path
        self._times = EvaluationTimes(config, partial(on_rank_zero, time.monotonic))

    @classmethod
    def for_run(
        cls,
        cfg: GRPOConfig,
        rollout: RemoteSGLangEngine,
        tokenizer: Any,
        *,
        workflow: RolloutWorkflow | None = None,
        trained: RowDataset | None = None,
    ) -> Evaluator:
        """Makes a script's evaluator of valid_dataset and valid_datasets, on every rank.

        rollout: the client, or its RolloutController. workflow: makes the answers; None is the one
        that rollout.workflow names, with eval_gconfig and the rewards of the sets. trained: the
        training data, whose prompts are left out (evaluator.overlap). Raises ValueError for data
        that is not sound.
        """
        sections = ("evaluator", "valid_dataset", "valid_datasets", "eval_gconfig")
        note_read(cfg, *sections, *REWARD_KEYS, "rollout.workflow")
        held_out = HeldOut(
            cfg,
            rollout,
            tokenizer,
            shared_pool(cfg.rollout),
            gconfig=cfg.eval_gconfig,
            rollout=cfg.rollout,
            context_length=cfg.server.context_length,
            trained=trained,
            workflow=workflow,
        )
        return cls(cfg.evaluator, held_out, rollout, run_dir(cfg) / "samples.jsonl")

    def maybe_evaluate(
        self, *, step: int, epoch: int, epoch_ended: bool, last: bool = False
    ) -> dict[str, float]:
        """Evaluates where `evaluator` says so: before the first step (step 0), after a step when it
        is due, and after the last one. Returns the metrics (SetEvaluator.evaluate), on every rank,
        {} where nothing was due. `step` and `epoch` count from 1."""
        label = self._times.label(step=step, epoch=epoch, epoch_ended=epoch_ended, last=last)
        return {} if label is None else self.evaluate(None if label == "during" else label)

    def evaluate(self, when: str | None = None) -> dict[str, float]:
        """Evaluates now, by the weights that the servers have. when: "before" or "after" has some
        completions written to <run>/samples.jsonl."""
        with record_timing("eval"):
            return self._rollout.on_driver(HeldOut.evaluate, self._held_out, self._path, when)
