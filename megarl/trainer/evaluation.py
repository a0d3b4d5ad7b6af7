"""Evaluates by generation on held-out rows: of a run as it trains, of a user's script, and of
`megarl eval`."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megarl.algos.rows import rollouts_of
from megarl.api.batch import Padded
from megarl.api.inference import RolloutWorkflow
from megarl.config.dataset import DatasetConfig, SourceConfig
from megarl.config.errors import raise_if_any
from megarl.config.loader import run_dir
from megarl.config.recipe_engines import server_addresses
from megarl.config.recipes import (
    BaseConfig,
    GRPOConfig,
    held_out_key,
    held_out_sets,
    workflow_of,
)
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig, ServerConfig
from megarl.config.run import EvaluatorConfig
from megarl.config.script import REWARD_KEYS, note_read
from megarl.data.dataset import RowDataset, build_dataset
from megarl.data.sources import sources_of
from megarl.data.tokenizer import check_context, run_tokenizer
from megarl.observability.intervals import Estimate, mean_ci
from megarl.observability.run_log import EVAL_REWARDS_FILE, RunLog
from megarl.observability.stats_tracker import record_timing
from megarl.parallel.ranks import on_rank_zero
from megarl.rollout.chat import MixedWorkflow, taken_options
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.executor import RolloutExecutor
from megarl.rollout.local import SGLangEngine
from megarl.rollout.rewards import RewardPool, check_rows, reward_of, shared_pool
from megarl.rollout.worker import pickled_workflow
from megarl.trainer.rollout_metrics import completions, expected
from megarl.trainer.saver import Frequency
from megarl.trainer.scores import figures, final_answers
from megarl.utils.importing import load_object
from megarl.utils.stopping import StopRequested

SAMPLES_FILE = "samples.jsonl"
N_SAMPLES_SHOWN = 12
_JOINED = ("accuracy", "reward", "failed")  # figures of several sets that have a mean
Rows = list[dict[str, Any]]
Sample = dict[str, Any]  # key, prompt_number, prompt, completion, expected, reward


@dataclass(frozen=True, kw_only=True)
class SetEvaluator:
    """Evaluates by generation on one data set. Rank 0 only.

    name: of the set, "" for a run's valid_dataset; workflow: makes the answers, with the reward."""

    rows: Rows
    workflow: RolloutWorkflow
    tokenizer: Any
    config: EvaluatorConfig
    seed: int
    name: str = ""

    def measure(
        self, executor: RolloutExecutor
    ) -> tuple[dict[str, float], list[Sample], Padded | None]:
        """Returns the figures of answers to all rows (scores.figures, and response_len), a record
        of every answer, and the answers [B,S], None where all failed.

        A rollout counts once, however many rows it has, with what the model wrote in the first; it
        is right where its reward is at least 1. Where prompts have several answers, the records
        have the final `answer` of each, as maj@n counts it. Raises RuntimeError where every row was
        rejected."""
        batch, failed = executor.answer(self.rows, workflow=self.workflow)
        if batch is None and not any(failed):
            name = self.name or "evaluation"
            raise RuntimeError(f"{name}: the workflow rejected all {len(self.rows)} rows")
        samples = [] if batch is None else self._samples(batch)
        prompts = [sample["prompt_number"] for sample in samples]
        answers: list[str] = []
        if len(set(prompts)) < len(prompts):
            answers = final_answers([sample["completion"] for sample in samples])
            for sample, answer in zip(samples, answers, strict=False):
                sample["answer"] = answer
        measured = figures(
            prompts,
            [sample["reward"] for sample in samples],
            answers,
            failed=sum(failed),
            max_failed=self.config.max_failed,
            seed=self.seed,
            name=metric(self.name, "accuracy"),
        )
        measured["response_len"] = math.nan
        if batch is not None and measured["failed"] <= self.config.max_failed:
            written = rollouts_of(batch).sums(batch["loss_mask"].sum(1))
            measured["response_len"] = written.float().mean().item()
        return measured, samples, batch

    def _samples(self, batch: Padded) -> list[Sample]:
        """Returns a record of every rollout: what it answers, what it wrote, what it earned."""
        rollouts, written = rollouts_of(batch), batch["loss_mask"].bool()
        rewards = rollouts.common(batch["rewards"].float(), "rewards").tolist()
        samples = []
        for k, reward in zip(rollouts.first.tolist(), rewards, strict=True):
            ids = batch["input_ids"][k][written[k]].tolist()
            number = int(batch["group_ids"][k])
            samples.append(
                {
                    "key": _prompt_key(self.rows[number]),
                    "prompt_number": number,
                    "prompt": self.rows[number].get("prompt", ""),
                    "completion": self.tokenizer.decode(ids, skip_special_tokens=True),
                    "expected": expected(self.rows[number]),
                    "reward": reward,
                }
            )
        return samples

    def record(
        self,
        samples: Sequence[Sample],
        shown: Sequence[dict[str, Any]],
        path: Path,
        *,
        step: int,
        when: str | None,
    ) -> None:
        """Appends the rewards of every prompt to eval_rewards.jsonl beside `path`, with `when`
        ("before" or "after") the completions `shown` to `path`. Of several evaluations of a step
        the latest counts."""
        mark = {"dataset": self.name} if self.name else {}
        if when in ("before", "after"):
            for record in shown:
                RunLog(path).append(step, mark | {"when": when} | record)
        by_prompt: dict[str, list[float]] = {}
        for sample in samples:
            by_prompt.setdefault(sample["key"], []).append(sample["reward"])
        rewards = RunLog(path.with_name(EVAL_REWARDS_FILE))
        rewards.append(step, mark | {"rewards": by_prompt})


def metric(name: str, figure: str) -> str:
    """Returns the metric of a figure of the data set `name`, "" where there is one alone."""
    figure = figure.replace("@", "_at_")
    return f"eval/{name}/{figure}" if name else f"eval/{figure}"


def _prompt_key(row: dict[str, Any]) -> str:
    """Returns a name for a row, the same in every run, by any tokenizer and system message."""
    own = {k: v for k, v in row.items() if k not in ("row_id", "prompt", "prompt_ids")}
    own["messages"] = [m for m in row["messages"] if m["role"] != "system"]
    text = json.dumps(own, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def make_pool(config: RolloutConfig) -> RewardPool:
    """Returns the reward workers of a configuration."""
    return RewardPool(
        config.reward_workers,
        timeout=config.reward_timeout,
        addresses=config.reward_addresses,
        on_error=config.on_reward_error,
    )


def make_workflow(
    config: RolloutConfig,
    data: SourceConfig,
    rows: RowDataset,
    gconfig: GenerationHyperparameters,
    tokenizer: Any,
    pool: RewardPool,
) -> RolloutWorkflow:
    """Returns the workflow of a data set with its reward; of a mixture, one that has each part's.
    Raises ValueError for a row that the reward refuses, TypeError for a workflow that
    rollout.workers cannot get."""
    by_part: dict[str, RolloutWorkflow] = {}
    for name, part in sources_of(data).items():
        reward_fn, named = reward_of(part), workflow_of(config.workflow, part)
        checked = (rows[i] for i in rows.parts[name])
        check_rows(reward_fn, checked, timeout=config.reward_timeout)
        make = load_object(named.type, what="rollout.workflow")
        by_part[name] = make(
            reward_fn, gconfig, tokenizer, reward_pool=pool, **taken_options(make, named.options)
        )
    workflow = by_part[""] if "" in by_part else MixedWorkflow(by_part, gconfig)
    if config.workers:
        pickled_workflow(workflow, config.workers)  # fails now, before servers are waited for
    return workflow


class HeldOut:
    """Evaluates by generation on every validation set of a run. Rank 0 only.

    shown: the first completions of the latest evaluation, at most `shows` of every set."""

    def __init__(self, evaluators: Sequence[SetEvaluator], *, shows: int = 0) -> None:
        self.evaluators, self._shows = evaluators, shows
        self.shown: list[dict[str, Any]] = []

    @classmethod
    def for_run(
        cls,
        cfg: BaseConfig,
        tokenizer: Any,
        pool: RewardPool,
        *,
        sets: Mapping[str, DatasetConfig] | None = None,
        trained: RowDataset | None = None,
        workflow: RolloutWorkflow | None = None,
        shows: int = 0,
    ) -> HeldOut:
        """Reads the sets, by default those of `cfg`, an RL recipe or one with servers for its
        evaluation, without prompts of the training data `trained` (evaluator.overlap). workflow: of
        all sets, in place of the one that `rollout` names. Raises ConfigError naming each set that
        is not sound."""
        rl = isinstance(cfg, GRPOConfig)
        of: Any = cfg if rl else vars(cfg)["generation"]  # has rollout and server
        gconfig = of.eval_gconfig if rl else of.gconfig
        evaluators, problems = [], []
        for name, data in (held_out_sets(cfg) if sets is None else sets).items():
            try:
                rows = build_dataset(
                    data,
                    tokenizer,
                    purpose="rl" if rl else "prompts",
                    seed=cfg.seed,
                    apart_from=trained,
                    overlap=cfg.evaluator.overlap,
                )
                check_context(rows, gconfig, of.server.context_length)
                flow = workflow or make_workflow(of.rollout, data, rows, gconfig, tokenizer, pool)
            except (ValueError, OSError) as e:
                key = held_out_key(name) if sets is None else name
                problems.append(f"{key}: {str(e).removeprefix(f'{key}: ')}")
                continue
            evaluators.append(
                SetEvaluator(
                    rows=list(rows),
                    workflow=flow,
                    tokenizer=tokenizer,
                    config=cfg.evaluator,
                    seed=cfg.seed,
                    name=name,
                )
            )
        raise_if_any(problems)
        return cls(evaluators, shows=shows)

    def evaluate(
        self, client: RemoteSGLangEngine, samples_path: Path, when: str | None
    ) -> dict[str, float]:
        """Returns the metrics of every set, eval/... of valid_dataset and eval/<name>/... of the
        others, joined as `with_means` does; {} where there is no set. Records them (see
        SetEvaluator.record) under the version of the servers' weights, which every step makes one
        of."""
        metrics: dict[str, float] = {}
        self.shown = []
        for each in self.evaluators:
            measured, samples, batch = each.measure(client.executor)
            metrics |= {metric(each.name, figure): value for figure, value in measured.items()}
            if batch is None:
                continue
            first = completions(batch, each.tokenizer, each.rows)
            self.shown += first[: self._shows]
            shown, step = first[:N_SAMPLES_SHOWN], client.get_version()
            each.record(samples, shown, samples_path, step=step, when=when)
        return with_means(metrics, [each.name for each in self.evaluators], _JOINED)


def evaluate_unless_stopped(
    held_out: HeldOut, client: RemoteSGLangEngine, samples_path: Path, when: str | None
) -> dict[str, float]:
    """Returns the metrics of held_out.evaluate; {} where a signal ends it: a recipe's loop looks
    for itself, where all ranks agree."""
    try:
        return held_out.evaluate(client, samples_path, when)
    except StopRequested:
        return {}


def with_means(
    metrics: dict[str, float], names: list[str], joined: tuple[str, ...]
) -> dict[str, float]:
    """Returns the metrics, and where there is no valid_dataset (named "") that eval/<figure> could
    be of, the mean over the sets of each figure of `joined`, each set with the same weight, with
    its interval."""
    if not names or "" in names:
        return metrics
    means: dict[str, float] = {}
    for figure in joined:
        keys = [metric(name, figure) for name in names]
        if any(key not in metrics for key in keys):
            continue
        means[f"eval/{figure}"] = sum(metrics[key] for key in keys) / len(keys)
        if all(f"{key}_lo" in metrics for key in keys):
            each = [Estimate(metrics[k], metrics[f"{k}_lo"], metrics[f"{k}_hi"]) for k in keys]
            means[f"eval/{figure}_lo"], means[f"eval/{figure}_hi"] = mean_ci(each)
    return metrics | means


class EvaluationTimes(Frequency):
    """Says when to evaluate: before the first step, when it is due, and after the last step."""

    config: EvaluatorConfig

    def label(self, *, step: int, epoch: int, epoch_ended: bool, last: bool = False) -> str | None:
        """Returns which evaluation the end of a step asks for: "before" (of step 0, before the
        first), "during" or "after" (the last step); None for none."""
        if step == 0:
            return "before" if self.config.at_start else None
        if last and self.config.at_end:
            return "after"
        return "during" if self.due(step=step, epoch=epoch, epoch_ended=epoch_ended) else None


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
        training data, whose prompts are left out (evaluator.overlap). Raises ConfigError for data
        that is not sound.
        """
        sections = ("evaluator", "valid_dataset", "valid_datasets", "eval_gconfig")
        note_read(cfg, *sections, *REWARD_KEYS, "rollout.workflow")
        pool = shared_pool(cfg.rollout)
        held_out = HeldOut.for_run(cfg, tokenizer, pool, trained=trained, workflow=workflow)
        return cls(cfg.evaluator, held_out, rollout, run_dir(cfg) / SAMPLES_FILE)

    def maybe_evaluate(
        self, *, step: int, epoch: int, epoch_ended: bool, last: bool = False
    ) -> dict[str, float]:
        """Evaluates where `evaluator` says so: before the first step (step 0), after a step when it
        is due, and after the last one. Returns the metrics (HeldOut.evaluate), on every rank, {}
        where nothing was due. `step` and `epoch` count from 1."""
        label = self._times.label(step=step, epoch=epoch, epoch_ended=epoch_ended, last=last)
        return {} if label is None else self.evaluate(label)

    def evaluate(self, when: str | None = None) -> dict[str, float]:
        """Evaluates now, by the weights that the servers have. when: "before" or "after" has some
        completions written to <run>/samples.jsonl."""
        with record_timing("eval"):
            return self._rollout.on_driver(
                HeldOut.evaluate, self._held_out, self._rollout, self._path, when
            )


def evaluate_model(
    cfg: GRPOConfig, model: str, datasets: Mapping[str, DatasetConfig], *, logs: Path
) -> tuple[dict[str, dict[str, float]], list[Sample]]:
    """Returns the figures of each data set, and every answer. model: a Hugging Face directory.
    logs: where the servers' go, made where it is missing. All rows are read and all workflows made
    before a server starts: raises ConfigError naming each data set that is not sound, RuntimeError
    where servers do not come up."""
    tokenizer = run_tokenizer(cfg, model)
    results: dict[str, dict[str, float]] = {}
    samples: list[Sample] = []
    with make_pool(cfg.rollout) as pool:
        held_out = HeldOut.for_run(cfg, tokenizer, pool, sets=datasets)
        logs.mkdir(parents=True, exist_ok=True)
        client = make_client(
            cfg.rollout,
            cfg.server,
            model_path=model,
            dtype=cfg.server.dtype,
            log_dir=logs,
            seed=cfg.seed,
            tokenizer=tokenizer,
        )
        try:
            client.initialize()
            for each in held_out.evaluators:
                measured, answered, _ = each.measure(client.executor)
                prompts = {sample["prompt_number"] for sample in answered}
                results[each.name] = {"prompts": float(len(prompts))} | measured
                samples += ({"dataset": each.name} | sample for sample in answered)
        finally:
            client.destroy()
    return results, samples


def make_client(
    rollout: RolloutConfig, server: ServerConfig, *, seed: int, tokenizer: Any, **own: Any
) -> RemoteSGLangEngine:
    """Returns the client of the servers that `rollout` names, else of servers of its own, which
    `own` describes as for SGLangEngine."""
    both = {"seed": seed, "tokenizer": tokenizer, "weight_sync": own.pop("weight_sync", None)}
    if server_addresses(rollout):
        return RemoteSGLangEngine(rollout, **both)
    return SGLangEngine(rollout, server, **both, **own)
