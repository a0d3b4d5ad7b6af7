"""The sinks of metrics that need a package of their own: tensorboard and Weights & Biases."""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config.errors import raise_if_any
from megarl.observability.logging import get_logger
from megarl.observability.run_log import RunLog
from megarl.utils.extras import require
from megarl.utils.importing import option_problems

log = get_logger(__name__)


class TensorBoardSink:
    """Writes tensorboard events into `path`. Raises ValueError if the package is missing."""

    def __init__(self, path: Path, from_step: int | None = None) -> None:
        user = "stats_logger.tensorboard=true"
        tensorboard = require("torch.utils.tensorboard", extra="tensorboard", user=user)
        # hides what an earlier start wrote beyond the step this one continues from
        self._writer = tensorboard.SummaryWriter(
            str(path), purge_step=0 if from_step is None else from_step + 1
        )

    def write(self, step: int, stats: Mapping[str, float], total_steps: int | None) -> None:
        """Writes one scalar per metric."""
        for name, value in stats.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self, outcome: str) -> None:
        """Closes the event file."""
        self._writer.close()


class WandbSink:
    """Writes to Weights & Biases. The run's id is kept in <run>/wandb_id.txt, so that a resumed run
    continues the same curve. wandb itself is silent on the console: one line says where the run is.
    Raises ValueError if the package is missing, and ConfigError for options that wandb.init
    does not take, or has from megarl."""

    def __init__(
        self,
        *,
        mode: str,
        options: dict[str, Any],
        name: str,
        run_dir: Path,
        run_config: dict[str, Any],
    ) -> None:
        wandb = require("wandb", extra="wandb", user=f"stats_logger.wandb.mode={mode}")
        if "weave" not in sys.modules:  # else wandb recommends it on the console
            os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
        self._run_dir, self._table = run_dir, wandb.Table
        id_file = run_dir / "wandb_id.txt"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8])
        ours: dict[str, Any] = {
            "mode": mode,
            "name": name,
            "id": id_file.read_text().strip(),
            "resume": "allow",
            "dir": str(run_dir),
            "config": run_config,
            "settings": wandb.Settings(silent=True),
        }
        key = "stats_logger.wandb.options"
        raise_if_any(option_problems(wandb.init, options, key=key, by_name=tuple(ours)))
        self._run = wandb.init(**ours, **options)
        where = self._run.url if mode == "online" else Path(self._run.dir).parent
        log.info("wandb, %s: %s", mode, where)
        # our own step axis: wandb's must never go back, a resumed run's may
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, stats: Mapping[str, float], total_steps: int | None) -> None:
        """Logs the metrics with `step` as their axis."""
        self._run.log({**stats, "step": step})

    def show(self, step: int, completions: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Logs the rows of each name as a table completions/<name>, with `step` as the axis."""
        tables = {f"completions/{n}": self._of(rows) for n, rows in completions.items() if rows}
        if tables:
            self._run.log({**tables, "step": step})

    def close(self, outcome: str) -> None:
        """Logs the rows of samples.jsonl as a table and ends wandb's run, which failed where this
        one did."""
        if samples := RunLog(self._run_dir / "samples.jsonl").read():
            self._run.log({"samples": self._of(samples)})
        self._run.finish(exit_code=int(outcome.startswith("failed")))

    def _of(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """Returns a table of rows, with a column for every name."""
        columns: list[str | int] = list(dict.fromkeys(name for row in rows for name in row))
        data = [[_cell(row.get(str(name))) for name in columns] for row in rows]
        return self._table(columns=columns, data=data)


def _cell(value: Any) -> Any:
    """Returns a value as a table of wandb shows it."""
    return value if isinstance(value, str | int | float | None) else json.dumps(value)
