"""Checks a workflow by its options, the run's chat template and the longest prompts of the data."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megarl.config.base import SeamConfig
from megarl.config.recipe_engines import model_path
from megarl.config.recipes import GRPOConfig, sources, workflow_of
from megarl.config.rollout import GenerationHyperparameters
from megarl.data.tokenizer import check_context, is_plainly_sound, run_tokenizer
from megarl.rollout.rewards import no_reward
from megarl.utils.importing import option_problems


class SourceRows(NamedTuple):
    """The facts about a source's rows that code is checked with.

    columns: the names that a reward gets.
    longest: the longest prompts, with their tokens; [] if they are not known.
    """

    columns: tuple[str, ...]
    longest: list[dict[str, Any]]


def workflow_problems(
    workflow: type, named: SeamConfig, cfg: GRPOConfig | None, rows: Mapping[str, SourceRows]
) -> Iterator[str]:
    """Yields a line for each option, chat template or prompt that a workflow refuses.

    A class of the user's is not created. The class of megarl's that it extends is created in its
    place, if that class takes the options.

    named: the workflow's options.
    cfg: the run's configuration; None checks the options only.
    rows: as `check_data` returns them, by key of the source.
    """
    from megarl.rollout.chat import ChatWorkflow
    from megarl.rollout.workflows.multi_turn import TurnsWorkflow

    ours = next(c for c in workflow.__mro__ if c.__module__.startswith("megarl.") or c is object)
    takes = option_problems(ours, named.options, key="", positional=3, by_name=("reward_pool",))
    if not issubclass(ours, ChatWorkflow) or inspect.isabstract(ours) or any(takes):
        return
    gconfig = cfg.gconfig if cfg else GenerationHyperparameters()

    def problems(tokenizer: Any) -> Iterator[str]:
        try:
            ours(no_reward, gconfig, tokenizer, **named.options)
            if cfg is None or tokenizer is None or not issubclass(workflow, TurnsWorkflow):
                return
            for key, source in sources(cfg).items() if ours is workflow else ():
                mine = workflow_of(cfg.rollout.workflow, source)
                trains = key in rows and key.startswith("train_dataset")
                if not trains or mine.type != named.type:
                    continue
                flow = workflow(no_reward, gconfig, tokenizer, **mine.options)
                prompts = [flow.static_prompt(row) for row in rows[key].longest]
                check_context(prompts, gconfig, cfg.server.context_length)
                for row in prompts:
                    flow.check_room(row, len(row["prompt_ids"]))
        except (TypeError, ValueError) as e:
            yield str(e)

    refusals = list(problems(None))
    if not refusals and cfg is not None:
        path = model_path(cfg, "actor")
        if not is_plainly_sound(cfg, path, problems):
            with contextlib.suppress(Exception):  # its own check says what a tokenizer lacks
                refusals = list(problems(run_tokenizer(cfg, path)))
    yield from refusals
