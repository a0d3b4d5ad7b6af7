"""Runs steps of an earlier run again, from a checkpoint on, as `replay` of the configuration says.

The run directory holds the checkpoint to begin from, or none to begin at step 1. Nothing is saved
but fingerprints, which `megarl replay` compares with the earlier run's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.algos import Role
from megarl.api.batch import Batch, Padded
from megarl.config.errors import ConfigError
from megarl.config.recipes import GRPOConfig
from megarl.config.run import TRAIN, EpisodesConfig, ReplayConfig, batch_path, recorded_steps
from megarl.observability.logging import get_logger
from megarl.trainer.rl import RLTrainer
from megarl.trainer.session import RolloutSession
from megarl.trainer.step_recorder import read_batch
from megarl.trainer.turns import WeightPublisher

log = get_logger(__name__)


def replaying(cls: type[Any]) -> type[RLTrainer]:
    """Returns a trainer as a class that runs steps again. Raises ConfigError for one that is no
    RLTrainer."""
    if not (isinstance(cls, type) and issubclass(cls, RLTrainer)):
        raise ConfigError(f"trainer={cls.__name__}: a replay needs a subclass of RLTrainer")
    return type(f"Replaying{cls.__name__}", (Replaying, cls), {})


class Replaying(RLTrainer):
    """Makes the steps up to cfg.replay.step, of batches as cfg.replay.what says. In front of the
    run's own trainer class, whose step it takes."""

    @property
    def replay(self) -> ReplayConfig:
        """Returns which step is run again."""
        if self.cfg.replay is None:
            raise ValueError("replay is not set: megarl replay sets it")
        return ReplayConfig(**self.cfg.replay)

    def make_session(self) -> RolloutSession:
        """Returns a session that hands out recorded batches, unless rollouts are replayed."""
        if self.replay.what != TRAIN:
            return super().make_session()
        return RecordedSession(self.cfg, Path(self.replay.run), self.ctx.ranks.from_zero)

    def make_publisher(self) -> WeightPublisher:
        """Returns a publisher that publishes nothing, unless rollouts are replayed."""
        if self.replay.what != TRAIN:
            return super().make_publisher()
        return _Unpublished(self.actor)

    def fit(self) -> None:
        """Makes the steps after the checkpoint, up to the one that is asked for. Collective."""
        replay = self.replay
        log.info("replaying steps %d-%d of %s", self.steps_done + 1, replay.step, replay.run)
        self.session.expect(replay.step - self.steps_done)
        self.publisher.publish(self.actor.get_version())
        for step in range(self.steps_done, replay.step):
            if replay.what == "rollout" and step + 1 == replay.step:
                self.step_recorder.begin_step(step + 1)
                self.session.prepare_batch()
            else:
                self.whole_step(step)


class RecordedSession(RolloutSession):
    """Hands out the batches that an earlier run recorded; needs neither data nor servers. Every
    rank makes one."""

    def __init__(self, cfg: GRPOConfig, run: Path, from_zero: Callable[..., Any]) -> None:
        """Reads how long the data set was. Raises ConfigError where no batch was recorded."""
        self._run, self._from_zero = run, from_zero
        self._episodes = EpisodesConfig(**cfg.episodes)
        self.client: Any = _NoClient()
        self.driver = self.step_recorder = None
        self.dataset_size = from_zero(_dataset_size, run)

    def start(self) -> None:
        """Does nothing: there are no servers."""

    def prepare_batch(self) -> Batch:
        """Returns the recorded batch of the step, on rank 0 as when it was handed out. Raises
        ConfigError where it cannot be read."""
        assert self.step_recorder is not None, "RLTrainer sets it"
        path = batch_path(self._run, self.step_recorder.step)
        rows: list[Padded] = []

        def read_recorded_batch() -> None:
            rows.extend(read_batch(path)[0])

        self._from_zero(read_recorded_batch)
        batch = Batch.from_local(rows)
        self.step_recorder.handed_out(batch)
        return batch

    def account(self, batch: Batch) -> dict[str, float]:
        """Has recorded what was computed of the batch; there is nothing to count. Collective."""
        if self.step_recorder is not None:
            self.step_recorder.computed(batch)
        return {}

    def evaluate(self, samples_path: Path, when: str | None = None) -> dict[str, float]:
        """Returns no metrics: there are no servers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: the batches are where they are."""

    def close(self) -> None:
        """Does nothing: nothing is open."""


class _NoClient:
    """Stands where a session has its client, without servers."""

    addresses: tuple[str, ...] = ()

    def on_driver(self, fn: Any, *args: Any) -> None:
        """Does nothing: nothing is in flight that would have to be counted."""


class _Unpublished(WeightPublisher):
    """Counts versions as a publisher does, and sends nothing."""

    def __init__(self, model: Role) -> None:
        self._model = model

    def publish(self, version: int | None = None) -> dict[str, float]:
        """Sets the version of the model."""
        self._model.set_version(self._model.get_version() + 1 if version is None else version)
        return {}


def _dataset_size(run: Path) -> int:
    steps = recorded_steps(run)
    if not steps:
        raise ConfigError(f"{run}: no batch is recorded (record.keep)")
    return read_batch(batch_path(run, steps[-1]))[1]["dataset_size"]
