"""Trackers that `stats_logger.tracker` names: Trackio and MLflow.

    megarl launch --config X.yaml stats_logger.tracker=examples.trackers:Trackio

A tracker is made once in a start, by the process that logs. `write` gets the metrics of every step,
`close` the outcome: "finished", "stopped", or "failed: " and the error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


# --8<-- [start:trackio]
class Trackio:
    """Logs to Trackio (pip install trackio): a project for the experiment, a run for the trial."""

    def __init__(
        self, config: dict[str, Any], *, run_dir: Path, from_step: int | None, **options: Any
    ) -> None:
        import trackio

        about = {"project": config["experiment_name"], "name": config["trial_name"]}
        self.run = trackio.init(**about, config=config, resume="allow", **options)

    def write(self, step: int, stats: Mapping[str, float], total_steps: int | None) -> None:
        self.run.log(dict(stats), step=step)

    def close(self, outcome: str) -> None:
        self.run.finish()


# --8<-- [end:trackio]
# --8<-- [start:mlflow]
class MLflow:
    """Logs to MLflow (pip install mlflow-skinny), at `uri`. A continued run is one run there."""

    def __init__(
        self, config: dict[str, Any], *, run_dir: Path, from_step: int | None, uri: str
    ) -> None:
        import mlflow

        mlflow.set_tracking_uri(uri)
        mlflow.set_experiment(config["experiment_name"])
        kept = run_dir / "mlflow_run"
        run_id = kept.read_text() if from_step is not None and kept.exists() else None
        self.run = mlflow.start_run(run_id, run_name=config["trial_name"])
        kept.write_text(self.run.info.run_id)
        mlflow.log_dict(config, "config.json")
        self.mlflow = mlflow

    def write(self, step: int, stats: Mapping[str, float], total_steps: int | None) -> None:
        self.mlflow.log_metrics(dict(stats), step=step)

    def close(self, outcome: str) -> None:
        self.mlflow.set_tag("outcome", outcome)
        self.mlflow.end_run("FINISHED" if outcome == "finished" else "FAILED")


# --8<-- [end:mlflow]
