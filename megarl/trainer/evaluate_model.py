"""Evaluates a model on servers that are there for that: of `megarl eval`, and of a run that trains
without servers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.algos import Role
from megarl.config.dataset import DatasetConfig
from megarl.config.recipe_engines import server_addresses
from megarl.config.recipes import GRPOConfig, SFTConfig
from megarl.config.rollout import GenerationConfig, RolloutConfig, ServerConfig
from megarl.data.dataset import RowDataset
from megarl.data.tokenizer import run_tokenizer
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.local import SGLangEngine
from megarl.rollout.rewards import RewardPool
from megarl.trainer.context import RunContext
from megarl.trainer.evaluation import HeldOut, Sample, evaluate_unless_stopped, make_pool
from megarl.trainer.turns import WeightPublisher


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


class Generation:
    """Brings a model's weights to servers and has them answer the validation sets. Every rank makes
    one; `evaluate` is collective. Rank 0 starts the servers, unless the configuration names some.
    """

    def __init__(
        self,
        cfg: SFTConfig,
        config: GenerationConfig,
        ctx: RunContext,
        model: Role,
        data: RowDataset,
    ) -> None:
        """Reads the validation sets, without prompts of the training `data`, and waits for the
        servers. Collective."""
        self._pool: RewardPool | None = None  # on rank 0, as are the sets
        self._held_out: HeldOut | None = None
        engine: Any = model.engine  # MegatronEngine, which has decided what `auto` is
        self._client = make_client(
            config.rollout,
            config.server,
            model_path=cfg.model.path,
            dtype=str(engine.dtype).removeprefix("torch."),
            log_dir=ctx.run_dir / "logs",
            weight_sync=config.weight_sync,
            seed=cfg.seed,
            tokenizer=ctx.tokenizer,
        )

        def read() -> None:
            self._pool = make_pool(config.rollout)
            self._held_out = HeldOut.for_run(cfg, ctx.tokenizer, self._pool, trained=data)

        try:
            ctx.on_rank_zero(read)
            self._client.initialize()
        except BaseException:
            self.close()
            raise
        path = ctx.run_dir / "weights"
        self._publisher = WeightPublisher(model, self._client, config.weight_sync, path=path)

    def evaluate(self, step: int, samples_path: Path, when: str | None) -> dict[str, float]:
        """Returns the metrics of the validation sets (HeldOut.evaluate) of the weights after
        `step`, which are the version of the same number; {} where a signal ends the evaluation.
        Collective."""
        self._publisher.publish(step)
        return self._client.on_driver(
            evaluate_unless_stopped, self._held_out, self._client, samples_path, when
        )

    def close(self) -> None:
        """Ends the client, its servers and the reward workers. Waits for no other rank."""
        try:
            self._client.destroy()
        finally:
            if self._pool is not None:
                self._pool.close()
