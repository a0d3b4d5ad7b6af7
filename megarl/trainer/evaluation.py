"""Evaluation by generation: accuracy on held-out rows with a bootstrap confidence interval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from megarl.api.inference import InferenceEngine, RolloutWorkflow
from megarl.config.run import EvaluatorConfig
from megarl.observability.bootstrap import bootstrap_ci
from megarl.observability.stats_logger import supersede
from megarl.trainer.figures import completions

N_SAMPLES_SHOWN = 12


class Rows(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


class Evaluator:
    def __init__(
        self,
        rows: Rows,
        engine: InferenceEngine,
        workflow: RolloutWorkflow,
        tokenizer: Any,
        *,
        config: EvaluatorConfig,
        seed: int,
    ) -> None:
        n = len(rows) if config.max_samples is None else min(len(rows), config.max_samples)
        self.rows = [rows[i] for i in range(n)]
        self._engine, self._workflow, self._tokenizer = engine, workflow, tokenizer
        self._seed = seed

    def evaluate(self, samples_path: Path, when: str | None) -> dict[str, float]:
        """`eval/...` figures. A sample is right when its reward is at least 1; some_credit is the
        share with any reward, for scorers that give parts of a point. With `when`
        ("before" or "after") the first completions go to `samples_path`, in place of earlier ones.
        """
        batch = self._engine.rollout_batch(self.rows, workflow=self._workflow)
        rewards = batch["rewards"].float()
        right = (rewards >= 1).tolist()
        low, high = bootstrap_ci(right, seed=self._seed)
        if when is not None:
            records = completions(batch, self._tokenizer, self.rows)[:N_SAMPLES_SHOWN]
            supersede(samples_path, lambda row: row["when"] != when)
            with samples_path.open("a", encoding="utf-8") as f:
                f.writelines(json.dumps({"when": when} | r) + "\n" for r in records)
        lengths = batch["loss_mask"].sum(1).float()
        return {
            "eval/accuracy": sum(right) / len(right),
            "eval/accuracy_lo": low,
            "eval/accuracy_hi": high,
            "eval/some_credit": (rewards > 0).float().mean().item(),
            "eval/reward": rewards.mean().item(),
            "eval/response_len": lengths.mean().item(),
            "eval/samples": float(len(right)),
        }
