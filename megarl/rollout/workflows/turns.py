"""TurnsWorkflow has what workflows of many turns share: each sample goes its own way after the
first answer, within bounds, and ends scored or failed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Unpack

from megarl.api.batch import Padded
from megarl.api.inference import InferenceEngine
from megarl.config.rollout import GenerationHyperparameters
from megarl.observability.logging import get_logger
from megarl.rollout.chat import ChatOptions, ChatWorkflow, all_of
from megarl.rollout.trajectory import Trajectory, to_batch

log = get_logger(__name__)

Row = dict[str, Any]


class TurnOptions(ChatOptions, total=False):
    """Declares the options of workflows of several turns.

    max_turns: the most answers of one sample.
    turn_discount: what an answer earns is multiplied by turn_discount ** (answers before it).
    max_length: the most tokens of one sample, prompt included; a sample without room for another
    answer (gconfig.max_new_tokens) ends. None is no bound: a request that does not fit the servers'
    context is then an error.
    """

    max_turns: int
    turn_discount: float
    max_length: int | None


class TurnsWorkflow(ChatWorkflow):
    """Bounds the turns of samples, and scores them. A subclass writes `arun_episode` with
    `may_go_on`, `failed` and `finish` beside ChatWorkflow's parts, and has `usual_turns` where
    max_turns is left out. The options: see TurnOptions."""

    usual_turns = 2

    def __init__(
        self,
        reward_fn: Callable[..., float],
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        *,
        max_turns: int | None = None,
        turn_discount: float = 1.0,
        max_length: int | None = None,
        **common: Unpack[ChatOptions],
    ) -> None:
        super().__init__(reward_fn, gconfig, tokenizer, **common)
        max_turns = self.usual_turns if max_turns is None else max_turns
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns}: use at least 1")
        if not 0 <= turn_discount <= 1:
            raise ValueError(f"turn_discount={turn_discount}: use a number from 0 to 1")
        if max_length is not None and max_length <= gconfig.max_new_tokens:
            raise ValueError(
                f"max_length={max_length} has no room for a prompt and an answer of "
                f"gconfig.max_new_tokens={gconfig.max_new_tokens}; raise it"
            )
        self.max_turns, self.turn_discount, self.max_length = max_turns, turn_discount, max_length

    async def first_answers(
        self, engine: InferenceEngine, samples: list[Trajectory], data: Row
    ) -> None:
        """Has the policy write the first answer of the samples that did not fail, in one request:
        they share their prompt."""
        await self.generate(engine, [s for s in samples if s.failure is None], data)

    def may_go_on(self, sample: Trajectory) -> bool:
        """Returns whether the sample may have another answer: its last one came to its end, and
        there is room for a turn and for tokens."""
        if sample.answers and sample.answers[-1].stop_reason == "length":
            return False
        return len(sample.answers) < self.max_turns and self.has_room(sample)

    def has_room(self, sample: Trajectory) -> bool:
        """Returns whether an answer fits max_length."""
        need = len(sample.tokens) + self.gconfig.max_new_tokens
        return self.max_length is None or need <= self.max_length

    def failed(self, sample: Trajectory, kind: str, error: BaseException, data: Row) -> None:
        """Notes that something of `kind` (api.inference.FAILURES) failed, and logs what."""
        sample.fail(kind)
        log.warning(
            "row %s: sample %d failed (%s): %s: %s",
            *(data.get("row_id", "?"), sample.index, kind, type(error).__name__, error),
        )

    async def finish(
        self, samples: list[Trajectory], data: Row, *, scored: Collection[Trajectory] = ()
    ) -> Padded:
        """Scores the samples that neither failed nor are `scored`, and returns the batch."""
        open_ = [s for s in samples if s.failure is None and s not in scored]
        await all_of(self.score_one(sample, data) for sample in open_)
        return to_batch(samples)

    async def score_one(self, sample: Trajectory, data: Row) -> float:
        """Returns the reward of the sample's last answer, and notes it as the sample's outcome. The
        reward gets the `conversation` beside the row's columns."""
        reward: float
        (reward,) = await self.score([sample], data | {"conversation": self.conversation(sample)})
        sample.score(reward, discount=self.turn_discount)
        return reward

    def conversation(self, sample: Trajectory) -> list[dict[str, Any]]:
        """Returns the messages up to now, the last answer included."""
        if sample.head.response is None:  # something was told after it
            return list(sample.messages)
        last = {"role": "assistant", "content": self.text(sample.answers[-1])}
        return [*sample.messages, last]
