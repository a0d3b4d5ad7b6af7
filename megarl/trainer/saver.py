"""Saves the model as a normal HF directory, every n steps, epochs or seconds and at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from megarl.api.records import SaveLoadMeta
from megarl.config.run import SaverConfig
from megarl.observability.logging import get_logger
from megarl.trainer.frequency import Frequency
from megarl.utils.staging import remove

log = get_logger(__name__)


class Saves(Protocol):
    def save(self, meta: SaveLoadMeta) -> None: ...


class Saver:
    def __init__(
        self,
        config: SaverConfig,
        *,
        run_dir: Path,
        base_model_path: str,
        clock: Callable[[], float],
        is_zero: bool,
    ) -> None:
        self.config, self.run_dir, self.base = config, run_dir, base_model_path
        self.final = run_dir / "final"
        self.freq = Frequency(config, clock)
        self._is_zero = is_zero

    def maybe_save(self, model: Saves, *, step: int, epoch: int, epoch_ended: bool) -> None:
        if not self.freq.due(step=step, epoch=epoch, epoch_ended=epoch_ended):
            return
        self._save(model, self.run_dir / "hf" / f"step_{step:06d}")
        if self._is_zero and self.config.keep_last:
            for old in sorted((self.run_dir / "hf").glob("step_*"))[: -self.config.keep_last]:
                remove(old)

    def save_final(self, model: Saves) -> Path | None:
        if not self.config.final:
            return None
        self._save(model, self.final)
        return self.final

    def _save(self, model: Saves, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        model.save(SaveLoadMeta(path=str(path), weight_format="hf", base_model_path=self.base))
        log.info("saved %s", path)
