"""Around every recipe's loop: processes, run directory, tokenizer, logging, clock."""

from __future__ import annotations

import dataclasses
import time
from types import TracebackType
from typing import Any

import torch
from transformers import AutoTokenizer

from megarl.config.loader import run_dir, save_config
from megarl.config.recipes import BaseConfig
from megarl.observability.logging import get_logger
from megarl.observability.stats_logger import StatsLogger
from megarl.parallel.groups import init_distributed, shutdown_distributed
from megarl.trainer.spmd import RankZero

log = get_logger(__name__)


class RunContext:
    """Enter once per process. `zero` runs things on rank 0; `clock` answers alike on every rank."""

    def __init__(self, cfg: BaseConfig, *, model_path: str, timeout: float) -> None:
        self.cfg, self._timeout = cfg, timeout
        self.run_dir = run_dir(cfg)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(cfg.tokenizer_path or model_path)
        self._logger: StatsLogger | None = None

    def __enter__(self) -> RunContext:
        init_distributed(timeout=self._timeout)
        torch.manual_seed(self.cfg.seed)
        self.zero = RankZero(self._timeout)
        self.start = self.clock()
        if self.is_zero:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            save_config(self.cfg, self.run_dir / "config.yaml")
            self._logger = StatsLogger(
                self.cfg.stats_logger,
                run_dir=self.run_dir,
                experiment_name=self.cfg.experiment_name,
                trial_name=self.cfg.trial_name,
                run_config=dataclasses.asdict(self.cfg),
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._logger is not None:
            self._logger.close()
        shutdown_distributed(failed=kind is not None)

    @property
    def is_zero(self) -> bool:
        return self.zero.is_zero

    def clock(self) -> float:
        """Seconds of rank 0's monotonic clock, the same on every rank. Collective."""
        return self.zero(time.monotonic)

    def elapsed(self) -> float:
        return self.clock() - self.start

    def log_stats(self, step: int, stats: dict[str, float], *, total_steps: int) -> None:
        if self._logger is not None:
            self._logger.commit(step, stats, total_steps=total_steps)
