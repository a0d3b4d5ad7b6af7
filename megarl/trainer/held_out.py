"""Makes workflows for data sets, and evaluates a model on the validation sets of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.api.inference import RolloutWorkflow
from megarl.config.dataset import PartConfig, SourceConfig
from megarl.config.recipes import BaseConfig, held_out_sets
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig
from megarl.data.dataset import RowDataset, build_dataset, check_context
from megarl.data.sources import sources_of
from megarl.observability.intervals import Estimate, mean_ci
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.executor import Answered
from megarl.rollout.pickling import pickled_workflow
from megarl.rollout.rewards import RewardPool, check_rows, reward_of
from megarl.rollout.workflows.mixed import MixedWorkflow
from megarl.trainer.evaluation import SetEvaluator, metric
from megarl.utils.importing import load_object

_JOINED = ("accuracy", "reward", "failed")  # figures of several sets that have a mean


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
    made: dict[str, RolloutWorkflow] = {}
    for name, part in sources_of(data).items():
        reward_fn, named = reward_of(part), config.workflow
        if isinstance(part, PartConfig) and part.workflow.type:
            named = part.workflow
        checked = (rows[i] for i in rows.parts[name])
        check_rows(reward_fn, checked, timeout=config.reward_timeout)
        made[name] = load_object(named.type, what="rollout.workflow")(
            reward_fn, gconfig, tokenizer, reward_pool=pool, **named.options
        )
    workflow = made[""] if "" in made else MixedWorkflow(made, gconfig)
    if config.workers:
        pickled_workflow(workflow, config.workers)  # fails now, before servers are waited for
    return workflow


class HeldOut:
    """Evaluates by generation on every validation set of a run. Rank 0 only."""

    def __init__(
        self,
        cfg: BaseConfig,
        client: RemoteSGLangEngine,
        tokenizer: Any,
        pool: RewardPool,
        *,
        gconfig: GenerationHyperparameters,
        rollout: RolloutConfig,
        context_length: int,
        trained: RowDataset | None,
        workflow: RolloutWorkflow | None = None,
        purpose: str = "rl",
        shows: int = 0,
    ) -> None:
        """Reads the sets, without prompts of `trained` (evaluator.overlap). context_length: of the
        servers, in tokens; workflow: of all sets, in place of the one that `rollout` names;
        purpose: "rl", or "prompts" where rows may have an answer at the end; shows: completions of
        each set that are kept in `shown`.
        """
        self._client = client
        self._evaluators: dict[str, SetEvaluator] = {}
        for name, data in held_out_sets(cfg).items():
            rows = build_dataset(
                data,
                tokenizer,
                purpose=purpose,
                seed=cfg.seed,
                apart_from=trained,
                overlap=cfg.evaluator.overlap,
            )
            check_context(rows, gconfig, context_length)
            self._evaluators[name] = SetEvaluator(
                rows,
                self,
                workflow or make_workflow(rollout, data, rows, gconfig, tokenizer, pool),
                tokenizer,
                config=cfg.evaluator,
                seed=cfg.seed,
                name=name,
                shows=shows,
            )

    def answer(self, rows: Sequence[dict[str, Any]], workflow: RolloutWorkflow) -> Answered:
        """Returns the samples of held-out rows, which stay on this rank."""
        return self._client.executor.answer(rows, workflow)

    @property
    def shown(self) -> list[dict[str, Any]]:
        """Returns the first completions of the latest evaluation of every set."""
        return [record for each in self._evaluators.values() for record in each.shown]

    def get_version(self) -> int:
        """Returns the version of the servers' weights."""
        return self._client.get_version()

    def evaluate(self, samples_path: Path, when: str | None) -> dict[str, float]:
        """Returns the metrics of every set (see Evaluator.evaluate), eval/... of valid_dataset and
        eval/<name>/... of the others, joined as `with_means` does; {} where there is no set."""
        found: dict[str, float] = {}
        for evaluator in self._evaluators.values():
            found |= evaluator.evaluate(samples_path, when)
        return with_means(found, list(self._evaluators), _JOINED)


def with_means(
    found: dict[str, float], names: list[str], figures: tuple[str, ...]
) -> dict[str, float]:
    """Returns the metrics, and where there is no valid_dataset (named "") that eval/<figure> could
    be of, the mean over the sets, each with the same weight, with its interval."""
    if not names or "" in names:
        return found
    joined = dict(found)
    for figure in figures:
        keys = [metric(name, figure) for name in names]
        if any(key not in found for key in keys):
            continue
        joined[f"eval/{figure}"] = sum(found[key] for key in keys) / len(keys)
        if all(f"{key}_lo" in found for key in keys):
            each = [Estimate(found[k], found[f"{k}_lo"], found[f"{k}_hi"]) for k in keys]
            joined[f"eval/{figure}_lo"], joined[f"eval/{figure}_hi"] = mean_ci(each)
    return joined
