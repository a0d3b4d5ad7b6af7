"""The RL recipe. `step` below is the algorithm; everything above it is set-up."""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any

from megarl.algos import Role
from megarl.api.inference import Batch, RolloutWorkflow
from megarl.api.records import FinetuneSpec, ServersLost, WeightUpdateMeta
from megarl.config.check import engines, model_path, ref_is_below_adapters
from megarl.config.dataset import DatasetConfig
from megarl.config.recipes import GRPOConfig
from megarl.config.rollout import GenerationHyperparameters
from megarl.data import RowDataset, build_dataloader, build_dataset, check_context
from megarl.models import read_hf_config
from megarl.observability.logging import get_logger
from megarl.observability.timers import Timers
from megarl.rollout import RemoteSGLangEngine, RewardPool, check_rows, get_reward_fn
from megarl.trainer.context import RunContext
from megarl.trainer.evaluation import Evaluator
from megarl.trainer.frequency import Frequency
from megarl.trainer.recover import Recovery, data_of, same_data
from megarl.trainer.roles import MegatronActor, MegatronLoRARef, MegatronRef
from megarl.trainer.rollout_metrics import rollout_metrics, update_speed
from megarl.trainer.saver import Saved, Saver
from megarl.trainer.self_check import SelfCheck
from megarl.utils import stopping
from megarl.utils.importing import load_object
from megarl.utils.stopping import StopRequested

log = get_logger(__name__)


def run(cfg: GRPOConfig, trainer_class: type[RLTrainer] | None = None) -> None:
    """The whole run, on every rank. Needs generation servers (rollout.addresses)."""
    timeouts = {
        "rollout.episode_timeout": cfg.rollout.episode_timeout,
        "rollout.request_timeout": cfg.rollout.request_timeout,
        "weight_sync.timeout": cfg.weight_sync.timeout,
    }
    with RunContext(cfg, model_path=cfg.actor.path, zero_timeouts=timeouts) as ctx:
        trainer = (trainer_class or RLTrainer)(cfg, ctx)
        try:
            trainer.set_up()
            trainer.fit()
        finally:
            trainer.end_generation()  # rank 0's own affair, so also after a failure
        trainer.destroy()  # collective, so only where every rank got here


class RolloutSession:
    """Rank 0's side of the run: data, the rollout client, the workflows."""

    def __init__(self, cfg: GRPOConfig, tokenizer: Any) -> None:
        self.config, self.model = cfg.rollout, model_path(cfg, "actor")
        self.data = build_dataset(cfg.train_dataset, tokenizer, purpose="rl", seed=cfg.seed)
        check_context(self.data, cfg.gconfig, cfg.server.context_length)
        self.loader = build_dataloader(self.data, cfg.train_dataset, seed=cfg.seed)
        self.data_key = data_of(cfg, len(self.data))
        self.client = RemoteSGLangEngine(cfg.rollout, weight_sync=cfg.weight_sync, seed=cfg.seed)
        self.pool = RewardPool(cfg.rollout.reward_workers, timeout=cfg.rollout.reward_timeout)
        self.workflow = self._workflow(self.data, cfg.train_dataset, cfg.gconfig, tokenizer)
        self.should_accept = has_signal if cfg.actor.dynamic_sampling else None
        self.evaluator = None
        if cfg.valid_dataset is not None:
            held_out = build_dataset(cfg.valid_dataset, tokenizer, purpose="rl", seed=cfg.seed)
            check_context(held_out, cfg.eval_gconfig, cfg.server.context_length)
            self.evaluator = Evaluator(
                held_out,
                self.client,
                self._workflow(held_out, cfg.valid_dataset, cfg.eval_gconfig, tokenizer),
                tokenizer,
                config=cfg.evaluator,
                seed=cfg.seed,
            )

    def _workflow(
        self,
        rows: RowDataset,
        data: DatasetConfig,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
    ) -> RolloutWorkflow:
        make = load_object(self.config.workflow, what="rollout.workflow")
        reward_fn = get_reward_fn(data.reward or data.type)
        check_rows(reward_fn, (rows[i] for i in range(len(rows))))
        return make(reward_fn, gconfig, tokenizer, reward_pool=self.pool)

    def start(self) -> int:
        """Waits for the servers; the size of the training set."""
        self.client.initialize()
        self.client.executor.pipeline.vocab_size = read_hf_config(self.model).vocab_size
        return len(self.data)

    def expect(self, steps: int) -> None:
        """How many more batches there will be, so that nothing is generated beyond them."""
        self.client.executor.expect(steps)

    def next_batch(self) -> Batch:
        batch = self.client.prepare_batch(
            self.loader, workflow=self.workflow, should_accept=self.should_accept
        )
        self.client.executor.accounting.receive(batch["episode_ids"])
        return batch

    def account(self, batch: Batch) -> dict[str, float]:
        """Books the batch as trained, which every sample must be exactly once unless its update was
        skipped; counters so far."""
        self.client.executor.trained(batch["episode_ids"], batch.get("skipped"))
        return self.counters()

    def counters(self) -> dict[str, float]:
        """rollout/submitted = running + accepted + rejected + failed + dropped, and others; none
        before start() has opened the client.
        """
        stats = self.client.stats() if self.client.is_open else {}
        return {f"rollout/{name}": value for name, value in stats.items()}

    def state_dict(self) -> dict[str, Any]:
        """Between two steps: the place in the data, what is in flight, the counters."""
        rollout = self.client.executor.state_dict()
        return {"data": self.data_key, "loader": self.loader.state_dict(), "rollout": rollout}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rollout = state["rollout"]
        if same_data(state["data"], self.data_key):
            self.loader.load_state_dict(state["loader"])
        else:
            rollout = rollout | {"rows": []}
        self.client.executor.load_state_dict(rollout)

    def close(self) -> None:
        self.client.destroy()
        self.pool.close()


def has_signal(batch: Batch) -> bool:
    """DAPO's dynamic sampling (arXiv 2503.14476): a group with equal rewards teaches nothing."""
    return bool(batch["rewards"].min() != batch["rewards"].max())


class RLTrainer:
    def __init__(self, cfg: GRPOConfig, ctx: RunContext) -> None:
        self.cfg, self.ctx = cfg, ctx
        self.timers = Timers()
        self.generation: RolloutSession | None = None
        self._synced = False

    def set_up(self) -> None:
        cfg, ctx = self.cfg, self.ctx
        size = ctx.on_rank_zero(self._start_generation)
        self.spec = FinetuneSpec(
            total_train_epochs=cfg.total_train_epochs,
            dataset_size=size,
            train_batch_size=cfg.train_dataset.batch_size,
            max_steps=cfg.total_train_steps,
        )
        self.actor = MegatronActor(
            cfg.actor,
            temperature=cfg.gconfig.temperature,
            seed=cfg.seed,
            decode=ctx.tokenizer.decode,
        )
        self.actor.initialize(None, self.spec)
        self.ref = self._make_ref()
        self.check = SelfCheck(cfg, ctx)
        recomputed = "prox_logp" if cfg.actor.recompute_logprob else None
        self.check.watch(self.actor, first_ratio_to=recomputed)
        trained: dict[str, Role] = {"actor": self.actor, **self.set_up_others()}
        self.saver = Saver(
            cfg.saver,
            models=[
                Saved(
                    model=role,
                    base_model_path=model_path(cfg, name),
                    home=ctx.run_dir if name == "actor" else ctx.run_dir / name,
                    lora=engines(cfg)[name].lora,
                )
                for name, role in trained.items()
            ],
            clock=ctx.clock,
            is_zero=ctx.is_zero,
        )
        self.eval_freq = Frequency(cfg.evaluator, ctx.clock)
        clocks = {"saver": self.saver.freq, "evaluator": self.eval_freq}
        self.recovery = Recovery(ctx, trained, clocks)
        self.steps_done = self.recovery.restore(partial(ctx.on_rank_zero, self._load_state))

    def set_up_others(self) -> dict[str, Role]:
        """For algorithms with more roles: makes them; those that are trained, by name."""
        return {}

    def _start_generation(self) -> int:
        self.generation = RolloutSession(self.cfg, self.ctx.tokenizer)
        return self.generation.start()

    def _make_ref(self) -> MegatronRef | MegatronLoRARef | None:
        if self.cfg.ref is None:
            return None
        if ref_is_below_adapters(self.cfg):
            return MegatronLoRARef(self.actor)
        config = copy.deepcopy(self.cfg.ref)
        config.path = model_path(self.cfg, "ref")
        config.optimizer = None
        ref = MegatronRef(config, temperature=self.cfg.gconfig.temperature, seed=self.cfg.seed)
        ref.initialize(None, None)
        return ref

    def fit(self) -> None:
        total, per_epoch = self.spec.total_train_steps, self.spec.steps_per_epoch
        step = self.steps_done
        over = step >= total or self._out_of_time()
        if self.recovery.ended_already(self.saver, total=total, over=over):
            return
        if self.generation is not None:
            self.generation.expect(total - step)
        # servers may hold anything: other weights, or those of an earlier run
        self.update_weights(self.actor.get_version())
        stats = self._evaluate("before") if self.cfg.evaluator.at_start and not step else {}
        if stats:
            self.ctx.log_stats(0, stats, total_steps=total)
        stopping.work_begins()
        while step < total and not self._out_of_time():
            try:
                with self.ctx.profiler.step(step + 1):
                    stats = self.step(step)
            except StopRequested:  # on every rank, while the batch was waited for
                return self._stop(step)
            step += 1
            epoch, ended = -(-step // per_epoch), step % per_epoch == 0
            stop = self.ctx.wish_to_stop()
            if not stop:
                with self.timers.phase("save"):
                    self.saver.maybe_save(step=step, epoch=epoch, epoch_ended=ended)
            last = step == total or self._out_of_time()
            if last and self.cfg.evaluator.at_end and not stop:
                stats |= self._evaluate("after")
            elif not stop and self.eval_freq.due(step=step, epoch=epoch, epoch_ended=ended):
                stats |= self._evaluate(None)
            self.ctx.log_stats(step, stats | self.timers.export(), total_steps=total)
            if stop:
                return self._stop(step)
            with self.timers.phase("recover"):
                self.recovery.maybe_save(
                    self._state, step=step, epoch=epoch, epoch_ended=ended, last=last
                )
            if last:
                break
        if total:
            self.saver.save_final()

    def _stop(self, step: int) -> None:
        """Ends after `step` steps because of a signal, with a checkpoint of them."""
        epoch = -(-step // self.spec.steps_per_epoch)
        self.ctx.stop(self.recovery.save_now(self._state, step=step, epoch=epoch), step)

    def next_batch(self) -> Batch:
        """Rank 0's next batch, on every rank; StopRequested where a signal came while rank 0 waited
        for it."""
        batch: Batch | None = self.ctx.on_rank_zero(self._next_batch)
        if batch is None:
            raise StopRequested
        return batch

    def step(self, step: int) -> dict[str, float]:
        """One step of GRPO."""
        self.check.begin_step(step + 1)
        with self.timers.phase("step"):
            with self.timers.phase("rollout"):
                batch = self.next_batch()
            self.check.has_trained_tokens(batch)
            stats = rollout_metrics(batch, version=self.actor.get_version())
            self.check.rewards_differ(stats)
            with self.timers.phase("logp"):
                self.actor.compute_prox_logp(batch)
            self.compare_with_ref(batch)
            self.actor.compute_advantages(batch)
            with self.timers.phase("train"):
                stats |= self.actor.ppo_update(batch)
                self.actor.step_lr_scheduler()
            stats |= self.publish(batch, step + 1)
        return stats

    def compare_with_ref(self, batch: Batch) -> None:
        if self.ref is None:
            return
        with self.timers.phase("ref"):
            batch["ref_logp"] = self.ref.compute_logp(batch)
        self.check.actor_equals_ref(batch, self.actor, self.ref)

    def publish(self, batch: Batch, version: int) -> dict[str, float]:
        """After the update: its metrics, and the new weights on every server."""
        stats = self.speed(batch) | self.ctx.on_rank_zero(self._account, batch)
        with self.timers.phase("update_weights"):
            return stats | self.update_weights(version)

    def speed(self, batch: Batch) -> dict[str, float]:
        """Of the phase "train" of this step, which was the actor's."""
        return update_speed(
            self.actor.engine,
            batch,
            seconds=self.timers.seconds()["train"],
            peak_tflops=self.cfg.profiler.peak_tflops,
        )

    def update_weights(self, version: int) -> dict[str, float]:
        """The new weights to every server, and the version everywhere. Where servers are lost on
        the way, all over again to the others: they hold a mixture until then, and are paused.
        """
        begun = time.monotonic()
        addresses = self.ctx.on_rank_zero(self._pause)
        seconds = {"weight_sync/pause_s": time.monotonic() - begun}
        while True:
            meta = self._update_meta(version, addresses)
            try:
                stats = self.actor.upload_weights(meta)
                break
            except ServersLost as e:  # the same on every rank
                addresses = self.ctx.on_rank_zero(self._go_on_without, e.servers)
        begun = time.monotonic()
        self.ctx.on_rank_zero(self._resume, meta)
        seconds["weight_sync/resume_s"] = time.monotonic() - begun
        self.actor.set_version(version)
        self._synced = True
        return stats | seconds

    def _update_meta(self, version: int, addresses: tuple[str, ...]) -> WeightUpdateMeta:
        sync = self.cfg.weight_sync
        return WeightUpdateMeta(
            type=sync.type,
            version=version,
            addresses=addresses,
            path=str(self.ctx.run_dir / "weights"),
            bucket_bytes=sync.bucket_mb << 20,
            flattened=sync.flattened,
            delta=sync.delta,
            delta_on_host=sync.delta_on_host,
            quantization=sync.quantization,
            timeout=sync.timeout,
            server_timeout=sync.server_timeout,
            verify="full" if sync.verify == "sample" and not self._synced else sync.verify,
            owners=sync.owners,
        )

    def end_generation(self) -> None:
        if self.generation is None:
            return
        try:
            self.ctx.final_counters = self.generation.counters()
        finally:
            self.generation.close()

    def destroy(self) -> None:
        if self.ref is not None:
            self.ref.destroy()
        self.actor.destroy()

    # rank 0 only, called through ctx.on_rank_zero
    def _next_batch(self) -> Batch | None:
        assert self.generation is not None
        try:
            return None if stopping.wish() else self.generation.next_batch()
        except StopRequested:
            return None

    def _account(self, batch: Batch) -> dict[str, float]:
        assert self.generation is not None
        return self.generation.account(batch)

    def _pause(self) -> tuple[str, ...]:
        """The servers that paused; those that did not answer have been dropped."""
        assert self.generation is not None
        self.generation.client.pause()
        return tuple(self.generation.client.addresses)

    def _go_on_without(self, lost: dict[str, str]) -> tuple[str, ...]:
        assert self.generation is not None
        self.generation.client.drop_servers(lost)
        return tuple(self.generation.client.addresses)

    def _resume(self, meta: WeightUpdateMeta) -> None:
        assert self.generation is not None
        arrival = self.generation.client.update_weights(meta)
        arrival.result(timeout=2 * meta.timeout)  # its own bound, meta.timeout, comes first
        self.generation.client.resume()

    def _state(self) -> dict[str, Any]:
        assert self.generation is not None
        return self.generation.state_dict()

    def _load_state(self, state: dict[str, Any]) -> None:
        assert self.generation is not None
        self.generation.load_state_dict(state)

    def _evaluate(self, when: str | None) -> dict[str, float]:
        with self.timers.phase("eval"):
            return self.ctx.on_rank_zero(self._evaluate_on_zero, when)

    def _evaluate_on_zero(self, when: str | None) -> dict[str, float]:
        assert self.generation is not None
        if self.generation.evaluator is None:
            return {}
        try:
            return self.generation.evaluator.evaluate(self.ctx.run_dir / "samples.jsonl", when)
        except StopRequested:  # the loop looks for itself, where all ranks agree
            return {}

    def _out_of_time(self) -> bool:
        bound = self.cfg.max_train_seconds
        return bound is not None and self.ctx.elapsed() >= bound
