"""Checks names of metrics and phases, which do nothing where nothing has them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from megarl.config.recipes import BaseConfig, GRPOConfig, SFTConfig, held_out_sets
from megarl.config.run import ProfilerConfig
from megarl.utils.importing import is_import_path

PHASES = (
    *("rollout", "episodes", "record", "logp", "ref", "renew_ref", "values", "teacher"),
    *("reward_model", "train", "train_critic", "train_step", "update_weights", "step", "eval"),
    *("save", "recover"),
)
# the first part of the names of metrics, besides eval; a test holds them against docs/metrics.md
FAMILIES = (
    *("train_rollout_logprob_abs_diff", "mismatch", "staleness", "moe", "weight_sync", "reward"),
    *("dataset", "difficulty", "curriculum", "response_len", "forks", "critic", "timing"),
    *("tokens", "perf", "memory", "rollout", "loss", "pg_loss", "ppl", "grad_norm", "lr", "ratio"),
    *("entropy", "kl_ref", "approx_kl", "accuracy", "margin", "first_ratio_abs_dev", "logp"),
    *("reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected", "advantage"),
    *("clip_frac", "teacher_kl_forward", "teacher_kl_reverse", "reference_point"),
    *("advantage_max", "advantage_min", "advantage_std", "behav_dropped_frac", "behav_ess"),
    *("behav_imp_weight", "clip_frac_dual", "clip_frac_high", "clip_frac_low", "elapsed_s"),
    *("kl_coef", "kl_ctl", "kl_observed", "n_updates", "picked_frac", "prefix_ratio"),
    *("ratio_abs_dev", "ratio_rms_dev", "skipped_sequences", "skipped_tokens", "skipped_updates"),
    *("student_tail_mass", "teacher_tail_mass", "tools", "update_successful"),
)
_OF_ANSWERS = ("accuracy", "reward", "some_credit", "response_len", "samples", "failed")
_OF_LOSS = ("loss", "ppl", "token_accuracy", "exact_match")
_OF_PAIRS = (
    *("loss", "accuracy", "margin", "reward_chosen", "reward_rejected", "logp_chosen"),
    *("logp_rejected", "reference_point"),
)
# keys that may name code by its import path
_CODE = ("type", "backend", "workflow", "reward", "recipe")
_SEVERAL = re.compile(r"(pass|maj)_at_\d+")


def metric_problems(cfg: BaseConfig) -> Iterator[str]:
    """Yields a line where saver.keep_best goes by a metric that the run does not have."""
    metric = cfg.saver.metric
    if not cfg.saver.keep_best:
        return
    first, _, rest = metric.partition("/")
    if first != "eval":
        if first not in FAMILIES:
            known = ("eval", *FAMILIES)
            yield f"saver.metric={metric}: no metric begins so; {_meant(first, known)}"
        return
    sets = held_out_sets(cfg)
    if not sets:
        yield f"saver.metric={metric}: nothing is evaluated; set valid_dataset.type"
        return
    name, _, figure = rest.rpartition("/")
    figure = figure.removesuffix("_lo").removesuffix("_hi")
    figures = _figures(cfg)
    if name and name not in sets:
        named = [f"eval/{each}/..." for each in sets if each] or ["eval/..."]
        yield f"saver.metric={metric}: no data set is called {name}; there are {', '.join(named)}"
    elif figure not in figures and not _SEVERAL.fullmatch(figure):
        yield f"saver.metric={metric}: no figure of an evaluation; {_meant(figure, figures)}"


def phase_problems(cfg: ProfilerConfig) -> Iterator[str]:
    """Yields a line for the phases that no step has."""
    unknown = [phase for phase in cfg.phases if phase not in PHASES]
    if unknown:
        yield f"profiler.phases={cfg.phases}: {unknown[0]} is none; {_meant(unknown[0], PHASES)}"


def _figures(cfg: BaseConfig) -> Sequence[str]:
    if isinstance(cfg, GRPOConfig):
        return _OF_ANSWERS
    if isinstance(cfg, SFTConfig):
        return (*_OF_LOSS, *(_OF_ANSWERS if cfg.generation is not None else ()))
    return _OF_PAIRS


def runs_own_code(cfg: BaseConfig) -> bool:
    """Returns whether code of the user's runs in a step, which may have metrics and phases of its
    own: a trainer, a workflow, a reward, a backend, ..."""
    return bool(cfg.trainer.type) or any(_own(asdict(cfg)))


def _own(tree: Any, key: str = "") -> Iterator[bool]:
    """Yields, for each value of a tree, whether it names code of the user's."""
    if isinstance(tree, dict | list):
        for name, value in tree.items() if isinstance(tree, dict) else ((key, v) for v in tree):
            yield from _own(value, str(name))
    elif isinstance(tree, str) and key in _CODE:
        yield is_import_path(tree) and not tree.startswith("megarl.")


def _meant(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
