"""The offline recipes: supervised fine-tuning."""

from __future__ import annotations

from typing import Any

from megarl.api.records import FinetuneSpec
from megarl.config.dataset import DatasetConfig
from megarl.config.recipes import SFTConfig, held_out_sets
from megarl.data import RowDataset, build_dataloader, build_dataset, collate_sft, collator
from megarl.observability import stats_tracker
from megarl.observability.intervals import wilson
from megarl.observability.logging import get_logger
from megarl.observability.stats_tracker import record_timing
from megarl.trainer.context import RunContext
from megarl.trainer.evaluation import metric
from megarl.trainer.frequency import EvaluationTimes
from megarl.trainer.generation import Generation
from megarl.trainer.held_out import with_means
from megarl.trainer.recover import Recovery, data_of, same_data
from megarl.trainer.roles import MegatronSFT
from megarl.trainer.rollout_metrics import batch_metrics, gathered, update_speed
from megarl.trainer.saver import Saved, Saver
from megarl.trainer.self_check import SelfCheck
from megarl.utils import stopping
from megarl.utils.batch import Padded

log = get_logger(__name__)
SAMPLES = "samples.jsonl"
_JOINED = ("loss", "ppl", "token_accuracy", "exact_match", "accuracy")


def run(cfg: SFTConfig, trainer_class: type[SFTTrainer] | None = None) -> None:
    """Runs supervised fine-tuning from start to end. Every rank calls it."""
    with RunContext(cfg, model_path=cfg.model.path) as ctx:
        trainer = (trainer_class or SFTTrainer)(cfg, ctx, **cfg.trainer.options)
        try:
            trainer.fit()
        finally:
            trainer.end_generation()  # waits for no other rank, so also after a failure
        trainer.model.destroy()  # collective, so only where every rank got here


class SFTTrainer:
    """Every rank draws the same batch from its own copy of the (seeded) loader."""

    def __init__(self, cfg: SFTConfig, ctx: RunContext) -> None:
        self.cfg, self.ctx = cfg, ctx
        data = build_dataset(cfg.train_dataset, ctx.tokenizer, purpose="sft", seed=cfg.seed)
        collate = collator(cfg.train_dataset, collate_sft)
        self.loader = build_dataloader(data, cfg.train_dataset, seed=cfg.seed, collate=collate)
        by_loss = cfg.generation is None or cfg.generation.loss
        sets = held_out_sets(cfg) if by_loss else {}
        self.held_out = {name: self._held_out(held_out, data) for name, held_out in sets.items()}
        self.spec = FinetuneSpec.for_run(cfg, dataset_size=len(data))
        self.model = MegatronSFT(cfg.model, seed=cfg.seed)
        self.model.initialize(None, self.spec)
        self.check = SelfCheck(cfg, ctx)
        self.check.watch(self.model)
        self.saver = Saver(
            cfg.saver,
            models=[
                Saved(
                    model=self.model,
                    base_model_path=cfg.model.path,
                    home=ctx.run_dir,
                    lora=cfg.model.lora,
                )
            ],
            clock=ctx.clock,
            is_zero=ctx.is_zero,
        )
        self.eval_times = EvaluationTimes(cfg.evaluator, ctx.clock)
        self.data_key = data_of(cfg, len(data))
        self.exact_match = 0.0  # the last evaluation's
        clocks = {"saver": self.saver.freq, "evaluator": self.eval_times}
        self.recovery = Recovery(ctx, {"model": self.model}, clocks)
        self.steps_done = self.recovery.restore(self._load_state)
        self.generation: Generation | None = None
        if cfg.generation is not None:
            self.generation = Generation(cfg, cfg.generation, ctx, self.model, data)

    def _held_out(self, data: DatasetConfig, trained: RowDataset) -> Padded:
        """Returns the sequences of a validation set, without prompts of the training data."""
        rows = build_dataset(
            data,
            self.ctx.tokenizer,
            purpose="sft",
            seed=self.cfg.seed,
            apart_from=trained,
            overlap=self.cfg.evaluator.overlap,
        )
        n = min(len(rows), self.cfg.evaluator.max_samples or len(rows))
        held_out: Padded = collator(data, collate_sft)([rows[i] for i in range(n)])
        return held_out

    def fit(self) -> None:
        """Trains until the last step, max_train_seconds, stop_at_exact_match or a signal, and
        evaluates, saves and checkpoints between steps. Collective."""
        total, per_epoch = self.spec.total_train_steps, self.spec.steps_per_epoch
        step = self.steps_done
        done = step >= total or self._out_of_time() or self._good_enough()
        if self.recovery.ended_already(self.saver, total=total, over=done):
            return
        if self.cfg.evaluator.at_start and not step:
            stats = self._evaluate(step=0, epoch=0, epoch_ended=False)
            self.ctx.log_stats(0, stats, total_steps=total)
        stopping.work_begins()
        while not done:
            for batch in self.loader:
                step += 1
                self.check.begin_step(step)
                with self.ctx.profiler.step(step):
                    stats = self._step(batch)
                epoch, ended = -(-step // per_epoch), step % per_epoch == 0
                if self.ctx.wish_to_stop():
                    self._log(step, stats)
                    saved = self.recovery.save_now(self._state, step=step, epoch=epoch)
                    return self.ctx.stop(saved, step)
                done = step >= total or self._out_of_time()
                found = self._evaluate(step=step, epoch=epoch, epoch_ended=ended, last=done)
                stats |= found
                done = done or (bool(found) and self._good_enough())
                self.saver.maybe_save(step=step, epoch=epoch, epoch_ended=ended)
                self._log(step, stats)
                with record_timing("recover"):
                    self.recovery.maybe_save(
                        self._state, step=step, epoch=epoch, epoch_ended=ended, last=done
                    )
                if done:
                    break
        if total:
            self.saver.save_final()

    def _log(self, step: int, stats: dict[str, float]) -> None:
        stats = stats | gathered()
        self.ctx.log_stats(step, stats, total_steps=self.spec.total_train_steps)

    def _step(self, batch: Padded) -> dict[str, float]:
        with record_timing("step"), record_timing("train"):
            stats = self.model.train(batch) | batch_metrics(batch)
            self.model.step_lr_scheduler()
        return stats | update_speed(
            self.model.engine,
            batch,
            seconds=stats_tracker.seconds("train"),
            peak_tflops=self.cfg.profiler.peak_tflops,
        )

    def _evaluate(
        self, *, step: int, epoch: int, epoch_ended: bool, last: bool = False
    ) -> dict[str, float]:
        """Evaluates where it is due and returns the metrics; {} otherwise. Collective."""
        label = self.eval_times.label(step=step, epoch=epoch, epoch_ended=epoch_ended, last=last)
        if label is None:
            return {}
        with record_timing("eval"):
            found: dict[str, float] = {}
            for name, held_out in self.held_out.items():
                found |= self._by_loss(name, held_out)
            found = with_means(found, list(self.held_out), _JOINED)
            if self.generation is not None:  # its accuracy counts, not that by loss
                when, path = None if label == "during" else label, self.ctx.run_dir / SAMPLES
                found |= self.generation.evaluate(step, path, when)
        self.exact_match = found.get("eval/exact_match", self.exact_match)
        return found

    def end_generation(self) -> None:
        """Ends the servers of evaluations; waits for no other rank."""
        if self.generation is not None:
            self.generation.close()

    def _by_loss(self, name: str, held_out: Padded) -> dict[str, float]:
        """Returns the metrics of one validation set. Collective."""
        stats = self.model.evaluate(held_out)
        low, high = wilson(stats["exact_match"], len(held_out["input_ids"]))
        stats |= {"accuracy": stats["exact_match"], "accuracy_lo": low, "accuracy_hi": high}
        return {metric(name, figure): value for figure, value in stats.items()}

    def _good_enough(self) -> bool:
        bound = self.cfg.stop_at_exact_match
        return bound is not None and self.exact_match >= bound

    def _state(self) -> dict[str, Any]:
        loader = self.loader.state_dict()
        return {"data": self.data_key, "loader": loader, "exact_match": self.exact_match}

    def _load_state(self, state: dict[str, Any]) -> None:
        if same_data(state["data"], self.data_key):
            self.loader.load_state_dict(state["loader"])
        self.exact_match = state["exact_match"]

    def _out_of_time(self) -> bool:
        bound = self.cfg.max_train_seconds
        return bound is not None and self.ctx.elapsed() >= bound
