"""Evaluates a model on data sets: how often one answer is right, one of k, and most of n.

Data sets are gsm8k, arithmetic, reasoning_gym or a function's import path; without --datasets they
are the configuration's valid_dataset and valid_datasets. Keys change the configuration, like
valid_dataset.size=200, server.type=sglang, server.tp=8, eval_gconfig.max_new_tokens=2048. Servers
are started on this machine, or are those of rollout.addresses, which must serve MODEL.

A reward of 1 or more is right. accuracy is the share of right answers, pass@k the chance that one
of k is right (unbiased, from n), maj@n the reward of the answer that most of n give. Intervals are
of 95 %, over prompts. samples.jsonl has every answer with its reward, results.json the figures and
what was asked; an evaluation is never overwritten. Answers are sampled by `seed`, or by
eval_gconfig.seed where that is set.

--compare A B compares two evaluations of the same rows, prompt by prompt: the difference of each
figure with its interval, which allows for prompts that are hard for both (Newcombe 1998, method
10), and how many prompts got better and worse by their mean reward.

failed is the share of answers whose environment, reward, tool or server failed, also when asked
again, or that took too long; the others are in the figures. Above evaluator.max_failed there are no
figures, and the status is 1.
"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from megarl.cli import CommandParser, free_path, positive
from megarl.cli.compare import RESULTS, SAMPLES, compare
from megarl.config.dataset import DatasetConfig
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.recipe_engines import server_addresses
from megarl.config.recipes import GRPOConfig, held_out_sets
from megarl.config.secrets import keep_written, public_tree
from megarl.models.hf_config import read_hf_config
from megarl.utils.files import write_whole

Figures = dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluates the model that `argv` names and returns 0, or 1 where too many answers failed.
    Raises ConfigError for a wrong command line or configuration."""
    parser = CommandParser("eval", __doc__)
    parser.path("MODEL", "a Hugging Face or PEFT directory, as a run's final one", nargs="?")
    parser.add_argument("--compare", metavar=("A", "B"), type=Path, nargs=2, help="two results")
    parser.option("datasets", _names, "names or import paths, with commas (the configuration's)")
    parser.option("config", Path, "a recipe: its validation sets, eval_gconfig, server, rollout")
    parser.option("n", positive, "answers to each prompt (1); several are sampled", 1)
    parser.option("out", Path, "directory of the results (eval/NAME, eval/NAME-2, ...)")
    parser.keys()
    args = parser.read(argv)
    if (args.model is None) == (args.compare is None):
        parser.error("give MODEL, or --compare A B")
    if args.compare:
        return compare(*args.compare)
    if not (args.config or args.datasets):
        parser.error("give --datasets or --config")
    cfg, datasets, adapter = _configuration(args)
    out = args.out or free_path(Path("eval", args.model.resolve().name), "-")
    if (out / RESULTS).exists():
        raise ConfigError(f"--out {out}: holds an evaluation; name another directory")
    from megarl.trainer.evaluation import evaluate_model  # here, so that --help is instant

    with _whole(cfg, adapter, out) as model:
        results, samples = evaluate_model(cfg, model, datasets, logs=out)
    lines = (json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
    write_whole(out / SAMPLES, "".join(lines))
    record = {
        "model": adapter or str(args.model),
        "results": {name: _plain(figures) for name, figures in results.items()},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "datasets": {name: _public(cfg, data) for name, data in datasets.items()},
        "gconfig": public_tree(cfg)["eval_gconfig"],
        "seed": cfg.seed,
    }
    write_whole(out / RESULTS, json.dumps(record, indent=2))
    Console().print(_table(results))
    print(f"{out / RESULTS}, {out / SAMPLES}")
    return int(any(figures["failed"] > cfg.evaluator.max_failed for figures in results.values()))


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


@contextmanager
def _whole(cfg: GRPOConfig, adapter: str, out: Path) -> Iterator[str]:
    """Yields the directory of the model to evaluate: actor.path, with the adapter merged in where
    there is one, in a temporary directory. Raises ConfigError for an adapter that cannot be."""
    if not adapter:
        yield cfg.actor.path
        return
    if server_addresses(cfg.rollout):
        why = "servers of rollout.addresses hold no merged model; leave them out"
        raise ConfigError(f"{adapter}: {why}")
    from megarl.ckpt.peft import merge_peft

    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="merged-", dir=out) as merged:
        print(f"evaluating {cfg.actor.path} with the adapter {adapter} merged in")
        try:
            merge_peft(cfg.actor.path, adapter, merged)
        except ValueError as e:
            raise ConfigError(str(e)) from e
        yield merged


def _configuration(args: Namespace) -> tuple[GRPOConfig, dict[str, DatasetConfig], str]:
    """Returns the configuration, the data sets by name, and the adapter's directory, "" for none.
    Raises ConfigError."""
    model, adapter, files = str(args.model), "", ("adapter_config.json", "config.json")
    if [(args.model / file).is_file() for file in files] == [True, False]:
        from megarl.ckpt.peft import base_of

        model, adapter = base_of(args.model), model
        if not model or not Path(model).is_dir():
            fix = f"write megarl eval MODEL actor.lora.adapter_path={adapter}"
            raise ConfigError(f"base_model_name_or_path={model}: no directory here; {fix}")
    try:
        read_hf_config(model)
    except ValueError as e:
        raise ConfigError(str(e)) from e
    named = args.datasets or []
    first = [f"valid_dataset.type={name}" for name in named[:1]]
    cfg = load_config(args.config, [*first, f"actor.path={model}", *args.keys])
    sets = held_out_sets(cfg)
    if not isinstance(cfg, GRPOConfig) or not sets:
        raise ConfigError(f"{args.config}: evaluation needs an RL recipe with a valid_dataset")
    if cfg.actor.lora is not None:
        adapter = adapter or cfg.actor.lora.adapter_path
    g = cfg.eval_gconfig.new(n_samples=args.n)
    if args.n > 1 and g.greedy:
        g = g.new(greedy=False, temperature=g.temperature or 1.0)
    sampling = replace(cfg, eval_gconfig=g if g.seed is not None else g.new(seed=cfg.seed))
    keep_written(cfg, sampling)
    if named:
        return sampling, {name: replace(sets[""], type=name) for name in named}, adapter
    return sampling, {name or data.type: data for name, data in sets.items()}, adapter


def _public(cfg: GRPOConfig, data: DatasetConfig) -> dict[str, Any]:
    """Returns a data set of the evaluation as it was written, with secrets masked."""
    tree = public_tree(cfg)
    for name, held_out in cfg.valid_datasets.items():
        if held_out is data:
            return dict(tree["valid_datasets"][name])
    return {**tree["valid_dataset"], "type": data.type}


def _plain(figures: Figures) -> dict[str, float | None]:
    """Returns figures as JSON has them: null for one that says nothing."""
    return {name: None if math.isnan(value) else value for name, value in figures.items()}


def _table(results: dict[str, Figures]) -> Table:
    """Returns a row for each figure, with its interval, and a column for each data set."""
    table = Table("", *results)
    for name in dict.fromkeys(name for figures in results.values() for name in figures):
        if not name.endswith(("_lo", "_hi")):
            table.add_row(name, *(_cell(figures, name) for figures in results.values()))
    return table


def _cell(figures: Figures, name: str) -> str:
    if math.isnan(figures.get(name, math.nan)):
        return "-"
    if f"{name}_lo" not in figures:
        return f"{figures[name]:g}"
    return f"{figures[name]:.3f}  [{figures[f'{name}_lo']:.3f}, {figures[f'{name}_hi']:.3f}]"
