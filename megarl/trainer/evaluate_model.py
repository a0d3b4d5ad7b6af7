"""Has a model answer data sets, by servers that are started for it, and scores the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.algos.rollouts import rollouts_of
from megarl.api.inference import RolloutWorkflow
from megarl.config.dataset import DatasetConfig
from megarl.config.errors import raise_if_any
from megarl.config.recipes import GRPOConfig
from megarl.data.dataset import build_dataset, check_context
from megarl.data.tokenizer import run_tokenizer
from megarl.observability.intervals import proportion_ci, score_ci
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.local import SGLangEngine
from megarl.rollout.rewards import RewardPool
from megarl.trainer.evaluation import answer_texts
from megarl.trainer.held_out import make_workflow
from megarl.trainer.scores import beside_failures, final_answer, of_several, with_interval

Sample = dict[str, Any]  # dataset, prompt_number, prompt, completion, answer, expected, reward
Rows = list[dict[str, Any]]


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
    with RewardPool(
        cfg.rollout.reward_workers,
        timeout=cfg.rollout.reward_timeout,
        addresses=cfg.rollout.reward_addresses,
        on_error=cfg.rollout.on_reward_error,
    ) as pool:
        work = _work(cfg, datasets, tokenizer, pool)
        logs.mkdir(parents=True, exist_ok=True)
        client = _client(cfg, model, logs, tokenizer)
        try:
            client.initialize()
            for name, (rows, flow) in work.items():
                found, failed = _answers(name, rows, flow, client, tokenizer)
                figures = scores(found, cfg.eval_gconfig.n_samples, seed=cfg.seed)
                prompts = {s["prompt_number"] for s in found}
                results[name] = {"prompts": float(len(prompts))} | beside_failures(
                    figures,
                    samples=len(found),
                    failed=failed,
                    bound=cfg.evaluator.max_failed,
                    name=name,
                )
                samples += found
        finally:
            client.destroy()
    return results, samples


def scores(samples: Sequence[Sample], n: int, *, seed: int) -> dict[str, float]:
    """Returns the figures of one data set's samples, n of each prompt; {} of none."""
    if not samples:
        return {}
    prompts = [s["prompt_number"] for s in samples]
    rewards = [float(s["reward"]) for s in samples]
    right = [r >= 1 for r in rewards]
    low, high = proportion_ci(right, groups=prompts)
    reward_low, reward_high = score_ci(rewards, seed, groups=prompts)
    found = {
        "accuracy": sum(right) / len(right),
        "accuracy_lo": low,
        "accuracy_hi": high,
        "reward": sum(rewards) / len(rewards),
        "reward_lo": reward_low,
        "reward_hi": reward_high,
    }
    if n > 1:
        several = of_several(prompts, rewards, [s["answer"] for s in samples], n=n)
        for name, values in several.items():
            found |= {name + end: value for end, value in with_interval(values, n, seed).items()}
    return found


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


def _work(
    cfg: GRPOConfig, datasets: Mapping[str, DatasetConfig], tokenizer: Any, pool: RewardPool
) -> dict[str, tuple[Rows, RolloutWorkflow]]:
    """Returns the rows of each data set and the workflow that answers them."""
    work: dict[str, tuple[Rows, RolloutWorkflow]] = {}
    problems = []
    for name, data in datasets.items():
        try:
            dataset = build_dataset(data, tokenizer, purpose="rl", seed=cfg.seed)
            check_context(dataset, cfg.eval_gconfig, cfg.server.context_length)
            rows = [dataset[i] for i in range(len(dataset))]
            flow = make_workflow(cfg.rollout, data, dataset, cfg.eval_gconfig, tokenizer, pool)
            work[name] = rows, flow
        except (ValueError, OSError) as e:
            problems.append(f"data set {name}: {e}")
    raise_if_any(problems)
    return work


def _answers(
    name: str, rows: Rows, flow: RolloutWorkflow, client: RemoteSGLangEngine, tokenizer: Any
) -> tuple[list[Sample], int]:
    """Returns every answer to the rows of a data set, with its reward, and how many failed."""
    batch, failed = client.executor.answer(rows, flow)
    if batch is None:
        if not any(failed):
            raise RuntimeError(f"{name}: the workflow rejected all {len(rows)} rows")
        return [], sum(failed)
    samples = []
    for k, text in zip(
        rollouts_of(batch).first.tolist(), answer_texts(batch, tokenizer), strict=True
    ):
        number = int(batch["group_ids"][k])
        samples.append(
            {
                "dataset": name,
                "prompt_number": number,
                "prompt": rows[number].get("prompt", ""),
                "completion": text,
                "answer": final_answer(text),
                "expected": str(rows[number].get("answer", "")),
                "reward": batch["rewards"][k].item(),
            }
        )
    return samples, sum(failed)
