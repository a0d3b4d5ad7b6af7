"""Checks that samples are enough for how rewards become advantages, and that preferences have
pairs."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.base import SeamConfig
from megarl.config.dataset import PartConfig
from megarl.config.preferences import preference_problems
from megarl.config.recipes import DPOConfig, GRPOConfig, RMConfig, datasets, sources

OURS = "megarl.rollout.workflows."
WITH_BASELINE = f"{OURS}rlvr:RLVRWorkflow"


def comparison_problems(cfg: GRPOConfig) -> Iterator[str]:
    """Yields a line where the samples of a prompt are too few to be compared."""
    a, n = cfg.actor, cfg.gconfig.n_samples
    if a.advantages.type == "pass_at_k":
        k = a.advantages.options.get("k")
        if isinstance(k, int) and 1 <= n <= k:
            yield (
                f"gconfig.n_samples={n}: actor.advantages=pass_at_k compares draws of k={k} of the "
                f"samples of a prompt, which are all alike; take {k + 1} or more, or lower "
                "actor.advantages.options.k"
            )
        least = cfg.rollout.min_rollouts
        if isinstance(k, int) and least < k <= n:
            yield (
                f"rollout.min_rollouts={least}: actor.advantages=pass_at_k draws k={k} of the "
                f"samples of a prompt, and failures may leave fewer; set rollout.min_rollouts={k}"
            )
    elif n == 1 and (by := a.compares_by):
        other = ", or actor.adv_norm=none" if by.startswith("actor.adv_norm") else ""
        yield f"gconfig.n_samples={n}: {by} compares the samples of a prompt; take 2 or more{other}"


def baseline_problems(cfg: GRPOConfig) -> Iterator[str]:
    """Yields a line for each workflow of megarl's that lacks the baseline which ReMax subtracts;
    what a user's own workflow brings is not known."""
    if cfg.actor.advantages.type != "remax":
        return
    for key, workflow in _training_workflows(cfg).items():
        if workflow.type == WITH_BASELINE and not workflow.options.get("greedy_baseline"):
            yield (
                "actor.advantages=remax: subtracts the reward of the greedy answer; set "
                f"{key}.options.greedy_baseline=true"
            )
        elif workflow.type.startswith(OURS) and workflow.type != WITH_BASELINE:
            yield (
                f"actor.advantages=remax: {key}={workflow.type} has no greedy answer written; take "
                f"{WITH_BASELINE} with greedy_baseline, or a workflow of your own that returns "
                "'baseline'"
            )


def _training_workflows(cfg: GRPOConfig) -> dict[str, SeamConfig]:
    """Returns the workflows of the training data by their key: of a part its own, else all's."""
    found = {}
    for key, data in sources(cfg).items():
        if key.split(".")[0] != "train_dataset":
            continue
        if isinstance(data, PartConfig) and data.workflow.type:
            found[f"{key}.workflow"] = data.workflow
        else:
            found["rollout.workflow"] = cfg.rollout.workflow
    return found


_WITHOUT_PAIRS = ("chat", "gsm8k", "reasoning_gym")


def dpo_problems(cfg: DPOConfig) -> Iterator[str]:
    """Yields the problems of the loss, the reference and the data of recipe dpo."""
    yield from preference_problems("preference", cfg.preference)
    if cfg.ref.path and not cfg.preference.needs_reference:
        yield (
            f"ref.path={cfg.ref.path}: preference.loss={cfg.preference.loss} measures against no "
            "reference; leave it out"
        )
    if not cfg.preference.paired:
        yield from _single_row_problems(cfg)
    yield from _data_problems(cfg)


def rm_problems(cfg: RMConfig) -> Iterator[str]:
    """Yields the problems of the data of recipe rm."""
    yield from _data_problems(cfg)


def _single_row_problems(cfg: DPOConfig) -> Iterator[str]:
    """Yields a line for each data set whose batches have no second answer to compare with."""
    for key, data in datasets(cfg).items():
        small = data.size == 1 if key != "train_dataset" else data.batch_size == 1
        if small:
            name = "batch_size" if key == "train_dataset" else "size"
            yield (
                f"{key}.{name}=1: preference.loss={cfg.preference.loss} needs answers to other "
                "prompts beside each; take 2 or more"
            )


def _data_problems(cfg: DPOConfig | RMConfig) -> Iterator[str]:
    for key, source in sources(cfg).items():
        if source.type in _WITHOUT_PAIRS:
            yield (
                f"{key}.type={source.type}: has no pairs of answers; take preference, arithmetic, "
                "or a function of yours that returns rows with chosen and rejected"
            )
    if cfg.train_dataset.curriculum is not None:
        yield (
            f"train_dataset.curriculum: goes by rewards, which recipe={cfg.recipe} has none of; "
            "leave it out"
        )
