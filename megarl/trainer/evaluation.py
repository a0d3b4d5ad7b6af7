"""Evaluation by generation: accuracy and reward on held-out rows, with confidence intervals."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megarl.algos.rollouts import rollouts_of
from megarl.api.batch import Padded
from megarl.api.inference import RolloutWorkflow
from megarl.config.run import EvaluatorConfig
from megarl.observability.intervals import bootstrap_ci, proportion_ci
from megarl.observability.report.runs import EVAL_REWARDS_FILE
from megarl.observability.stats_logger import supersede
from megarl.trainer.rollout_metrics import completions
from megarl.trainer.scores import pass_at_k, steps_of_k

N_SAMPLES_SHOWN = 12


class Rows(Protocol):
    """Gives held-out rows by index, from 0, and has their number as its length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


class Generates(Protocol):
    """Generates samples on rank 0: an executor or a rollout session."""

    def rollout_batch(self, rows: Sequence[dict[str, Any]], /, workflow: RolloutWorkflow) -> Padded:
        """Returns samples of `rows`, padded [B,S]; group_ids [B] are their indices in `rows`."""

    def get_version(self) -> int:
        """Returns the version of the weights that generate."""


class Evaluator:
    """Generates answers to at most config.max_samples held-out rows and measures their rewards.
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
        shows: int = 0,
    ) -> None:
        n = len(rows) if config.max_samples is None else min(len(rows), config.max_samples)
        self.rows = [rows[i] for i in range(n)]
        self._engine, self._workflow, self._tokenizer = engine, workflow, tokenizer
        self._seed, self._shows = seed, shows
        self.shown: list[dict[str, Any]] = []

    def evaluate(self, samples_path: Path, when: str | None) -> dict[str, float]:
        """Returns the `eval/...` metrics of the held-out rows, with the bounds of their confidence
        intervals.

        With several answers to each prompt eval/pass_at_<k> is the chance that one of k is right.
        A rollout is right when its reward is at least 1; some_credit is the share with any reward,
        for scorers that give parts of a point. The rewards of every prompt go to eval_rewards.jsonl
        beside `samples_path`. With `when` ("before" or "after") the first completions go to
        `samples_path`, in place of earlier ones."""
        batch = self._engine.rollout_batch(self.rows, workflow=self._workflow)
        if when is not None or self._shows:
            records = completions(batch, self._tokenizer, self.rows)
            self.shown = records[: self._shows]
        if when is not None:
            supersede(samples_path, lambda row: row["when"] != when)
            _append(samples_path, [{"when": when} | r for r in records[:N_SAMPLES_SHOWN]])
        rollouts = rollouts_of(batch)
        prompts = rollouts.of_first(batch["group_ids"]).tolist()
        rewards = rollouts.common(batch["rewards"].float(), "rewards")
        self._keep(samples_path.with_name(EVAL_REWARDS_FILE), prompts, rewards.tolist())
        lengths = rollouts.sums(batch["loss_mask"].sum(1)).float()
        right = (rewards >= 1).tolist()
        low, high = proportion_ci(right, groups=prompts)
        reward_low, reward_high = bootstrap_ci(rewards.tolist(), seed=self._seed, groups=prompts)
        return {
            "eval/accuracy": sum(right) / len(right),
            "eval/accuracy_lo": low,
            "eval/accuracy_hi": high,
            "eval/some_credit": (rewards > 0).float().mean().item(),
            "eval/reward": rewards.mean().item(),
            "eval/reward_lo": reward_low,
            "eval/reward_hi": reward_high,
            "eval/response_len": lengths.mean().item(),
            "eval/samples": float(len(right)),
        } | _pass_at(right, prompts)

    def _keep(self, path: Path, prompts: Sequence[int], rewards: Sequence[float]) -> None:
        """Appends {"step", "rewards": {prompt: its samples' rewards}}, for paired comparisons."""
        step = self._engine.get_version()  # every step makes one version
        by_prompt: dict[str, list[float]] = {}
        for i, reward in zip(prompts, rewards, strict=True):
            by_prompt.setdefault(_prompt_key(self.rows[i]), []).append(reward)
        supersede(path, lambda row: row["step"] < step)  # what a start before this one wrote
        _append(path, [{"step": step, "rewards": by_prompt}])


def _pass_at(right: Sequence[bool], prompts: Sequence[int]) -> dict[str, float]:
    """Returns eval/pass_at_<k> over the prompts that have k answers, for each k of steps_of_k above
    1; {} where prompts have one each."""
    groups: dict[int, list[bool]] = {}
    for prompt, is_right in zip(prompts, right, strict=True):
        groups.setdefault(prompt, []).append(is_right)
    found = {}
    for k in steps_of_k(max(map(len, groups.values())))[1:]:
        each = [pass_at_k(sum(g), len(g), k) for g in groups.values() if len(g) >= k]
        found[f"eval/pass_at_{k}"] = sum(each) / len(each)
    return found


def _prompt_key(row: dict[str, Any]) -> str:
    """Returns a name for a prompt with its answer, the same in every run."""
    text = json.dumps([row["prompt"], str(row.get("answer", ""))])
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _append(path: Path, records: Sequence[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as f:
        f.writelines(json.dumps(record) + "\n" for record in records)
