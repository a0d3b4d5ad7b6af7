"""Says when to save, to checkpoint and to evaluate."""

from __future__ import annotations

import time
from collections.abc import Callable

from megarl.config.run import EvaluatorConfig, FrequencyConfig


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


class EvaluationTimes(Frequency):
    """Says when to evaluate: before the first step, when it is due, and after the last step."""

    config: EvaluatorConfig

    def label(self, *, step: int, epoch: int, epoch_ended: bool, last: bool = False) -> str | None:
        """Returns which evaluation the end of a step asks for: "before" (of step 0, before the
        first), "during" or "after" (the last step); None for none."""
        if step == 0:
            return "before" if self.config.at_start else None
        if last and self.config.at_end:
            return "after"
        return "during" if self.due(step=step, epoch=epoch, epoch_ended=epoch_ended) else None
