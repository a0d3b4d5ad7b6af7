"""MultiTurnWorkflow has somebody answer the policy: by default, who says that it was wrong and lets
it try again; or an interaction of your own, such as a simulated user."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

from megarl.api.batch import Padded
from megarl.api.inference import InferenceEngine
from megarl.config.rollout import GenerationHyperparameters
from megarl.rollout.chat import all_of
from megarl.rollout.closing import closing
from megarl.rollout.trajectory import Trajectory
from megarl.rollout.user_calls import ThreadsExhausted, call
from megarl.rollout.workflows.turns import Row, TurnOptions, TurnsWorkflow
from megarl.utils.importing import load_object, option_problems

FEEDBACK = "That is not right. Try again."
INTERACTION_TIMEOUT = 60.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Holds what an interaction says to an answer: the text of the next message, whether the
    conversation is over, and what the answer earned by itself."""

    text: str = ""
    done: bool = False
    reward: float = 0.0


class Interaction(ABC):
    """Answers the policy in the user's place. An instance belongs to one sample. What a method
    raises fails the sample ("environment"), and so does one that takes too long."""

    async def start(self, row: Row) -> str | None:
        """Begins a conversation about a row of the data. Returns the first message to the policy,
        behind the row's, or None where the row has all of them."""
        return None

    @abstractmethod
    async def respond(self, messages: list[dict[str, Any]], row: Row) -> Reply:
        """Returns the reply to the last of `messages`, the policy's."""

    async def aclose(self) -> None:
        """Releases everything. It is called once, on success, failure, cancellation and time-out,
        also after a `start` that failed."""
        return


class MultiTurnWorkflow(TurnsWorkflow):
    """Lets the policy answer up to max_turns times. Without an interaction it goes on while the
    reward of its last answer is below `solved`, and hears `feedback`; the outcome is the last
    answer's reward.

    interaction: "pkg.module:Class", a subclass of Interaction, made with interaction_options for
    every sample. Its replies may bring rewards, which are added to the outcome, reward_fn's for the
    last answer (use the reward `none` where there is no other).
    interaction_timeout: seconds that one reply may take; None leaves the bound to the interaction.
    """

    def __init__(
        self,
        reward_fn: Callable[..., float],
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        *,
        feedback: str = FEEDBACK,
        solved: float = 1.0,
        interaction: str = "",
        interaction_options: dict[str, Any] | None = None,
        interaction_timeout: float | None = INTERACTION_TIMEOUT,
        **common: Unpack[TurnOptions],
    ) -> None:
        super().__init__(reward_fn, gconfig, tokenizer, **common)
        self.feedback, self.solved, self.timeout = feedback, solved, interaction_timeout
        self._partner: Callable[[], Interaction] | None = None
        if interaction:
            problems = class_problems(
                interaction, Interaction, interaction_options, what="interaction"
            )
            if problem := next(problems, None):
                raise ValueError(problem)
            make, options = load_object(interaction, what="interaction"), interaction_options or {}
            self._partner = lambda: make(**options)

    @classmethod
    def check_options(
        cls,
        *,
        interaction: str = "",
        interaction_options: dict[str, Any] | None = None,
        **others: Any,
    ) -> Iterator[str]:
        """Yields what is wrong with the options, before anything starts."""
        if interaction:
            yield from class_problems(
                interaction, Interaction, interaction_options, what="interaction"
            )

    async def arun_episode(self, engine: InferenceEngine, data: Row) -> Padded:
        """Returns a padded batch [n,S], n = gconfig.n_samples, by trajectory.to_batch. Samples
        whose interaction failed are not valid."""
        if self._partner is None:
            samples = self.begin(data)
            await self.first_answers(engine, samples, data)
            await all_of(self._try_again(engine, sample, data) for sample in samples)
            return await self.finish(samples, data, scored=samples)
        partners = [self._partner() for _ in range(self.count(data))]
        async with closing(partners):
            samples, data = await self._begin_with(partners, data)
            await self.first_answers(engine, samples, data)
            await all_of(
                self._converse(engine, sample, partner, data)
                for sample, partner in zip(samples, partners, strict=True)
            )
        return await self.finish(samples, data)

    async def _try_again(self, engine: InferenceEngine, sample: Trajectory, data: Row) -> None:
        while await self.score_one(sample, data) < self.solved and self.may_go_on(sample):
            if not await self._go_on(engine, sample, self.feedback, data):
                return

    async def _converse(
        self, engine: InferenceEngine, sample: Trajectory, partner: Interaction, data: Row
    ) -> None:
        while sample.failure is None:
            reply = await self._bounded(partial(partner.respond, self.conversation(sample), data))
            if isinstance(reply, Exception):
                self.failed(sample, "environment", reply, data)
                return
            sample.head.reward += reply.reward
            if reply.done or not self.may_go_on(sample):
                return
            if not await self._go_on(engine, sample, reply.text, data):
                return

    async def _go_on(
        self, engine: InferenceEngine, sample: Trajectory, said: str, data: Row
    ) -> bool:
        """Has the sample hear `said` and the policy answer; returns whether there was room."""
        self.tell(sample, said)
        if not self.has_room(sample):
            return False
        await self.generate(engine, [sample], data)
        return True

    async def _begin_with(
        self, partners: Sequence[Interaction], data: Row
    ) -> tuple[list[Trajectory], Row]:
        """Returns the samples after their partners' first message, if there is one, and the row
        with it. Raises ValueError where they differ: the samples of a row share their prompt."""
        starts = await all_of(self._bounded(partial(partner.start, data)) for partner in partners)
        firsts = {start for start in starts if not isinstance(start, Exception)}
        if len(firsts) > 1:
            raise ValueError(
                f"row {data.get('row_id', '?')}: the interactions of one row begin with different "
                "messages; let the row decide how they begin, for instance by a seed in it"
            )
        if (first := firsts.pop() if firsts else None) is not None:
            data = {k: v for k, v in data.items() if k not in ("prompt", "prompt_ids")}
            data["messages"] = [*data["messages"], {"role": "user", "content": first}]
        samples = self.begin(data)
        for sample, start in zip(samples, starts, strict=True):
            if isinstance(start, Exception):
                self.failed(sample, "environment", start, data)
        return samples, data

    async def _bounded(self, reply: Callable[[], Any]) -> Any:
        """Returns what was awaited, or the error that it ended with. Raises ThreadsExhausted."""
        try:
            return await call(reply, timeout=self.timeout)
        except ThreadsExhausted:
            raise
        except Exception as e:
            return e


def class_problems(
    target: str, base: type, options: Mapping[str, Any] | None, *, what: str
) -> Iterator[str]:
    """Yields why `target` is no subclass of `base` that can be made with `options`."""
    try:
        found = load_object(target, what=what)
    except ValueError as e:
        yield str(e)
        return
    if not isinstance(found, type) or not issubclass(found, base):
        yield f"{what} {target}: no subclass of {base.__module__}.{base.__name__}; make it one"
        return
    yield from option_problems(found, options or {}, key=f"{what}_options")
