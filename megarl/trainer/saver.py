"""Saves the models as normal HF directories, every n steps, epochs or seconds and at the end, and
says when something is due."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from megarl.api.records import SaveLoadMeta
from megarl.config.earlier_run import FINAL_DIR, STATS_FILE
from megarl.config.engine import LoRAConfig
from megarl.config.foreign_names import AnswersForeignNames
from megarl.config.loader import run_dir
from megarl.config.recipe_engines import engines, model_path
from megarl.config.recipes import BaseConfig
from megarl.config.run import FrequencyConfig, SaverConfig
from megarl.config.script import note_read
from megarl.data.tokenizer import tokenizer_to_save
from megarl.observability.logging import env_rank, get_logger
from megarl.observability.run_log import RunLog
from megarl.parallel.ranks import on_rank_zero
from megarl.utils.files import full_disk_named, remove

log = get_logger(__name__)


class Frequency:
    """Says when something is due: every n epochs, steps or seconds, whichever is set. Seconds
    follow one clock: pass a `clock` that answers the same on every rank."""

    def __init__(
        self, config: FrequencyConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config, self._clock = config, clock
        self._last = clock() if config.freq_secs else 0.0

    def state_dict(self) -> dict[str, float]:
        """Returns {"waited": seconds since it was last due}, 0.0 without freq_secs."""
        return {"waited": self._clock() - self._last if self.config.freq_secs else 0.0}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continues from what `state_dict` returned: the seconds waited before count."""
        self._last = self._clock() - state["waited"] if self.config.freq_secs else 0.0

    def due(self, *, step: int, epoch_ended: bool, epoch: int) -> bool:
        """Returns whether it is due, and then starts the wait of freq_secs anew if that had passed.
        `step` and `epoch` count from 1 and are the ones just finished."""
        c = self.config
        if c.freq_steps and step % c.freq_steps == 0:
            return True
        if c.freq_epochs and epoch_ended and epoch % c.freq_epochs == 0:
            return True
        if c.freq_secs:
            now = self._clock()
            if now - self._last >= c.freq_secs:
                self._last = now
                return True
        return False


class Saves(Protocol):
    """Saves its weights: a role or an engine."""

    def save(self, meta: SaveLoadMeta) -> None:
        """Writes the weights to meta.path, in meta.weight_format. Collective."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Names a model to save, what it was made from, and where it goes: <home>/hf/step_000123,
    <home>/final."""

    model: Saves
    base_model_path: str
    home: Path
    lora: LoRAConfig | None = None

    @property
    def weight_format(self) -> str:
        """Returns "peft" where adapters are saved by themselves (lora.save=adapter), else "hf"."""
        return "peft" if self.lora is not None and self.lora.save == "adapter" else "hf"


def saved_as(cfg: BaseConfig, name: str, model: Saves) -> Saved:
    """Returns how a recipe saves the engine `name`: the one that the run is about in its directory,
    another in a directory of its own there."""
    run = run_dir(cfg)
    return Saved(
        model=model,
        base_model_path=model_path(cfg, name),
        home=run if name == next(iter(engines(cfg))) else run / name,
        lora=engines(cfg)[name].lora,
    )


class Saver(AnswersForeignNames):
    """Saves models when it is due and at the end. Collective. The first of `models` is the one the
    run is about: it is saved last."""

    def __init__(
        self,
        config: SaverConfig,
        *,
        models: Sequence[Saved],
        clock: Callable[[], float],
        is_zero: bool,
        tokenizer: Any = None,
    ) -> None:
        """Takes a `clock` in seconds, the same on every rank; is_zero: whether this is rank 0;
        tokenizer: saved with the models, None copies that of their base model."""
        self.config, self.models, self.tokenizer = config, models, tokenizer
        self.final = models[0].home / FINAL_DIR
        self.freq = Frequency(config, clock)
        self._is_zero = is_zero

    @classmethod
    def for_run(cls, cfg: BaseConfig, model: Saves, name: str = "actor") -> Saver:
        """Makes a script's saver of one model, whose section of the configuration is `name`."""
        note_read(cfg, "saver")
        saved = saved_as(cfg, name, model)
        clock = partial(on_rank_zero, time.monotonic)
        return cls(
            cfg.saver,
            models=[saved],
            clock=clock,
            is_zero=env_rank() == 0,
            tokenizer=tokenizer_to_save(cfg, saved.base_model_path),
        )

    def maybe_save(self, *, step: int, epoch: int, epoch_ended: bool) -> None:
        """Saves every model after a step if it is due, then removes older saves but for keep_last
        and keep_best. `step` and `epoch` count from 1."""
        if not self.freq.due(step=step, epoch=epoch, epoch_ended=epoch_ended):
            return
        for saved in reversed(self.models):
            self._save(saved, saved.home / "hf" / f"step_{step:06d}")
            if self._is_zero and self.config.keep_last:
                older = sorted((saved.home / "hf").glob("step_*"))[: -self.config.keep_last]
                best = self._best(older)
                for old in (o for o in older if o not in best):
                    remove(old)

    def _best(self, older: Sequence[Path]) -> list[Path]:
        """Returns the config.keep_best directories of `older` whose steps have the best
        config.metric; a step without that metric is none of them."""
        c = self.config
        metric = c.metric.removeprefix("-")
        if not c.keep_best or not older:
            return []
        rows = RunLog(self.models[0].home / STATS_FILE).read()
        metrics = {f"step_{row['step']:06d}": row.get(metric) for row in rows}
        scores = {o: metrics.get(o.name) for o in older}
        scored = {o: s for o, s in scores.items() if s is not None and not math.isnan(s)}
        if not scored:
            log.warning(
                "saver.keep_best: %s has no %r for a step that was saved; name a metric that is "
                "there, and evaluate at the steps of the saver",
                STATS_FILE,
                metric,
            )
        return sorted(scored, key=lambda o: scored[o], reverse=metric == c.metric)[: c.keep_best]

    def save_final(self) -> Path | None:
        """Saves every model to <home>/final; returns the first one's directory, or None where
        saver.final is off."""
        if not self.config.final:
            return None
        for saved in reversed(self.models):
            self._save(saved, saved.home / FINAL_DIR)
        return self.final

    def _save(self, saved: Saved, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        meta = SaveLoadMeta(
            path=str(path),
            weight_format=saved.weight_format,
            base_model_path=saved.base_model_path,
            tokenizer=self.tokenizer,
        )
        with full_disk_named(f"saving {path}", path.parent):
            saved.model.save(meta)
        log.info("saved %s", path)
