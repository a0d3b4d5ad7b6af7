"""A role plays an algorithm's part on an injected TrainEngine: what all have in common, models that
are not trained (the KL term's reference, a student's teacher, a reward model), the critic of PPO,
and supervised fine-tuning. The policy's role is in actor.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.algos.batches import counts_of_one, mean_metrics, minibatches
from megarl.algos.checks import no_trained_token
from megarl.algos.losses import LOSS_WEIGHTS, critic_loss, sft_loss, token_weight
from megarl.algos.metrics import explained_variance
from megarl.algos.rows import Data, as_batch, only, put, refuse_branches, trained_tokens
from megarl.api.batch import Batch, Tokens
from megarl.api.context import CONTEXT_FAILED, in_context, out_of_context
from megarl.api.engine import PARTS, LossFn, LossWeightFn, PendingSave, TrainEngine
from megarl.api.records import FinetuneSpec, SaveLoadMeta, WeightUpdateMeta
from megarl.config.algo import PPOCriticConfig, RefConfig, ValueModelConfig
from megarl.config.check_parts import check_critic
from megarl.config.engine import TrainEngineConfig
from megarl.config.foreign_names import AnswersForeignNames
from megarl.observability.logging import get_logger, warn_on_rank_zero
from megarl.parallel.packing import split_minibatches

P = ParamSpec("P")
R = TypeVar("R", bound="Role")
T = TypeVar("T")


class UpdateCheck(Protocol):
    """Looks at every update of a role, see trainer/self_check.py."""

    def train_batch(
        self, engine: Any, data: Data, loss_fn: LossFn, weight_fn: LossWeightFn, **kw: Any
    ) -> dict[str, float]:
        """Makes one optimizer step of `engine`, or refuses it."""


def among_its_ranks(verb: Callable[Concatenate[R, P], T]) -> Callable[Concatenate[R, P], T]:
    """Has a role's verb know of no other ranks than those of the role's engine. Verbs need it that
    make a Batch of a plain dict: else it would be of all ranks, whose agreement is waited for."""

    @wraps(verb)
    def run(self: R, *args: P.args, **kw: P.kwargs) -> T:
        with self.engine.scope():
            return verb(self, *args, **kw)

    return run


class Role(AnswersForeignNames):
    """Passes the engine's verbs through, so that a training script speaks of roles only."""

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine
        self.update_check: UpdateCheck | None = None

    def train_batch(
        self, data: Data, loss_fn: LossFn, weight_fn: LossWeightFn, **kw: Any
    ) -> dict[str, float]:
        """Makes one optimizer step (TrainEngine.train_batch), under `update_check` if it is set."""
        if self.update_check is None:
            return self.engine.train_batch(data, loss_fn, weight_fn, **kw)
        return self.update_check.train_batch(self.engine, data, loss_fn, weight_fn, **kw)

    def forward(
        self,
        data: Data,
        outputs: Sequence[str],
        temperature: float = 1.0,
        *,
        also: Sequence[str] = (),
    ) -> Any:
        """Returns engine.forward's outputs. It is given the tokens, and the fields `also`: routes
        that the batch holds are for the actor's passes, not for another model's.
        """
        if isinstance(data, Batch):
            self.engine.place(data)
        names = ("input_ids", "attention_mask", *also)
        data = only(data, [name for name in names if name in data])
        return self.engine.forward(data, outputs=outputs, temperature=temperature)

    @among_its_ranks
    def forward_values(self, data: Data) -> tuple[Tokens, Tensor]:
        """Returns a value model's v(state before x_t), 0 at t=0, and v(state after the last token)
        [B], 0 for empty sequences.

        The model says about x_t what it reads off the token before. So one more token after every
        sequence, any id, makes the last state the one before it.
        """
        batch = as_batch(data)
        if isinstance(data, Batch):
            self.engine.place(batch)
        longer = _one_token_longer(batch)
        inputs = longer if isinstance(data, Batch) else longer.padded(names=["input_ids"])
        values = self.engine.forward(inputs, outputs=("values",))
        if not isinstance(values, Tokens):
            values = Tokens.from_padded(values, longer.lengths)
        ends = values.lengths.cumsum(0) - 1
        inside = torch.ones(len(values.values), dtype=torch.bool)
        inside[ends] = False
        return Tokens(values.values[inside], values.lengths - 1), batch.gather(values.values[ends])

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Initializes the engine; `ft_spec` gives the length of its learning-rate schedule.
        Collective."""
        self.engine.initialize(addr, ft_spec)

    def destroy(self) -> None:
        """Destroys the engine. Collective."""
        self.engine.destroy()

    @property
    def device(self) -> torch.device:
        """Returns the device on which this rank's engine computes."""
        return self.engine.device

    def eval(self) -> Self:
        """Switches the engine to evaluation; returns the role."""
        self.engine.eval()
        return self

    def eval_batch(
        self, data: Data, loss_fn: LossFn, weight_fn: LossWeightFn, **kw: Any
    ) -> dict[str, float]:
        """Returns the metrics of `loss_fn` without an update (TrainEngine.eval_batch)."""
        return self.engine.eval_batch(data, loss_fn, weight_fn, **kw)

    def step_lr_scheduler(self) -> None:
        """Moves the learning-rate schedule on, once per training step (not per mini-batch)."""
        self.engine.step_lr_scheduler()

    def set_version(self, version: int) -> None:
        """Sets the version of the engine's weights."""
        self.engine.set_version(version)

    def get_version(self) -> int:
        """Returns the version of the engine's weights."""
        return self.engine.get_version()

    def onload(self, parts: Sequence[str] = PARTS, *, behind: bool = False) -> dict[str, int]:
        """Brings `parts` of the engine's memory back to the device, with `behind` while the next
        pass runs; returns bytes by part, and in use before and after."""
        return self.engine.onload(parts, behind=behind)

    def offload(self, parts: Sequence[str] = PARTS) -> dict[str, int]:
        """Gives up the device memory of `parts`; returns bytes by part, and in use before and
        after."""
        return self.engine.offload(parts)

    def occupied(self) -> dict[str, int]:
        """Returns the bytes of each part of the engine's memory that are on the device now."""
        return self.engine.occupied()

    def upload_weights(self, meta: WeightUpdateMeta) -> dict[str, float]:
        """Sends the weights to the servers of `meta`; returns phases (s) and bytes. Collective."""
        return self.engine.upload_weights(meta)

    def save(self, meta: SaveLoadMeta) -> None:
        """Writes weights or training state to meta.path. Collective."""
        self.engine.save(meta)

    def begin_save(self, meta: SaveLoadMeta) -> PendingSave:
        """Begins a save; nothing is at meta.path before the result's `finish`. Collective."""
        return self.engine.begin_save(meta)

    def load(self, meta: SaveLoadMeta) -> None:
        """Loads what was saved at meta.path. Collective."""
        self.engine.load(meta)

    def get_scheduling_config(self) -> dict[str, Any]:
        """Returns what a launcher needs to place the engine's processes."""
        return self.engine.get_scheduling_config()


def _one_token_longer(batch: Batch) -> Batch:
    """Returns the ids of the batch with a token 0 more after every row, held by the same ranks."""
    ids = batch["input_ids"]
    rows = ids.pieces(torch.arange(len(ids.lengths)))
    longer = torch.cat([ids.values[:0], *(F.pad(row, (0, 1)) for row in rows)])
    return batch.with_ids(longer, batch.lengths + 1)


# what a teacher says of a batch, by the name of the engine's output; k = lm_head_topk
NAMED = {
    "given_ids": "topk_ids",
    "teacher_logprobs": "topk_logprobs",
    "teacher_tail": "topk_tail",
}


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
        temperature = self.temperature if temperature is None else temperature
        return self.forward(batch, ("logprobs",), temperature)


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

    @among_its_ranks
    def teach(self, batch: Data, *, top: bool = True) -> Tensor:
        """Adds batch["teacher_logp"] [B,S], the logprobs of the batch's tokens, 0 at t=0; and with
        `top` of each position the k likeliest tokens, "given_ids" [B,S,k] int32, their
        "teacher_logprobs" [B,S,k], and "teacher_tail" [B,S], the log of the probability of all
        others. A batch with contexts (api.context) is read below them, and its prompts get padding.
        Returns which samples have failed, [B] bool, whose fields are not to be used. Raises
        ValueError for a k above the vocabulary. Collective."""
        names = {"teacher_logp": "logprobs", **(NAMED if top else {})}
        whole = as_batch(batch)
        if isinstance(batch, Batch):
            self.engine.place(batch)
        read = in_context(whole)
        inputs = read if isinstance(batch, Batch) else read.padded(names=["input_ids"])
        computed = self.forward(inputs, tuple(names.values()), self.temperature)
        for name, output in names.items():
            values = computed if len(names) == 1 else computed[output]
            if not isinstance(values, Tokens):
                values = Tokens.from_padded(values, read.lengths)
            values = out_of_context(whole, name, values)
            if name == "given_ids":
                values = Tokens(values.values.int(), values.lengths)
            put(batch, name, values)
        return whole.get(CONTEXT_FAILED, torch.zeros(len(whole), dtype=torch.bool))


class RewardModel(Role):
    """Scores answers by a value model whose score at the last token is the reward, as in HF's
    ForSequenceClassification."""

    def __init__(self, config: ValueModelConfig, engine: TrainEngine) -> None:
        """Takes the model's section and its engine."""
        super().__init__(engine)
        self.config = config

    def compute_rewards(self, batch: Data) -> Tensor:
        """Returns the scores of the sequences, [B]."""
        return self.forward_values(batch)[1]


_VALUED = ("input_ids", "attention_mask", "loss_mask", "values", "returns")


class Critic(Role):
    """Trains the value function. One training step in verbs:

    critic.compute_values(batch)
    actor.compute_gae(batch, ...)       # advantages and returns
    stats = critic.ppo_update(batch)
    critic.step_lr_scheduler()
    """

    def __init__(self, config: PPOCriticConfig, engine: TrainEngine, *, seed: int = 0) -> None:
        """Takes the critic's section and its engine. seed: of the order of mini-batches."""
        super().__init__(engine)
        check_critic(config)
        self.config, self.seed = config, seed
        self._weight = LOSS_WEIGHTS[config.loss_agg]
        self._loss = partial(
            critic_loss,
            value_clip=config.value_clip,
            huber=config.value_huber,
            loss_agg=config.loss_agg,
        )

    def compute_values(self, batch: Data) -> None:
        """Adds batch["values"] [B,S], v(state before x_t), and batch["last_value"] [B]. Raises
        ValueError for rollouts of several rows."""
        refuse_branches(batch, "compute_values")
        values, batch["last_value"] = self.forward_values(batch)
        put(batch, "values", values)

    @among_its_ranks
    def ppo_update(self, batch: Data) -> dict[str, float]:
        """Makes ppo_n_minibatches optimizer steps towards batch["returns"] [B,S]; returns metrics
        averaged over them, and explained_variance of the values before the update. Raises
        ValueError for a missing field, or a batch without a trained token."""
        if missing := [key for key in _VALUED if key != "attention_mask" and key not in batch]:
            raise ValueError(
                f"ppo_update: the batch has no {missing[0]!r}: call critic.compute_values(batch) "
                "and actor.compute_gae(batch) first"
            )
        whole = as_batch(batch)
        explained = explained_variance(whole)
        seed = self.seed * 1_000_003 + self.engine.get_version()
        parts = split_minibatches(whole.unit_ids, self.config.ppo_n_minibatches, seed=seed)
        updates = [
            self.train_batch(minibatch, self._loss, self._weight, outputs=("values",))
            for _, minibatch in minibatches(batch, _VALUED, parts, trained_tokens(whole))
        ]
        return mean_metrics(updates) | {"explained_variance": explained}


_SFT_INPUTS = ("input_ids", "attention_mask", "loss_mask")

log = get_logger(__name__)


class SFT(Role):
    """Trains next-token prediction; needs input_ids, attention_mask and loss_mask, all [B,S]."""

    def __init__(self, config: TrainEngineConfig, engine: TrainEngine) -> None:
        super().__init__(engine)
        self.config = config
        self._told_of_untrained = False

    def train(self, batch: Data) -> dict[str, float]:
        """Makes one optimizer step; returns the engine's metrics (loss, grad_norm, lr), ppl and
        skipped_updates (1 if the step was refused because something was not finite; then there is
        no ppl), with skipped_sequences and skipped_tokens. Raises ValueError for a batch without a
        trained token."""
        inputs, trained = self._inputs(batch)
        stats = self.train_batch(inputs, sft_loss, token_weight)
        figures = _with_ppl(stats) if stats["update_successful"] else stats
        return figures | counts_of_one(stats, trained)

    def evaluate(self, batch: Data) -> dict[str, float]:
        """Returns loss, ppl, token_accuracy and exact_match: the share of sequences whose every
        trained token is the argmax. Raises ValueError for a batch without a trained token."""
        return _with_ppl(
            self.engine.eval_batch(
                self._inputs(batch)[0], sft_loss, token_weight, outputs=("logprobs", "greedy_match")
            )
        )

    @among_its_ranks
    def _inputs(self, batch: Data) -> tuple[Data, Tensor]:
        """Returns what the loss needs, and the trained tokens of every row [B]. Raises ValueError
        for a batch without a trained token; warns, once, of single rows without."""
        trained = trained_tokens(as_batch(batch))
        if finding := no_trained_token(trained, "SFT batch"):
            if not trained.any():
                raise ValueError(f"{finding}: there is nothing to train on")
            if not self._told_of_untrained:
                self._told_of_untrained = True
                warn_on_rank_zero(log, "%s: nothing is learned from them", finding)
        return only(batch, _SFT_INPUTS), trained


def _with_ppl(stats: dict[str, float]) -> dict[str, float]:
    loss = stats["loss"]
    return stats | {"ppl": math.exp(loss) if loss < 700.0 else math.inf}
