"""Defines SGLangEngine, a client that starts and ends its own servers."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any, Self

from megarl.api.records import FinetuneSpec
from megarl.config.loader import run_dir
from megarl.config.recipes import GRPOConfig
from megarl.config.rollout import RolloutConfig, ServerConfig, WeightSyncConfig
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.server_process import ServerProcess, start_server
from megarl.utils.env import uses_gpus, visible_gpus


class SGLangEngine(RemoteSGLangEngine):
    """Runs `server.count` servers on the driver's host, from `initialize` to `destroy`.

    Each has GPUs of its own, in order of those that the driver sees, where there are enough.
    `config.addresses` is not read. Logs go to <log_dir>/server_<i>.log; None: to a temporary
    directory, which errors name. Raises ValueError for no server, or no model.
    """

    def __init__(
        self,
        config: RolloutConfig,
        server: ServerConfig,
        *,
        model_path: str = "",
        dtype: str = "auto",
        log_dir: Path | str | None = None,
        weight_sync: WeightSyncConfig | None = None,
        seed: int = 1,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(config, weight_sync=weight_sync, seed=seed, tokenizer=tokenizer)
        if server.count < 1:
            raise ValueError(f"server.count={server.count}: SGLangEngine starts at least 1")
        if not (server.path or model_path):
            raise ValueError("SGLangEngine: set server.path or pass model_path")
        self._server, self._model_path, self._dtype = server, model_path, dtype
        self._log_dir = log_dir
        self.start_timeout = server.count * config.setup_timeout  # the waits follow each other
        self.processes: list[ServerProcess] = []  # in order of their addresses

    @classmethod
    def _of_config(cls, cfg: GRPOConfig, common: dict[str, Any]) -> SGLangEngine:
        logs = run_dir(cfg) / "logs"
        return cls(
            cfg.rollout,
            cfg.server,
            model_path=cfg.actor.path,
            dtype=cfg.actor.dtype,
            log_dir=logs,
            **common,
        )

    def _connect(self, ft_spec: FinetuneSpec | None) -> list[str]:
        """Starts the servers, on the driver, then opens connections."""
        logs = Path(self._log_dir or tempfile.mkdtemp(prefix="megarl-logs-"))
        for i in range(self._server.count):
            self.processes.append(
                start_server(
                    self._server,
                    model_path=self._model_path,
                    dtype=self._dtype,
                    log_path=logs / f"server_{i}.log",
                    env=self._devices(i),
                    setup_timeout=None,
                )
            )
        for process in self.processes:
            process.wait_healthy(self.config.setup_timeout)
        addresses = [p.address for p in self.processes]
        self.config = dataclasses.replace(self.config, addresses=addresses)
        return super()._connect(ft_spec)

    def _devices(self, index: int) -> dict[str, str]:
        """Returns the variable that gives a server GPUs of its own, where there are so many."""
        visible, each = visible_gpus(os.environ), self._server.gpus
        if len(visible) < each * self._server.count:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(visible[index * each :][:each])}

    def get_scheduling_config(self) -> dict[str, Any]:
        """Returns what the driver needs: the GPUs of its servers."""
        gpus = self._server.count * self._server.gpus if uses_gpus(os.environ) else 0
        return {"gpus_per_process": gpus, "cpus_per_process": 0}

    def for_worker(self, index: int) -> Self:
        """Returns a client of these servers for a worker process."""
        twin = super().for_worker(index)
        twin.processes = []
        return twin

    def destroy(self) -> None:
        """Ends the client as RemoteSGLangEngine.destroy does, then its servers."""
        try:
            super().destroy()
        finally:
            for process in self.processes:
                process.stop()
            self.processes.clear()
