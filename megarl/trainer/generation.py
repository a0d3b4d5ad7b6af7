"""Evaluates a model that is trained offline by generation, on servers that training does not
need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.algos import Role
from megarl.config.recipe_engines import server_addresses
from megarl.config.recipes import SFTConfig
from megarl.config.rollout import GenerationConfig
from megarl.data.dataset import RowDataset
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.local import SGLangEngine
from megarl.rollout.rewards import RewardPool
from megarl.trainer.context import RunContext
from megarl.trainer.held_out import HeldOut
from megarl.trainer.publisher import WeightPublisher
from megarl.utils.stopping import StopRequested


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
        self._config = config
        self._pool: RewardPool | None = None  # on rank 0, as are the sets
        self._held_out: HeldOut | None = None
        engine: Any = model.engine  # MegatronEngine, which has decided what `auto` is
        dtype = str(engine.dtype).removeprefix("torch.")
        self._client = _client(cfg, config, ctx.run_dir, ctx.tokenizer, dtype)
        try:
            ctx.on_rank_zero(self._open, cfg, ctx.tokenizer, data)
            self._client.initialize()
        except BaseException:
            self.close()
            raise
        path = ctx.run_dir / "weights"
        self._publisher = WeightPublisher(model, self._client, config.weight_sync, path=path)

    def _open(self, cfg: SFTConfig, tokenizer: Any, data: RowDataset) -> None:
        """Makes what rank 0 alone has."""
        config, rollout = self._config, self._config.rollout
        pool = self._pool = RewardPool(
            rollout.reward_workers,
            timeout=rollout.reward_timeout,
            addresses=rollout.reward_addresses,
            on_error=rollout.on_reward_error,
        )
        self._held_out = HeldOut(
            cfg,
            self._client,
            tokenizer,
            pool,
            gconfig=config.gconfig,
            rollout=rollout,
            context_length=config.server.context_length,
            trained=data,
            purpose="prompts",
        )

    def evaluate(self, step: int, samples_path: Path, when: str | None) -> dict[str, float]:
        """Returns the metrics of the validation sets (HeldOut.evaluate) of the weights after
        `step`, which are the version of the same number; {} where a signal ends the evaluation.
        Collective."""
        self._publisher.publish(step)
        return self._client.on_driver(_answered, self._held_out, samples_path, when)

    def close(self) -> None:
        """Ends the client, its servers and the reward workers. Waits for no other rank."""
        try:
            self._client.destroy()
        finally:
            if self._pool is not None:
                self._pool.close()


def _answered(held_out: HeldOut, samples_path: Path, when: str | None) -> dict[str, float]:
    try:
        return held_out.evaluate(samples_path, when)
    except StopRequested:  # the loop looks for itself, where all ranks agree
        return {}


def _client(
    cfg: SFTConfig, config: GenerationConfig, run_dir: Path, tokenizer: Any, dtype: str
) -> RemoteSGLangEngine:
    """Returns the client of the servers that are named, else of servers of its own."""
    sync, rollout = config.weight_sync, config.rollout
    if server_addresses(rollout):
        return RemoteSGLangEngine(rollout, weight_sync=sync, seed=cfg.seed, tokenizer=tokenizer)
    return SGLangEngine(
        rollout,
        config.server,
        model_path=cfg.model.path,
        dtype=dtype,
        log_dir=run_dir / "logs",
        weight_sync=sync,
        seed=cfg.seed,
        tokenizer=tokenizer,
    )
