"""The offline recipes: supervised fine-tuning."""

from __future__ import annotations

from megarl.api.records import FinetuneSpec
from megarl.config.recipes import SFTConfig
from megarl.data import build_dataloader, build_dataset, collate_sft
from megarl.observability.bootstrap import bootstrap_ci
from megarl.observability.logging import get_logger
from megarl.observability.timers import Timers
from megarl.trainer.context import RunContext
from megarl.trainer.frequency import Frequency
from megarl.trainer.roles import MegatronSFT
from megarl.trainer.saver import Saver

log = get_logger(__name__)

COLLECTIVE_TIMEOUT = 1800.0


def run(cfg: SFTConfig) -> None:
    """The whole run, on every rank."""
    with RunContext(cfg, model_path=cfg.model.path, timeout=COLLECTIVE_TIMEOUT) as ctx:
        trainer = SFTTrainer(cfg, ctx)
        trainer.fit()
        trainer.model.destroy()  # collective, so only where every rank got here


class SFTTrainer:
    """Every rank draws the same global batch from its own copy of the (seeded) loader."""

    def __init__(self, cfg: SFTConfig, ctx: RunContext) -> None:
        self.cfg, self.ctx = cfg, ctx
        self.timers = Timers()
        data = build_dataset(cfg.train_dataset, ctx.tokenizer, purpose="sft", seed=cfg.seed)
        self.loader = build_dataloader(data, cfg.train_dataset, seed=cfg.seed)
        self.held_out = None
        if cfg.valid_dataset is not None:
            rows = build_dataset(cfg.valid_dataset, ctx.tokenizer, purpose="sft", seed=cfg.seed)
            n = min(len(rows), cfg.evaluator.max_samples or len(rows))
            self.held_out = collate_sft([rows[i] for i in range(n)])
        self.spec = FinetuneSpec(
            total_train_epochs=cfg.total_train_epochs,
            dataset_size=len(data),
            train_batch_size=cfg.train_dataset.batch_size,
            max_steps=cfg.total_train_steps,
        )
        self.model = MegatronSFT(cfg.model, seed=cfg.seed)
        self.model.initialize(None, self.spec)
        self.saver = Saver(
            cfg.saver,
            run_dir=ctx.run_dir,
            base_model_path=cfg.model.path,
            clock=ctx.clock,
            is_zero=ctx.is_zero,
        )
        self.eval_freq = Frequency(cfg.evaluator, ctx.clock)

    def fit(self) -> None:
        total, per_epoch = self.spec.total_train_steps, self.spec.steps_per_epoch
        if self.cfg.evaluator.at_start:
            self.ctx.log_stats(0, self._evaluate(), total_steps=total)
        step, done = 0, total == 0
        while not done:
            for rows in self.loader:
                step += 1
                with self.timers.phase("step"), self.timers.phase("train"):
                    stats = self.model.train(collate_sft(rows))
                    self.model.step_lr_scheduler()
                epoch, ended = -(-step // per_epoch), step % per_epoch == 0
                done = step >= total or self._out_of_time()
                due = self.eval_freq.due(step=step, epoch=epoch, epoch_ended=ended)
                if due or (done and self.cfg.evaluator.at_end):
                    stats |= self._evaluate()
                    done = done or self._good_enough(stats)
                self.saver.maybe_save(self.model, step=step, epoch=epoch, epoch_ended=ended)
                self.ctx.log_stats(step, stats | self.timers.export(), total_steps=total)
                if done:
                    break
        if total:
            self.saver.save_final(self.model)

    def _evaluate(self) -> dict[str, float]:
        if self.held_out is None:
            return {}
        with self.timers.phase("eval"):
            stats = self.model.evaluate(self.held_out)
        n = len(self.held_out["input_ids"])
        right = round(stats["exact_match"] * n)
        low, high = bootstrap_ci([True] * right + [False] * (n - right), seed=self.cfg.seed)
        interval = {"accuracy": stats["exact_match"], "accuracy_lo": low, "accuracy_hi": high}
        return {f"eval/{k}": v for k, v in (stats | interval).items()}

    def _good_enough(self, stats: dict[str, float]) -> bool:
        bound = self.cfg.stop_at_exact_match
        return bound is not None and stats.get("eval/exact_match", 0.0) >= bound

    def _out_of_time(self) -> bool:
        bound = self.cfg.max_train_seconds
        return bound is not None and self.ctx.elapsed() >= bound
