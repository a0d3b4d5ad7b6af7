"""Checks that what a step samples is enough for how its rewards become advantages."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.base import SeamConfig
from megarl.config.dataset import PartConfig
from megarl.config.recipes import GRPOConfig, sources

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
