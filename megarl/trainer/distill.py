"""On-policy distillation (GKD, arXiv 2306.13649): RL's recipe with a teacher beside the policy."""

from __future__ import annotations

from typing import Any

from megarl.algos import Role
from megarl.algos.specs import loss_of
from megarl.api.batch import Batch
from megarl.config.recipes import DistillConfig
from megarl.models.hf_config import read_hf_config
from megarl.observability.stats_tracker import record_timing
from megarl.rollout.teacher import ServerTeacher
from megarl.trainer import rl
from megarl.trainer.preflight import check_teacher_servers
from megarl.trainer.roles import MegatronTeacher, make_teacher
from megarl.trainer.rollout_metrics import rollout_metrics, trained_metrics


class DistillTrainer(rl.RLTrainer):
    """Draws a student to its teacher: an RLTrainer with a teacher as a further frozen role."""

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
        self.ctx.on_rank_zero(lambda: check_teacher_servers(self.cfg))
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
        stats = rollout_metrics(batch, version=version)
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
        and without the samples that no server answered for."""
        if self.cfg.teacher.addresses:
            return self.session.drop(batch, self.teacher.teach(batch, top=self.wants_top), "server")
        self.actor.place(batch)  # else it would lie as the teacher's layout wants it
        self.teacher.teach(batch, top=self.wants_top)
        return batch

    def destroy(self) -> None:
        """Destroys the teacher, then the other roles. Collective."""
        if not self.cfg.teacher.addresses:
            self.teacher.destroy()
        super().destroy()
