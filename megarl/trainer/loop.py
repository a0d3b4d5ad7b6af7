"""The loop that every recipe's trainer has: steps, evaluations, saves and checkpoints, and its
ends."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from megarl.algos import Role
from megarl.api.records import FinetuneSpec
from megarl.config.recipe_engines import engines, trainer_processes, uses_block_fp8
from megarl.config.recipes import BaseConfig, main_role
from megarl.config.script import LEFT_KEYS, note_read
from megarl.data.tokenizer import tokenizer_to_save
from megarl.observability import stats_tracker
from megarl.observability.logging import get_logger
from megarl.observability.stats_tracker import record_timing
from megarl.trainer.context import RunContext, Workers
from megarl.trainer.evaluation import EvaluationTimes
from megarl.trainer.preflight import check_recipe
from megarl.trainer.recover import Recovery
from megarl.trainer.rollout_metrics import update_speed
from megarl.trainer.saver import Saver, Saves, saved_as
from megarl.trainer.self_check import SelfCheck
from megarl.utils import stopping
from megarl.utils.env import set_trainer_defaults
from megarl.utils.importing import load_object
from megarl.utils.stopping import StopRequested

log = get_logger(__name__)

CONTROLLER_CONTEXT = "megarl.controlled:ControllerContext"  # a row above this one


def run(cfg: BaseConfig, trainer_class: type[Any]) -> None:
    """Runs a recipe from start to end by its trainer. Every rank calls it."""
    context: type[RunContext] = RunContext
    if cfg.trainer.mode == "controller":
        context = load_object(CONTROLLER_CONTEXT, what="context")
    with context(cfg, model_path=engines(cfg)[main_role(type(cfg))].path) as ctx:
        trainer = trainer_class(cfg, ctx, **cfg.trainer.options)
        try:
            trainer.set_up()
            trainer.fit()
        except BaseException as error:
            try:
                trainer.end_generation()  # waits for no other rank
            except Exception as e:  # of a failure, which has its own error
                if str(e) != str(error):
                    log.warning("the end of generation failed, too: %s", e)
            raise
        trainer.end_generation()
        trainer.destroy()  # collective, so only where every rank got here


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """Leaves garbage in cycles to the caller's gc.collect() inside. By itself Python would look for
    it at other moments on each rank, while the others wait, and through all that was there
    before."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class ScriptRun:
    """A recipe's run that a script starts, by `trainer_class`."""

    cfg: BaseConfig
    trainer_class: type[Any]

    def train(self) -> None:
        """Runs the recipe from start to end. If a signal stops it, the process exits with 128 + the
        signal's number, as a recipe's run does. Collective."""
        with stopping.listening(spokesman=os.environ.get("RANK", "0") == "0"):
            run(self.cfg, self.trainer_class)
        if status := stopping.status():
            raise SystemExit(status)


class Trainer:
    """Trains until the last step, max_train_seconds, `good_enough` or a signal. A subclass makes
    its models, calls `go_on`, and says what a step is (`step`)."""

    cfg: Any  # a recipe's; a subclass knows which
    spec: FinetuneSpec
    check: SelfCheck
    renamed: ClassVar[dict[str, str]] = {}  # what was called once: what to write now

    def __init_subclass__(cls, **kw: Any) -> None:
        """Raises TypeError for a class that overrides what is not called any more."""
        super().__init_subclass__(**kw)
        for name, instead in cls.renamed.items():
            if hasattr(cls, name):
                raise TypeError(f"{cls.__qualname__}.{name} is not called any more: {instead}")

    def __init__(self, cfg: Any, ctx: RunContext) -> None:
        self.cfg, self.ctx = cfg, ctx

    @classmethod
    def for_run(cls, cfg: BaseConfig) -> ScriptRun:
        """Returns the run of a script's configuration by this trainer; `train()` runs it. Raises
        ConfigError for a configuration that the recipe's own start refuses."""
        by_controller = cfg.trainer.mode == "controller"
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        check_recipe(cfg, trainer_processes(cfg) if by_controller else world_size, own_script=True)
        set_trainer_defaults(os.environ, block_fp8=uses_block_fp8(cfg))
        # the script chooses the trainer, so these two have no effect, and the log names them
        read = (field.name for field in fields(cfg) if field.name not in ("trainer", "replay"))
        note_read(cfg, *read, "trainer.options", *LEFT_KEYS)
        return ScriptRun(cfg, cls)

    @property
    def trainers(self) -> Workers:
        """Returns the workers that the trained models and what watches them are made on."""
        return self.ctx.trainers

    def set_up(self) -> None:
        """Makes what waits for others, before `fit`. Collective."""

    def end_generation(self) -> None:
        """Ends what talks to servers; waits for no other rank."""

    def destroy(self) -> None:
        """Destroys the roles. Collective."""
        raise NotImplementedError

    def go_on(
        self,
        trained: Mapping[str, Role],
        followers: Mapping[str, Role] | None = None,
        saves: Callable[[Any], Saves] = lambda role: role,
    ) -> None:
        """Makes what saves the `trained` roles, by their keys in the configuration, and continues
        from the newest checkpoint, which holds them and the `followers` of one. saves: gives what
        saves a role. Collective."""
        cfg, ctx = self.cfg, self.ctx
        self.main_role = next(iter(trained.values()))
        self.saver = Saver(
            cfg.saver,
            models=[saved_as(cfg, name, saves(role)) for name, role in trained.items()],
            clock=ctx.clock,
            is_zero=ctx.ranks.is_zero,
            tokenizer=tokenizer_to_save(cfg, ctx.model_path),
        )
        self.eval_times = EvaluationTimes(cfg.evaluator, ctx.clock)
        clocks = {"saver": self.saver.freq, "evaluator": self.eval_times}
        self.recovery = Recovery(ctx, {**trained, **(followers or {})}, clocks)
        self.steps_done = self.recovery.restore(self.load_state_dict)

    def fit(self) -> None:
        """Trains, and evaluates, saves and checkpoints between steps. Collective."""
        total, step = self.spec.total_train_steps, self.steps_done
        over = step >= total or self._out_of_time() or self.good_enough()
        if self.recovery.ended_already(self.saver, total=total, over=over):
            return
        spec, each = self.spec, self.spec.train_batch_size
        if spec.max_steps is not None and total < spec.max_steps:
            log.info(
                "the run has %d steps, not total_train_steps=%d: then total_train_epochs=%d of %d "
                "rows are over; raise it for more",
                *(total, spec.max_steps, spec.total_train_epochs, spec.dataset_size),
            )
        if spec.drop_last and (rest := spec.dataset_size % each) < spec.dataset_size and rest:
            log.info(
                "%d of %d rows are left out of every epoch, as they fill no batch of %d: "
                "train_dataset.drop_last=false trains them, too",
                *(rest, spec.dataset_size, each),
            )
        self.begin(step)
        if not step and (stats := self._evaluate(step=0, epoch=0, epoch_ended=False)):
            self._log(0, stats)
        stopping.work_begins()
        with collected_by_hand():
            while not over:
                try:
                    stats = self.whole_step(step)
                except StopRequested:  # on every rank, while the batch was waited for
                    return self._stop(step)
                step += 1
                where = self.spec.where(step)
                stop, asked = self.ctx.wishes()
                if not stop:
                    with record_timing("save"):
                        self.saver.maybe_save(**where)
                    over = step >= total or self._out_of_time()
                    evaluated = self._evaluate(**where, last=over)
                    stats |= evaluated
                    over = over or (bool(evaluated) and self.good_enough())
                self._log(step, stats | self.ctx.gathered())
                if stop:
                    return self._stop(step)
                if over:
                    self.check.end()
                with record_timing("recover"):
                    self.recovery.maybe_save(self.state_dict, **where, last=over, asked=asked)
                gc.collect()
        if total:
            self.saver.save_final()

    def begin(self, step: int) -> None:
        """Does what comes before the first step that this start makes, the one after `step`.
        Collective."""

    def whole_step(self, step: int) -> dict[str, float]:
        """Makes step `step` (from 0), under the eyes of what checks, profiles and records it;
        returns its metrics. Raises StopRequested where a signal came while its batch was waited
        for. Collective."""
        self.check.begin_step(step + 1)
        with self.ctx.profiler.step(step + 1), record_timing("step"):
            return self.step(step)

    def step(self, step: int) -> dict[str, float]:
        """Makes step `step` (from 0) of the algorithm; returns its metrics. Collective."""
        raise NotImplementedError

    def evaluate(self, step: int, label: str) -> dict[str, float]:
        """Returns the metrics of the validation sets after `step`; label: as of EvaluationTimes.
        Collective."""
        raise NotImplementedError

    def good_enough(self) -> bool:
        """Returns whether training may end before its last step."""
        return False

    def completions(self) -> Mapping[str, Sequence[dict[str, Any]]]:
        """Returns the completions to log since the last call, rank 0's."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps beside the models. Rank 0 only."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned. Collective."""
        raise NotImplementedError

    def speed(self, batch: Any) -> dict[str, float]:
        """Returns the metrics of the phase "train" of this step, of the first trained role."""
        return self.trainers.run(
            update_speed,
            self.main_role,
            batch,
            seconds=stats_tracker.seconds("train"),
            peak_tflops=self.cfg.profiler.get("peak_tflops"),
        )

    def _evaluate(self, *, step: int, **where: Any) -> dict[str, float]:
        """Evaluates where it is due and returns the metrics; {} otherwise. Collective."""
        label = self.eval_times.label(step=step, **where)
        if label is None:
            return {}
        with record_timing("eval"):
            return self.evaluate(step, label)

    def _log(self, step: int, stats: dict[str, float]) -> None:
        total = self.spec.total_train_steps
        self.ctx.log_stats(step, stats, total_steps=total, completions=self.completions())

    def _stop(self, step: int) -> None:
        """Ends after `step` steps because of a signal, with a checkpoint of them."""
        epoch = self.spec.where(step)["epoch"]
        saved = self.recovery.save_now(self.state_dict, step=step, epoch=epoch)
        self.ctx.stop(saved, step)

    def _out_of_time(self) -> bool:
        bound = self.cfg.max_train_seconds
        return bound is not None and self.ctx.elapsed() >= bound
