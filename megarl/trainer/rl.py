"""The recipes with rollouts. `step` of each is the algorithm; everything above it is set-up."""

from __future__ import annotations

from typing import Any, ClassVar

from megarl.algos import Role
from megarl.algos.batches import PROX
from megarl.algos.specs import loss_of
from megarl.api.batch import Batch
from megarl.api.records import FinetuneSpec
from megarl.config.algo import GAEConfig
from megarl.config.recipe_engines import saved_engines
from megarl.config.recipes import DistillConfig, GRPOConfig, PPOConfig
from megarl.models.hf_config import read_hf_config
from megarl.observability.logging import get_logger
from megarl.observability.stats_tracker import record_timing
from megarl.rollout.teacher import ServerTeacher
from megarl.trainer.context import RunContext
from megarl.trainer.evaluation import SAMPLES_FILE
from megarl.trainer.loop import Trainer
from megarl.trainer.preflight import check_teacher_servers
from megarl.trainer.roles import (
    MegatronLoRARef,
    MegatronRef,
    MegatronRewardModel,
    MegatronTeacher,
    make_actor,
    make_critic,
    make_ref,
    make_teacher,
)
from megarl.trainer.rollout_metrics import rollout_metrics, trained_metrics
from megarl.trainer.self_check import SelfCheck
from megarl.trainer.session import RolloutSession
from megarl.trainer.step_recorder import StepRecorder
from megarl.trainer.turns import WeightPublisher, make_turns

log = get_logger(__name__)


def batch_plan(cfg: GRPOConfig, steps: int, world_size: int) -> str:
    """Returns the sizes of a run's batches in words."""
    prompts, actor = cfg.train_dataset.batch_size, cfg.actor
    samples, p = prompts * cfg.gconfig.n_samples, actor.parallel
    replicas = world_size // (p.tp * p.pp * p.cp)
    return (
        f"{steps} steps of {prompts} prompts x {cfg.gconfig.n_samples} samples = {samples} "
        f"sequences, in {actor.ppo_n_minibatches} update(s) of about "
        f"{samples / actor.ppo_n_minibatches:g}; {replicas} data-parallel rank(s) compute each in "
        f"micro-batches of at most {actor.mb_spec.max_tokens_per_mb} tokens a device"
    )


class RLTrainer(Trainer):
    """Trains a policy by GRPO or a relative: `step` is the algorithm, `set_up` makes what it works
    with."""

    cfg: GRPOConfig
    renamed: ClassVar[dict[str, str]] = {
        "reads_prox_logp": "leave it out; a step that does not read batch['prox_logp'] before "
        "the update says so by self.compute_prox_logp(batch, read=False)"
    }

    def __init__(self, cfg: GRPOConfig, ctx: RunContext) -> None:
        super().__init__(cfg, ctx)
        self._reason: str | None = None  # for a pass before the update, as the log has it
        self.session = self.make_session()
        self.step_recorder = self.trainers.make(
            StepRecorder, cfg, self.trainers.ctx, dataset_size=self.session.dataset_size
        )
        self.session.step_recorder = self.step_recorder

    def set_up(self) -> None:
        """Waits for the servers, makes the roles and the saver, and continues from the newest
        checkpoint. Collective."""
        cfg, trainers = self.cfg, self.trainers
        self.session.start()
        turns = self.session.turns = make_turns(cfg, self.session.client)
        self.spec = FinetuneSpec.for_run(cfg, dataset_size=self.session.dataset_size)
        self.set_up_models()
        self.publisher = self.make_publisher()
        self.check = trainers.make(SelfCheck, cfg, trainers.ctx)
        recomputed = PROX if cfg.actor.old_logp == PROX else None
        self.check.watch(self.actor, first_ratio_to=recomputed)
        trained: dict[str, Role] = {"actor": self.actor, **self.set_up_others()}
        turns.models += trained.values()
        self.record_updates(trained)
        followers: dict[str, Role] = {}
        if self.ref is not None and "ref" in saved_engines(cfg):
            followers["ref"] = self.ref
        self.go_on(trained, followers, turns.saving)

    def set_up_models(self) -> None:
        """Makes the actor and, where there is to be one, the reference and the reward model."""
        cfg, trainers = self.cfg, self.trainers
        self.actor = trainers.make(make_actor, cfg, trainers.tokenizer)
        self.actor.initialize(None, self.spec)
        self.ref: MegatronRef | MegatronLoRARef | None = None
        if cfg.ref is not None:
            self.ref = trainers.make(make_ref, cfg, self.actor)
        self.reward_model: MegatronRewardModel | None = None
        if cfg.reward_model is not None:
            self.reward_model = trainers.make(MegatronRewardModel, cfg.reward_model, seed=cfg.seed)
            self.reward_model.initialize(None, None)

    def record_updates(self, trained: dict[str, Role]) -> None:
        """Has the updates of the trained roles recorded."""
        self.step_recorder.watch(trained)

    def make_session(self) -> RolloutSession:
        """Returns what generates the batches. Collective."""
        rollout = self.ctx.rollout
        return RolloutSession(self.cfg, rollout.tokenizer, rollout)

    def make_publisher(self) -> WeightPublisher:
        """Returns what brings the actor's weights to the servers."""
        path, session = self.ctx.run_dir / "weights", self.session
        sync = self.cfg.weight_sync
        return WeightPublisher(self.actor, session.client, sync, path=path, turns=session.turns)

    def set_up_others(self) -> dict[str, Role]:
        """Makes the further roles of a subclass's algorithm, and returns by name those that are
        trained."""
        return {}

    def begin(self, step: int) -> None:
        """Brings the weights after `step` steps to the servers. Collective."""
        total = self.spec.total_train_steps
        log.info("%s", batch_plan(self.cfg, total, self.trainers.ctx.world_size))
        self.session.expect(total - step)
        # servers may hold anything: other weights, or those of an earlier run
        self.publisher.publish(self.actor.get_version())

    def evaluate(self, step: int, label: str) -> dict[str, float]:
        """Returns the metrics of answers to the validation sets. Collective."""
        return self.session.evaluate(self.ctx.run_dir / SAMPLES_FILE, label)

    def completions(self) -> dict[str, list[dict[str, Any]]]:
        """Returns the completions to log since the last call, rank 0's."""
        return self.session.completions()

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps beside the models. Rank 0 only."""
        return self.session.state_dict() | {"kl": self.actor.kl_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned. Collective."""
        self.session.load_state_dict(state)
        if "kl" in state:  # a checkpoint of a version without kl_controller has none
            self.actor.load_kl_state(state["kl"])

    def whole_step(self, step: int) -> dict[str, float]:
        """Makes step `step` (from 0), under the eyes of what checks, profiles and records it, and
        renews a reference that follows; returns its metrics. Raises StopRequested where a signal
        came while its batch was waited for. Collective."""
        self.check.begin_step(step + 1)
        self.step_recorder.begin_step(step + 1)
        with self.ctx.profiler.step(step + 1), record_timing("step"):
            stats = self.step(step)
            self.renew_ref(step + 1)
        self.step_recorder.end_step(self.session.addresses())
        return stats

    # --8<-- [start:step]
    def step(self, step: int) -> dict[str, float]:
        """Makes step `step` (from 0) of GRPO; returns its metrics."""
        with record_timing("rollout"):
            batch = self.session.prepare_batch()
        batch = self.score(batch)
        self.check.has_trained_tokens(batch)
        version = self.actor.get_version()
        stats = rollout_metrics(batch, version=version, limits=self.cfg.actor.reward_limits)
        self.check.rewards_differ(stats)
        with record_timing("logp"):
            self.compute_prox_logp(batch, read=False)
        self.compare_with_ref(batch)
        self.actor.compute_advantages(batch, kl_ctl=self.cfg.kl_ctl)
        with record_timing("train"):
            stats |= self.actor.ppo_update(batch)
            self.actor.step_lr_scheduler()
        stats |= trained_metrics(batch, version=version)
        stats |= self.session.account(batch)
        with record_timing("update_weights"):
            stats |= self.publisher.publish(step + 1)
        return stats | self.speed(batch)

    # --8<-- [end:step]

    def score(self, batch: Batch) -> Batch:
        """Returns the batch with the rewards of the reward model, where there is one, and without
        the samples that it gave no finite number.
        """
        if self.reward_model is None:
            return batch
        with record_timing("reward_model"):
            self.actor.place(batch)  # else it would lie as the reward model's layout wants it
            batch["rewards"] = self.reward_model.compute_rewards(batch)
            return self.session.drop(batch, ~batch["rewards"].isfinite(), "reward")

    def compute_prox_logp(self, batch: Batch, *, read: bool = True) -> None:
        """Adds batch["prox_logp"] [B,S], the logprobs before the update, where they need a pass of
        their own (actor.recompute_logprob); says in the log whether `auto` makes one, and why.
        read: whether the step itself reads them before the update. Collective."""
        reason = self.reason_for_pass(read=read)
        if self.cfg.actor.recompute_logprob == "auto" and reason != self._reason:
            self._reason = reason
            what = f"a pass before every update: {reason}" if reason else "the update's own pass"
            log.info("actor.recompute_logprob=auto: prox_logp comes from %s", what)
        if reason or self.cfg.actor.old_logp != PROX:
            return self.actor.compute_prox_logp(batch)
        self.actor.place(batch)
        self.check.look_before_update(batch, self.actor)

    def reason_for_pass(self, *, read: bool = True) -> str:
        """Returns why a step needs prox_logp before its update, "" where it does not; read: see
        compute_prox_logp."""
        if read:
            return f"{type(self).__name__}.step does not call compute_prox_logp(batch, read=False)"
        return self.actor.reason_for_pass(kl_ctl=self.cfg.kl_ctl)

    def compare_with_ref(self, batch: Batch) -> None:
        """Adds batch["ref_logp"] [B,S], the reference's logprobs, where there is a reference.
        Raises SelfCheckError where actor and reference should agree and do not."""
        if self.ref is not None:
            with record_timing("ref"):
                batch["ref_logp"] = self.ref.compute_logp(batch)
            self.check.actor_equals_ref(batch, self.actor, self.ref)

    def renew_ref(self, step: int) -> None:
        """Has a reference that follows the policy do so after training step `step`, from 1, where
        it is due. Collective."""
        if self.ref is not None and self.ref.is_due(step):
            with record_timing("renew_ref"):
                self.ref.renew(self.actor)

    def end_generation(self) -> None:
        """Ends what talks to servers; waits for no other rank."""
        try:
            self.ctx.final_counters = self.session.counters()
        finally:
            self.session.close()
            self.step_recorder.close()

    def destroy(self) -> None:
        """Destroys the roles. Collective."""
        for role in (self.reward_model, self.ref, self.actor):
            if role is not None:
                role.destroy()


class PPOTrainer(RLTrainer):
    """Trains a policy by PPO (arXiv 1707.06347): an RLTrainer with a critic as its second trained
    role."""

    cfg: PPOConfig

    def set_up_others(self) -> dict[str, Role]:
        """Makes the critic and the settings of its advantages; returns {"critic": the critic}.
        Collective."""
        cfg = self.cfg
        self.critic = self.ctx.trainers.make(make_critic, cfg)
        self.critic.initialize(None, self.spec)
        self.check.watch(self.critic)
        self.gae = gae_settings(cfg)
        return {"critic": self.critic}

    def step(self, step: int) -> dict[str, float]:
        """Makes step `step` (from 0) of PPO; returns its metrics."""
        with record_timing("rollout"):
            batch = self.session.prepare_batch()
        batch = self.score(batch)
        self.check.has_trained_tokens(batch)
        version = self.actor.get_version()
        stats = rollout_metrics(batch, version=version, limits=self.cfg.actor.reward_limits)
        self.check.rewards_differ(stats)
        with record_timing("logp"):
            self.compute_prox_logp(batch, read=False)
        self.compare_with_ref(batch)
        with record_timing("values"):
            self.critic.compute_values(batch)
        self.actor.compute_gae(batch, **self.gae)
        with record_timing("train_critic"):
            critic_stats = self.critic.ppo_update(batch)
            self.critic.step_lr_scheduler()
        stats |= {f"critic/{name}": value for name, value in critic_stats.items()}
        with record_timing("train"):
            stats |= self.actor.ppo_update(batch)
            self.actor.step_lr_scheduler()
        stats |= trained_metrics(batch, version=version)
        stats |= self.session.account(batch)
        with record_timing("update_weights"):
            stats |= self.publisher.publish(step + 1)
        self.critic.set_version(step + 1)
        return stats | self.speed(batch)

    def destroy(self) -> None:
        """Destroys the critic, then the other roles. Collective."""
        self.critic.destroy()
        super().destroy()


def gae_settings(cfg: PPOConfig) -> dict[str, Any]:
    """Returns what a recipe's actor.compute_gae takes beside the batch."""
    return dict(
        discount=cfg.discount,
        gae_lambda=cfg.gae_lambda,
        kl_ctl=cfg.kl_ctl,
        **vars(GAEConfig(**cfg.gae)),
    )


class DistillTrainer(RLTrainer):
    """Draws a student to its teacher (GKD, arXiv 2306.13649): an RLTrainer with a teacher as a
    further frozen role."""

    cfg: DistillConfig

    def set_up_others(self) -> dict[str, Role]:
        """Makes the teacher, or finds its servers; returns {}, for it is not trained. Raises
        ConfigError, on every rank, where a server does not answer or has another tokenizer.
        Collective."""
        # a MegatronTeacher or a ServerTeacher
        self.teacher: Any = self._servers() if self.cfg.teacher.addresses else self._engine()
        needs = loss_of(self.cfg.actor).needs
        self.wants_top, self.wants_advantages = "given_ids" in needs, "advantages" in needs
        return {}

    def _engine(self) -> MegatronTeacher:
        teacher = self.ctx.trainers.make(make_teacher, self.cfg)
        teacher.initialize(None, None)
        return teacher

    def _servers(self) -> ServerTeacher:
        teacher, actor = self.cfg.teacher, self.cfg.actor
        self.ctx.ranks.from_zero(lambda: check_teacher_servers(self.cfg))
        return self.ctx.trainers.make(
            ServerTeacher,
            teacher.addresses,
            top=teacher.lm_head_topk,
            vocab_size=read_hf_config(actor.path, override=actor.override_config).vocab_size,
            timeout=self.cfg.rollout.request_timeout,
            retry_timeout=self.cfg.rollout.retry_timeout,
        )

    def step(self, step: int) -> dict[str, float]:
        """Makes step `step` (from 0) of distillation; returns its metrics."""
        with record_timing("rollout"):
            batch = self.session.prepare_batch()
        with record_timing("teacher"):
            batch = self.ask_teacher(batch)
        batch = self.score(batch)
        self.check.has_trained_tokens(batch)
        version = self.actor.get_version()
        stats = rollout_metrics(batch, version=version, limits=self.cfg.actor.reward_limits)
        with record_timing("logp"):
            self.compute_prox_logp(batch, read=False)
        self.compare_with_ref(batch)
        if self.wants_advantages:
            self.actor.compute_advantages(batch, kl_ctl=self.cfg.kl_ctl)
        with record_timing("train"):
            stats |= self.actor.ppo_update(batch)
            self.actor.step_lr_scheduler()
        stats |= trained_metrics(batch, version=version)
        stats |= self.session.account(batch)
        with record_timing("update_weights"):
            stats |= self.publisher.publish(step + 1)
        return stats | self.speed(batch)

    def ask_teacher(self, batch: Batch) -> Batch:
        """Returns the batch with what the teacher says of it, as far as the actor's loss reads it,
        and without the samples that no server answered for, or whose context is too long."""
        of_servers = bool(self.cfg.teacher.addresses)
        if not of_servers:
            self.actor.place(batch)  # else it would lie as the teacher's layout wants it
        failed = self.teacher.teach(batch, top=self.wants_top)
        return self.session.drop(batch, failed, "server" if of_servers else "context")

    def destroy(self) -> None:
        """Destroys the teacher, then the other roles. Collective."""
        if not self.cfg.teacher.addresses:
            self.teacher.destroy()
        super().destroy()
