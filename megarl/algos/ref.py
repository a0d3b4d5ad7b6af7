"""Models that are not trained: the KL term's reference, a student's teacher, a reward model."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from megarl.algos.role import Role
from megarl.algos.rows import Data, put
from megarl.api.batch import Tokens
from megarl.api.engine import TrainEngine
from megarl.config.algo import RefConfig
from megarl.config.engine import TrainEngineConfig

# what a teacher says of a batch, by the name of the engine's output; k = lm_head_topk
NAMED = {"teacher_logprobs": "topk_logprobs", "teacher_tail": "topk_tail"}


class Policy(Protocol):
    """Is a trained policy as a reference knows it."""

    config: Any
    engine: Any
    temperature: float


class Ref(Role):
    """Computes the logprobs of the policy that the KL term measures against. It is frozen, or
    follows the actor (`RefConfig`)."""

    def __init__(
        self, config: TrainEngineConfig, engine: TrainEngine, *, temperature: float
    ) -> None:
        """Takes a section and its engine. temperature: that of generation (gconfig.temperature), as
        the actor's."""
        super().__init__(engine)
        self.config = config
        self.temperature = temperature
        follows = config if isinstance(config, RefConfig) else RefConfig()
        self._every, self._keep = follows.renewed_every, follows.ema

    def is_due(self, step: int) -> bool:
        """Returns whether the reference takes over weights after training step `step`, from 1."""
        return self._every is not None and step % self._every == 0

    def renew(self, actor: Role) -> None:
        """Takes over the actor's weights, or blends them in (ref.ema). Collective."""
        self.engine.copy_weights(actor.engine, keep=self._keep)

    def compute_logp(self, batch: Data, temperature: float | None = None) -> Any:
        """Returns log-probabilities, 0 at t=0: Tokens for a Batch, [B,S] for a plain dict.
        temperature: None is the actor's sampling temperature."""
        return self.forward_logp(batch, self.temperature if temperature is None else temperature)


class LoRARef(Ref):
    """Computes the reference of a policy that trains adapters, in the policy's engine with them
    off, so that there is no second model in memory. The engine begins and ends with the policy."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.config, policy.engine, temperature=policy.temperature)

    def compute_logp(self, batch: Data, temperature: float | None = None) -> Any:
        """Returns log-probabilities of the policy below the adapters, as Ref.compute_logp does."""
        with self.engine.disable_adapter():
            return super().compute_logp(batch, temperature)

    def destroy(self) -> None:
        """Does nothing: the engine is the policy's."""


class Teacher(Ref):
    """Computes what a frozen policy thinks of a batch's tokens, and of what it would have said."""

    def teach(self, batch: Data, *, top: bool = True) -> None:
        """Adds batch["teacher_logp"] [B,S], the logprobs of the batch's tokens, 0 at t=0; and with
        `top` of each position the k likeliest tokens, "given_ids" [B,S,k] int32, their
        "teacher_logprobs" [B,S,k], and "teacher_tail" [B,S], the log of the probability of all
        others. Raises ValueError for a k above the vocabulary. Collective."""
        outputs = ("logprobs", *(("topk_ids", *NAMED.values()) if top else ()))
        computed = self.forward(batch, outputs, self.temperature)
        if not top:
            put(batch, "teacher_logp", computed)
            return
        put(batch, "teacher_logp", computed["logprobs"])
        for name, output in NAMED.items():
            put(batch, name, computed[output])
        ids = computed["topk_ids"]
        ids = Tokens(ids.values.int(), ids.lengths) if isinstance(ids, Tokens) else ids.int()
        put(batch, "given_ids", ids)


class RewardModel(Role):
    """Scores answers by a value model whose score at the last token is the reward, as in HF's
    ForSequenceClassification."""

    def compute_rewards(self, batch: Data) -> Tensor:
        """Returns the scores of the sequences, [B]."""
        return self.forward_values(batch)[1]
