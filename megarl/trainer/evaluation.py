"""Evaluation by generation: accuracy and reward on held-out rows, with confidence intervals."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megarl.algos.rollouts import rollouts_of
from megarl.api.batch import Padded
from megarl.api.inference import RolloutWorkflow
from megarl.config.run import EvaluatorConfig
from megarl.observability.intervals import proportion_ci, score_ci
from megarl.observability.report.runs import EVAL_REWARDS_FILE
from megarl.observability.run_log import RunLog
from megarl.rollout.executor import Answered
from megarl.trainer.rollout_metrics import completions
from megarl.trainer.scores import beside_failures, final_answer, of_several, with_interval

N_SAMPLES_SHOWN = 12


class Rows(Protocol):
    """Gives held-out rows by index, from 0, and has their number as its length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


class Generates(Protocol):
    """Generates samples on rank 0: an executor or a rollout session."""

    def answer(self, rows: Sequence[dict[str, Any]], /, workflow: RolloutWorkflow) -> Answered:
        """Returns samples of `rows`, and how many of each row failed."""

    def get_version(self) -> int:
        """Returns the version of the weights that generate."""


class SetEvaluator:
    """Generates answers to the rows of a set and measures their rewards.
    Rank 0 only. shown: the first completions of the latest evaluation, at most `shows`."""

    def __init__(
        self,
        rows: Rows,
        engine: Generates,
        workflow: RolloutWorkflow,
        tokenizer: Any,
        *,
        config: EvaluatorConfig,
        seed: int,
        name: str = "",
        shows: int = 0,
    ) -> None:
        """Takes the name of the data set, where there are several: metrics are eval/<name>/..."""
        self.rows = [rows[i] for i in range(len(rows))]
        self._engine, self._workflow, self._tokenizer = engine, workflow, tokenizer
        self._seed, self._name, self._shows = seed, name, shows
        self._max_failed = config.max_failed
        self.shown: list[dict[str, Any]] = []

    def evaluate(self, samples_path: Path, when: str | None) -> dict[str, float]:
        """Returns the `eval/...` metrics of the held-out rows, with the bounds of their confidence
        intervals.

        With several answers to each prompt eval/pass_at_<k> is the chance that one of k is right,
        and eval/maj_at_<n> the reward of the answer that most of n give.
        A rollout is right when its reward is at least 1; some_credit is the share with any reward,
        for scorers that give parts of a point. The rewards of every prompt go to eval_rewards.jsonl
        beside `samples_path`. With `when` ("before" or "after") the first completions go to
        `samples_path`, in place of earlier ones.

        failed is the share of answers that failed, and are in no other figure; where it is above
        config.max_failed the others are NaN. Raises RuntimeError where every row was rejected."""
        batch, failed = self._engine.answer(self.rows, workflow=self._workflow)
        if batch is None and not any(failed):
            raise RuntimeError(f"evaluation: the workflow rejected all {len(self.rows)} rows")
        self.shown = []
        rollouts = 0 if batch is None else len(rollouts_of(batch))
        found = beside_failures(
            {} if batch is None else self._measured(batch, samples_path, when),
            samples=rollouts,
            failed=sum(failed),
            bound=self._max_failed,
            name=metric(self._name, "accuracy"),
        )
        return {metric(self._name, figure): value for figure, value in found.items()}

    def _measured(self, batch: Padded, samples_path: Path, when: str | None) -> dict[str, float]:
        """Returns the figures of a batch, by their names; writes its rewards and completions."""
        if when is not None or self._shows:
            records = completions(batch, self._tokenizer, self.rows)
            self.shown = records[: self._shows]
        if when is not None:
            for record in records[:N_SAMPLES_SHOWN]:
                self._append(samples_path, {"when": when} | record)
        rollouts = rollouts_of(batch)
        prompts = rollouts.of_first(batch["group_ids"]).tolist()
        rewards = rollouts.common(batch["rewards"].float(), "rewards")
        self._keep(samples_path.with_name(EVAL_REWARDS_FILE), prompts, rewards.tolist())
        lengths = rollouts.sums(batch["loss_mask"].sum(1)).float()
        right = (rewards >= 1).tolist()
        low, high = proportion_ci(right, groups=prompts)
        reward_low, reward_high = score_ci(rewards.tolist(), self._seed, groups=prompts)
        return {
            "accuracy": sum(right) / len(right),
            "accuracy_lo": low,
            "accuracy_hi": high,
            "some_credit": (rewards > 0).float().mean().item(),
            "reward": rewards.mean().item(),
            "reward_lo": reward_low,
            "reward_hi": reward_high,
            "response_len": lengths.mean().item(),
        } | self._of_several(batch, prompts, rewards.tolist())

    def _of_several(
        self, batch: Padded, prompts: Sequence[int], rewards: Sequence[float]
    ) -> dict[str, float]:
        """Returns pass_at_<k> and maj_at_<n> with their intervals; {} where prompts have one answer
        each."""
        if len(set(prompts)) == len(prompts):
            return {}
        answers = [final_answer(text) for text in answer_texts(batch, self._tokenizer)]
        most = max(Counter(prompts).values())
        found = of_several(prompts, rewards, answers, n=most)
        return {
            f"{name.replace('@', '_at_')}{end}": value
            for name, values in found.items()
            for end, value in with_interval(values, most, self._seed).items()
        }

    def _keep(self, path: Path, prompts: Sequence[int], rewards: Sequence[float]) -> None:
        """Appends {"step", "rewards": {prompt: its samples' rewards}}, for paired comparisons."""
        by_prompt: dict[str, list[float]] = {}
        for i, reward in zip(prompts, rewards, strict=True):
            by_prompt.setdefault(_prompt_key(self.rows[i]), []).append(reward)
        self._append(path, {"rewards": by_prompt})

    def _append(self, path: Path, record: dict[str, Any]) -> None:
        """Appends a record of this data set; of several evaluations of a step the latest counts."""
        step = self._engine.get_version()  # every step makes one version
        RunLog(path).append(step, ({"dataset": self._name} if self._name else {}) | record)


def metric(name: str, figure: str) -> str:
    """Returns the metric of a figure of the data set `name`, "" where there is one alone."""
    return f"eval/{name}/{figure}" if name else f"eval/{figure}"


def answer_texts(batch: Padded, tokenizer: Any) -> list[str]:
    """Returns what the model wrote in the first row of each rollout of a batch, as text."""
    return [
        tokenizer.decode(
            batch["input_ids"][k][batch["loss_mask"][k].bool()].tolist(), skip_special_tokens=True
        )
        for k in rollouts_of(batch).first.tolist()
    ]


def _prompt_key(row: dict[str, Any]) -> str:
    """Returns a name for a prompt with its answer, the same in every run."""
    text = json.dumps([row["prompt"], str(row.get("answer", ""))])
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
