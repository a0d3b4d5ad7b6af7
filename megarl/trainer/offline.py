"""Offline recipes, which train one model on rows that exist already: what all have, supervised
fine-tuning, a policy that learns from preferred answers, and a reward model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from megarl.algos import Role
from megarl.api.records import FinetuneSpec
from megarl.api.tokens import Padded
from megarl.config.dataset import DatasetConfig
from megarl.config.recipes import (
    DPOConfig,
    OfflineConfig,
    RMConfig,
    SFTConfig,
    data_purpose,
    held_out_sets,
)
from megarl.config.rollout import GenerationConfig
from megarl.data.dataset import (
    RowDataset,
    build_dataloader,
    build_dataset,
    collate_pairs,
    collate_sft,
    collator,
)
from megarl.data.rows import Row
from megarl.observability.intervals import wilson
from megarl.observability.stats_tracker import record_timing
from megarl.rollout.rewards import RewardPool
from megarl.trainer.context import RunContext
from megarl.trainer.evaluation import (
    SAMPLES_FILE,
    HeldOut,
    evaluate_unless_stopped,
    make_client,
    make_pool,
    metric,
    with_means,
)
from megarl.trainer.loop import Trainer
from megarl.trainer.recover import data_of, same_data
from megarl.trainer.roles import (
    MegatronLoRARef,
    MegatronPreferencePolicy,
    MegatronRef,
    MegatronRewardLearner,
    MegatronSFT,
    make_ref,
)
from megarl.trainer.rollout_metrics import batch_metrics
from megarl.trainer.self_check import SelfCheck, same_weights
from megarl.trainer.turns import WeightPublisher

_JOINED = ("loss", "accuracy", "margin")  # figures of preferences with a mean over sets


class OfflineTrainer(Trainer):
    """Trains one model on rows that exist already. A subclass says what: `make_model`, `collate`
    and `by_loss`. Every rank draws the same batch from its own copy of the (seeded) loader.
    """

    joined: tuple[str, ...] = ("loss", "accuracy")  # figures that have a mean over validation sets
    renamed: ClassVar[dict[str, str]] = {
        "state": "name it state_dict",
        "load_state": "name it load_state_dict",
        "evaluated": "override evaluate, and take the metrics that super().evaluate returns",
        "evaluate_otherwise": "override evaluate, and add to what super().evaluate returns",
    }

    def __init__(self, cfg: OfflineConfig, ctx: RunContext) -> None:
        super().__init__(cfg, ctx)
        data = build_dataset(
            cfg.train_dataset, ctx.tokenizer, purpose=data_purpose(cfg), seed=cfg.seed
        )
        collate = collator(cfg.train_dataset, self.collate())
        self.loader = build_dataloader(data, cfg.train_dataset, seed=cfg.seed, collate=collate)
        sets = held_out_sets(cfg) if self.evaluates_by_loss() else {}
        self.held_out = {name: self._held_out(held_out, data) for name, held_out in sets.items()}
        self.spec = FinetuneSpec.for_run(cfg, dataset_size=len(data))
        self.model = self.make_model()
        self.model.initialize(None, self.spec)
        self.check = ctx.trainers.make(SelfCheck, cfg, ctx.trainers.ctx)
        self.check.watch(self.model)
        self.data_key = data_of(cfg, len(data))
        self._batches = self._endless()
        self.go_on({"model": self.model})
        self.set_up_others(data)

    def make_model(self) -> Any:
        """Returns the role that trains, on a MegatronEngine that is not initialized yet."""
        raise NotImplementedError

    def collate(self) -> Callable[[list[Row]], Any]:
        """Returns what makes a padded batch of rows."""
        raise NotImplementedError

    def train(self, batch: Padded) -> dict[str, float]:
        """Makes one update and returns its metrics. Collective."""
        with record_timing("train"):
            stats: dict[str, float] = self.model.train(batch)
        return stats

    def by_loss(self, held_out: Padded) -> dict[str, float]:
        """Returns the metrics of a validation set, of a pass without an update. Collective."""
        raise NotImplementedError

    def set_up_others(self, data: RowDataset) -> None:
        """Makes what a subclass needs beside the model, which is as it was at the last checkpoint;
        `data`: the training data. Collective."""

    def evaluates_by_loss(self) -> bool:
        """Returns whether `by_loss` is asked of the validation sets."""
        return True

    def destroy(self) -> None:
        """Destroys the roles. Collective."""
        self.model.destroy()

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps beside the model."""
        return {"data": self.data_key, "loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned."""
        if same_data(state["data"], self.data_key):
            self.loader.load_state_dict(state["loader"])

    def _held_out(self, data: DatasetConfig, trained: RowDataset) -> Padded:
        """Returns the sequences of a validation set, without prompts of the training data."""
        rows = build_dataset(
            data,
            self.ctx.tokenizer,
            purpose=data_purpose(self.cfg),
            seed=self.cfg.seed,
            apart_from=trained,
            overlap=self.cfg.evaluator.overlap,
        )
        held_out: Padded = collator(data, self.collate())([rows[i] for i in range(len(rows))])
        return held_out

    def step(self, step: int) -> dict[str, float]:
        """Makes step `step` (from 0): an update on the next batch; returns its metrics."""
        batch = next(self._batches)
        stats = self.train(batch) | batch_metrics(batch)
        self.model.step_lr_scheduler()
        return stats | self.speed(batch)

    def _endless(self) -> Iterator[Padded]:
        while True:
            yield from self.loader

    def evaluate(self, step: int, label: str) -> dict[str, float]:
        """Returns the metrics of the validation sets, by their loss. Collective."""
        metrics: dict[str, float] = {}
        for name, held_out in self.held_out.items():
            metrics |= {metric(name, figure): v for figure, v in self.by_loss(held_out).items()}
        return with_means(metrics, list(self.held_out), self.joined)


class SFTTrainer(OfflineTrainer):
    """Fine-tunes a model on written answers."""

    cfg: SFTConfig
    joined = ("loss", "ppl", "token_accuracy", "exact_match", "accuracy")

    def __init__(self, cfg: SFTConfig, ctx: RunContext) -> None:
        self.exact_match = 0.0  # the last evaluation's
        self.generation: Generation | None = None
        super().__init__(cfg, ctx)

    def make_model(self) -> MegatronSFT:
        """Returns the model that is fine-tuned."""
        return self.ctx.trainers.make(MegatronSFT, self.cfg.model, seed=self.cfg.seed)

    def collate(self) -> Callable[[list[Row]], Any]:
        """Returns collate_sft."""
        return collate_sft

    def set_up_others(self, data: RowDataset) -> None:
        """Starts what evaluates by generation, where the configuration asks for it. Collective."""
        if self.cfg.generation is not None:
            self.generation = Generation(self.cfg, self.cfg.generation, self.ctx, self.model, data)

    def evaluates_by_loss(self) -> bool:
        """Returns whether the validation sets are evaluated by their loss, too."""
        return self.cfg.generation is None or self.cfg.generation.loss

    def by_loss(self, held_out: Padded) -> dict[str, float]:
        """Returns loss, ppl, token_accuracy and exact_match, which is the accuracy. Collective."""
        stats: dict[str, float] = self.model.evaluate(held_out)
        return with_interval(stats | {"accuracy": stats["exact_match"]}, held_out)

    def evaluate(self, step: int, label: str) -> dict[str, float]:
        """Returns the metrics of the validation sets, whose exact_match may end the run, and of
        generated answers, whose accuracy counts, not that by loss. Collective."""
        metrics = super().evaluate(step, label)
        self.exact_match = metrics.get("eval/exact_match", self.exact_match)
        if self.generation is not None:
            metrics |= self.generation.evaluate(step, self.ctx.run_dir / SAMPLES_FILE, label)
        return metrics

    def good_enough(self) -> bool:
        """Returns whether stop_at_exact_match is reached."""
        bound = self.cfg.stop_at_exact_match
        return bound is not None and self.exact_match >= bound

    def end_generation(self) -> None:
        """Ends the servers of evaluations; waits for no other rank."""
        if self.generation is not None:
            self.generation.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of the trainer, the last exact_match with it."""
        return super().state_dict() | {"exact_match": self.exact_match}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned."""
        super().load_state_dict(state)
        self.exact_match = state["exact_match"]


class Generation:
    """Brings a model's weights to servers and has them answer the validation sets. Every rank makes
    one; `evaluate` is collective. Rank 0 starts the servers, unless the configuration names some.
    """

    def __init__(
        self,
        cfg: SFTConfig,
        config: GenerationConfig,
        ctx: RunContext,
        model: Role,
        data: RowDataset,
    ) -> None:
        """Reads the validation sets, without prompts of the training `data`, and waits for the
        servers. Collective."""
        self._pool: RewardPool | None = None  # on rank 0, as are the sets
        self._held_out: HeldOut | None = None
        engine: Any = model.engine  # MegatronEngine, which has decided what `auto` is
        self._client = make_client(
            config.rollout,
            config.server,
            model_path=cfg.model.path,
            dtype=str(engine.dtype).removeprefix("torch."),
            log_dir=ctx.run_dir / "logs",
            weight_sync=config.weight_sync,
            seed=cfg.seed,
            tokenizer=ctx.tokenizer,
        )

        def read() -> None:
            self._pool = make_pool(config.rollout)
            self._held_out = HeldOut.for_run(cfg, ctx.tokenizer, self._pool, trained=data)

        try:
            ctx.ranks.from_zero(read)
            self._client.initialize()
        except BaseException:
            self.close()
            raise
        path = ctx.run_dir / "weights"
        self._publisher = WeightPublisher(model, self._client, config.weight_sync, path=path)

    def evaluate(self, step: int, samples_path: Path, when: str | None) -> dict[str, float]:
        """Returns the metrics of the validation sets (HeldOut.evaluate) of the weights after
        `step`, which are the version of the same number; {} where a signal ends the evaluation.
        Collective."""
        self._publisher.publish(step)
        return self._client.on_driver(
            evaluate_unless_stopped, self._held_out, self._client, samples_path, when
        )

    def close(self) -> None:
        """Ends the client, its servers and the reward workers. Waits for no other rank."""
        try:
            self._client.destroy()
        finally:
            if self._pool is not None:
                self._pool.close()


class DPOTrainer(OfflineTrainer):
    """Trains a policy on pairs of answers."""

    cfg: DPOConfig
    model: MegatronPreferencePolicy
    joined = _JOINED

    def make_model(self) -> MegatronPreferencePolicy:
        """Returns the policy that trains."""
        cfg, make = self.cfg, self.ctx.trainers.make
        return make(MegatronPreferencePolicy, cfg.model, cfg.preference, seed=cfg.seed)

    def collate(self) -> Callable[[list[Row]], Any]:
        """Returns what makes a batch of pairs."""
        return collate_pairs

    def set_up_others(self, data: RowDataset) -> None:
        """Makes the reference, where the loss has one; at a run's first update the policy has to
        agree with it, if it begins as the same weights. Collective."""
        self.ref: MegatronRef | MegatronLoRARef | None = None
        if not self.cfg.preference.needs_reference:
            return
        self.ref = self.ctx.trainers.make(make_ref, self.cfg, self.model)
        if not self.steps_done and same_weights(self.model.config, self.ref.config):
            self.check.watch(self.model, first_ratio_to="ref_logp")

    def train(self, batch: Padded) -> dict[str, float]:
        """Makes one update; returns its metrics. Collective."""
        self._compare(batch)
        return super().train(batch)

    def by_loss(self, held_out: Padded) -> dict[str, float]:
        """Returns loss, accuracy with its interval, margin and the means by side. Collective."""
        self._compare(held_out)  # keeps the reference's logprobs, which do not change
        return with_interval(self.model.evaluate(held_out), held_out)

    def destroy(self) -> None:
        """Destroys the reference, then the policy. Collective."""
        if self.ref is not None:
            self.ref.destroy()
        super().destroy()

    def _compare(self, batch: Padded) -> None:
        if self.ref is not None:
            with record_timing("ref"):
                self.model.compare(batch, self.ref)


class RMTrainer(OfflineTrainer):
    """Trains a reward model on pairs of answers."""

    cfg: RMConfig
    model: MegatronRewardLearner
    joined = _JOINED

    def make_model(self) -> MegatronRewardLearner:
        """Returns the reward model that trains."""
        cfg, make = self.cfg, self.ctx.trainers.make
        return make(MegatronRewardLearner, cfg.model, center=cfg.center, seed=cfg.seed)

    def collate(self) -> Callable[[list[Row]], Any]:
        """Returns what makes a batch of pairs, with their margins where these count."""
        return partial(collate_pairs, margin=self.cfg.margin)

    def by_loss(self, held_out: Padded) -> dict[str, float]:
        """Returns loss, accuracy with its interval, margin and the mean scores. Collective."""
        return with_interval(self.model.evaluate(held_out), held_out)


def with_interval(stats: dict[str, float], batch: Padded) -> dict[str, float]:
    """Returns the figures with a 95 % interval of the accuracy: of pairs, or of single answers."""
    n = len(batch["input_ids"]) // (2 if "chosen" in batch else 1)
    low, high = wilson(stats["accuracy"], n)
    return stats | {"accuracy_lo": low, "accuracy_hi": high}
