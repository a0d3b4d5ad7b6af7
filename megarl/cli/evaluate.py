"""Evaluates a model on data sets: how often one answer is right, one of k, and most of n.

    megarl eval MODEL [--datasets A,B] [--config X.yaml] [--n N] [--out DIR] [key=value ...]

    MODEL         a Hugging Face directory, such as a run's final model
    --datasets    gsm8k, arithmetic, reasoning_gym or a function's import path; without it, the
                  configuration's valid_dataset
    --config      a recipe: its valid_dataset, eval_gconfig, server and rollout are used
    --n           answers to each prompt (1); with more than one they are sampled
    --out         where results.json, samples.jsonl and server logs go (eval/<name of MODEL>)

Keys change the configuration, like valid_dataset.size=200, server.type=sglang, server.tp=8,
eval_gconfig.max_new_tokens=2048. Servers are started on this machine, or are those of
rollout.addresses, which must serve MODEL.

A reward of 1 or more is right. accuracy is the share of right answers, pass@k the chance that one
of k is right (unbiased, from n), maj@n the reward of the answer that most of n give. Intervals are
of 95 %, over prompts. samples.jsonl has every answer with its reward.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megarl.algos.rollouts import rollouts_of
from megarl.api.batch import Padded
from megarl.config.command_line import CommandLine, help_or_command_line
from megarl.config.dataset import DatasetConfig
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.recipes import GRPOConfig
from megarl.data import build_dataset, check_context
from megarl.data.tokenizer import load_hf_tokenizer
from megarl.observability.intervals import bootstrap_ci, proportion_ci
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.local import SGLangEngine
from megarl.rollout.rewards import RewardPool, check_rows, reward_of
from megarl.trainer.scores import final_answer, majority_reward, pass_at_k, steps_of_k
from megarl.utils.importing import load_object
from megarl.utils.staging import write_whole

USAGE = "megarl eval MODEL [--datasets A,B] [key=value ...]"
Sample = dict[str, Any]  # dataset, prompt (its number), completion, answer, reward


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluates the model that `argv` names and returns 0. Raises ConfigError for a wrong command
    line or configuration."""
    options = ("datasets", "config", "n", "out")
    command = help_or_command_line(argv, __doc__ or "", options=options)
    if command is None:
        return 0
    if len(command.words) != 1:
        raise ConfigError([f"give one model directory: {USAGE}"])
    model = Path(command.words[0])
    cfg, datasets = _configuration(command, model)
    out = Path(command.options.get("out", Path("eval", model.resolve().name)))
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_hf_tokenizer(str(model), trust_remote_code=cfg.trust_remote_code)
    client = _client(cfg, str(model), out, tokenizer)
    results, samples = {}, []
    with RewardPool(cfg.rollout.reward_workers, timeout=cfg.rollout.reward_timeout) as pool:
        try:
            client.initialize()
            for name, data in datasets.items():
                found = list(_answers(cfg, data, name, client, tokenizer, pool))
                results[name] = scores(found, cfg.eval_gconfig.n_samples, seed=cfg.seed)
                samples += found
        finally:
            client.destroy()
    lines = (json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
    write_whole(out / "samples.jsonl", "".join(lines))
    write_whole(out / "results.json", json.dumps({"model": str(model), "results": results}))
    Console().print(_table(results))
    print(f"{out / 'results.json'}, {out / 'samples.jsonl'}")
    return 0


def scores(samples: Sequence[Sample], n: int, *, seed: int) -> dict[str, float]:
    """Returns the figures of one data set's samples, n of each prompt."""
    prompts = [s["prompt_number"] for s in samples]
    rewards = [float(s["reward"]) for s in samples]
    right = [r >= 1 for r in rewards]
    low, high = proportion_ci(right, groups=prompts)
    reward_low, reward_high = bootstrap_ci(rewards, seed=seed, groups=prompts)
    found = {
        "prompts": float(len(set(prompts))),
        "samples": float(len(samples)),
        "accuracy": sum(right) / len(right),
        "accuracy_lo": low,
        "accuracy_hi": high,
        "reward": sum(rewards) / len(rewards),
        "reward_lo": reward_low,
        "reward_hi": reward_high,
    }
    if n > 1:
        found |= _of_several(samples, n, seed=seed)
    return found


def _of_several(samples: Sequence[Sample], n: int, *, seed: int) -> dict[str, float]:
    """Returns pass@k and maj@n with their intervals; a prompt some of whose answers failed, and
    left the batch, counts with those it has where they are enough."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample["prompt_number"], []).append(sample)
    found: dict[str, float] = {}
    for k in steps_of_k(n):
        enough = [g for g in groups.values() if len(g) >= k]
        if not enough:
            continue
        each = [pass_at_k(sum(s["reward"] >= 1 for s in g), len(g), k) for g in enough]
        found |= _with_interval(f"pass@{k}", each, seed)
    each = [
        majority_reward([s["answer"] for s in g], [s["reward"] for s in g]) for g in groups.values()
    ]
    return found | _with_interval(f"maj@{n}", each, seed)


def _with_interval(name: str, values: Sequence[float], seed: int) -> dict[str, float]:
    low, high = bootstrap_ci(values, seed=seed)
    return {name: sum(values) / len(values), f"{name}_lo": low, f"{name}_hi": high}


def _configuration(
    command: CommandLine, model: Path
) -> tuple[GRPOConfig, dict[str, DatasetConfig]]:
    """Returns the configuration and the data sets by name. Raises ConfigError."""
    source, overrides = command.options.get("config"), [f"actor.path={model}", *command.overrides]
    named = [name for name in command.options.get("datasets", "").split(",") if name]
    if not (model / "config.json").is_file():
        raise ConfigError([f"no config.json at '{model}': give a Hugging Face model directory"])
    if source is None and not named:
        raise ConfigError([f"give --datasets or --config: {USAGE}"])
    n = command.options.get("n", "1")
    if not n.isdecimal() or not int(n):
        raise ConfigError([f"--n {n}: use a whole number of at least 1"])
    first = [f"valid_dataset.type={named[0]}"] if named else []
    cfg = load_config(source, [*first, *overrides])
    data = cfg.valid_dataset
    if not isinstance(cfg, GRPOConfig) or data is None:
        raise ConfigError([f"{source}: evaluation needs an RL recipe with a valid_dataset"])
    sampled = cfg.eval_gconfig.new(n_samples=int(n))
    if int(n) > 1 and sampled.greedy:
        sampled = sampled.new(greedy=False, temperature=sampled.temperature or 1.0)
    cfg = replace(cfg, eval_gconfig=sampled)
    if not named:
        return cfg, {data.type: data}
    return cfg, {name: replace(data, type=name) for name in named}


def _client(cfg: GRPOConfig, model: str, out: Path, tokenizer: Any) -> RemoteSGLangEngine:
    if cfg.rollout.addresses:
        return RemoteSGLangEngine(cfg.rollout, seed=cfg.seed, tokenizer=tokenizer)
    return SGLangEngine(
        cfg.rollout,
        cfg.server,
        model_path=model,
        dtype=cfg.server.dtype,
        log_dir=out,
        seed=cfg.seed,
        tokenizer=tokenizer,
    )


def _answers(
    cfg: GRPOConfig,
    data: DatasetConfig,
    name: str,
    client: RemoteSGLangEngine,
    tokenizer: Any,
    pool: RewardPool,
) -> Iterator[Sample]:
    """Yields every answer to the rows of a data set, with its reward."""
    dataset = build_dataset(data, tokenizer, purpose="rl", seed=cfg.seed)
    check_context(dataset, cfg.eval_gconfig, cfg.server.context_length)
    rows = [dataset[i] for i in range(len(dataset))]
    reward_fn = reward_of(data)
    check_rows(reward_fn, rows)
    flow = load_object(cfg.rollout.workflow.type, what="rollout.workflow")(
        reward_fn,
        cfg.eval_gconfig,
        tokenizer,
        reward_pool=pool,
        **cfg.rollout.workflow.options,
    )
    batch: Padded = client.executor.rollout_batch(rows, workflow=flow)
    rollouts = rollouts_of(batch)
    for k in rollouts.first.tolist():
        number = int(batch["group_ids"][k])
        ids = batch["input_ids"][k][batch["loss_mask"][k].bool()].tolist()
        text = tokenizer.decode(ids, skip_special_tokens=True)
        yield {
            "dataset": name,
            "prompt_number": number,
            "prompt": rows[number].get("prompt", ""),
            "completion": text,
            "answer": final_answer(text),
            "expected": str(rows[number].get("answer", "")),
            "reward": batch["rewards"][k].item(),
        }


def _table(results: dict[str, dict[str, float]]) -> Table:
    """Returns a row for each figure, with its interval, and a column for each data set."""
    table = Table("", *results)
    for name in next(iter(results.values())):
        if not name.endswith(("_lo", "_hi")):
            table.add_row(name, *(_shown(found, name) for found in results.values()))
    return table


def _shown(found: dict[str, float], name: str) -> str:
    if f"{name}_lo" not in found:
        return f"{found[name]:g}" if name in found else "-"
    return f"{found[name]:.3f}  [{found[f'{name}_lo']:.3f}, {found[f'{name}_hi']:.3f}]"
