"""StatsLogger: the figures of every step, to the console, jsonl, tensorboard and wandb.

<run>/stats.jsonl is always written: one object per step, {"step", "time" (Unix seconds),
"elapsed_s", name: value, ...}. A resumed run appends; a step that stands there twice counts as its
later line.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megarl.config.run import StatsLoggerConfig
from megarl.observability.console import ConsoleSink
from megarl.observability.logging import env_rank, get_logger

log = get_logger(__name__)

STATS_FILE = "stats.jsonl"


class Sink(Protocol):
    def write(self, step: int, stats: Mapping[str, float], total_steps: int | None) -> None: ...

    def close(self) -> None: ...


class StatsLogger:
    """Writes on rank 0; on other ranks every method does nothing."""

    def __init__(
        self,
        config: StatsLoggerConfig,
        *,
        run_dir: str | Path,
        experiment_name: str,
        trial_name: str,
        run_config: dict[str, Any],
    ) -> None:
        self._run_dir = Path(run_dir)
        self._report = config.report and env_rank() == 0
        self._sinks: list[Sink] = []
        if env_rank() != 0:
            return
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._sinks.append(JsonlSink(self._run_dir / STATS_FILE))
        self._sinks.append(ConsoleSink(table=config.table))
        if config.tensorboard:
            self._sinks.append(TensorBoardSink(self._run_dir / "tensorboard"))
        if config.wandb.mode != "disabled":
            self._sinks.append(
                WandbSink(
                    mode=config.wandb.mode,
                    project=config.wandb.project or experiment_name,
                    entity=config.wandb.entity,
                    name=f"{experiment_name}/{trial_name}",
                    run_dir=self._run_dir,
                    run_config=run_config,
                )
            )

    def commit(
        self, step: int, stats: Mapping[str, float], *, total_steps: int | None = None
    ) -> None:
        """One step's figures; step 0 is what was measured before the first update."""
        for sink in self._sinks:
            sink.write(step, stats, total_steps)

    def close(self) -> None:
        """Ends every sink and, where configured, writes <run>/report.html."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close()
        stats = self._run_dir / STATS_FILE
        if sinks and self._report and stats.stat().st_size:
            from megarl.observability.report import write_report

            path = write_report(self._run_dir / "report.html", [self._run_dir])
            log.info("report: %s", path)


class JsonlSink:
    def __init__(self, path: Path) -> None:
        earlier = path.read_text() if path.exists() else ""
        self._start = time.time() - _last_elapsed(earlier)
        self._file = path.open("a")
        if earlier and not earlier.endswith("\n"):
            self._file.write("\n")  # a line that a crash cut short must not swallow the next

    def write(self, step: int, stats: Mapping[str, float], total_steps: int | None) -> None:
        now = time.time()
        row = {k: _finite(v) for k, v in stats.items()}
        row |= {"step": step, "time": round(now, 3), "elapsed_s": round(now - self._start, 3)}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _finite(value: float) -> float | None:
    """JSON has no NaN and no infinity: null."""
    number = float(value)
    return number if math.isfinite(number) else None


def _last_elapsed(text: str) -> float:
    """Seconds that the earlier part of a resumed run took, from its last whole line."""
    for line in reversed(text.splitlines()):
        try:
            return float(json.loads(line)["elapsed_s"])
        except (json.JSONDecodeError, KeyError):
            continue  # cut short by a crash
    return 0.0


class TensorBoardSink:
    def __init__(self, path: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as e:
            raise ImportError(
                "stats_logger.tensorboard=true needs the tensorboard package: "
                "pip install 'megarl[tensorboard]', or set stats_logger.tensorboard=false"
            ) from e
        self._writer = SummaryWriter(str(path))

    def write(self, step: int, stats: Mapping[str, float], total_steps: int | None) -> None:
        for name, value in stats.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """The run's id is kept in <run>/wandb_id.txt: a resumed run continues the same curve."""

    def __init__(
        self,
        *,
        mode: str,
        project: str,
        entity: str | None,
        name: str,
        run_dir: Path,
        run_config: dict[str, Any],
    ) -> None:
        try:
            import wandb
        except ImportError as e:
            raise ImportError(
                f"stats_logger.wandb.mode={mode} needs the wandb package: "
                "pip install 'megarl[wandb]', or set stats_logger.wandb.mode=disabled"
            ) from e
        id_file = run_dir / "wandb_id.txt"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8])
        self._run = wandb.init(
            mode=mode,  # type: ignore[arg-type]  # checked by the config's choices
            project=project,
            entity=entity,
            name=name,
            id=id_file.read_text().strip(),
            resume="allow",
            dir=str(run_dir),
            config=run_config,
        )
        # our own step axis: wandb's must never go back, a resumed run's may
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, stats: Mapping[str, float], total_steps: int | None) -> None:
        self._run.log({**stats, "step": step})

    def close(self) -> None:
        self._run.finish()
