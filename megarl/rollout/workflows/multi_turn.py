"""Defines workflows of several turns, in which a partner answers the policy: TurnsWorkflow is the
loop of them all. MultiTurnWorkflow's partner says that an answer was wrong and lets the policy try
again, or is an interaction of your own, such as a simulated user."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

from megarl.api.batch import Padded
from megarl.api.chat_template import utf8
from megarl.api.inference import InferenceEngine
from megarl.config.rollout import GenerationHyperparameters
from megarl.observability.logging import get_logger, warn_recurring
from megarl.rollout.chat import ChatOptions, ChatWorkflow
from megarl.rollout.loop_thread import ThreadsExhausted, add_counts, all_of, call, closing
from megarl.rollout.trajectory import Trajectory, to_batch
from megarl.utils.importing import load_object, option_problems

log = get_logger(__name__)

FEEDBACK = "That is not right. Try again."
COMPACT = (
    "The context is nearly full. Summarize your work for yourself: what you did, what you found, "
    "what is left to do. You will go on with the first message, this summary, and your last step."
)
SUMMARY = "Your summary of the work so far:"
INTERACTION_TIMEOUT = 60.0  # seconds
Row = dict[str, Any]
Message = dict[str, Any]


class Partner(ABC):
    """Answers the policy: tools, an environment, a user. An instance belongs to one sample.

    kind: as which of api.inference.FAILURES a sample fails where a method raises one of `breaks`;
    other errors end the episode. scores: whether it scores the sample itself. tools: those that the
    chat template shows, once it has begun.
    """

    kind = "environment"
    breaks: tuple[type[Exception], ...] = (Exception,)
    scores = False
    tools: Sequence[dict[str, Any]] = ()

    async def first_message(self, flow: TurnsWorkflow, row: Row) -> str | None:
        """Begins a conversation about a row of the data. Returns what the policy reads behind the
        row's messages; None where these are all."""
        return None

    @abstractmethod
    async def next_messages(
        self, flow: TurnsWorkflow, sample: Trajectory, row: Row
    ) -> Sequence[Message]:
        """Returns what the policy reads after its last answer; nothing where the sample is over."""

    async def aclose(self) -> None:
        """Releases everything. It is called once, on success, failure, cancellation and time-out,
        also after a begin that failed."""
        return


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Holds what an interaction says to an answer: the text of the next message, whether the
    conversation is over, and what the answer earned by itself."""

    text: str = ""
    done: bool = False
    reward: float = 0.0


class Interaction(ABC):
    """Answers the policy in the user's place. An instance belongs to one sample. What a method
    raises fails the sample ("environment"), and so does one that takes too long. All names but
    those of its methods are the subclass's."""

    async def start(self, row: Row) -> str | None:
        """Begins a conversation about a row of the data. Returns the first message to the policy,
        behind the row's, or None where the row has all of them."""
        return None

    @abstractmethod
    async def respond(self, messages: list[Message], row: Row) -> Reply:
        """Returns the reply to the last of `messages`, the policy's."""

    async def aclose(self) -> None:
        """Releases everything (Partner.aclose)."""
        return


class _Speaker(Partner):
    """Is an interaction as the loop of turns knows it: its methods, within the workflow's time."""

    def __init__(self, interaction: Interaction) -> None:
        self._interaction = interaction

    async def first_message(self, flow: TurnsWorkflow, row: Row) -> str | None:
        start = partial(self._interaction.start, row)
        first: str | None = await call(start, timeout=flow.timeout)
        return first

    async def next_messages(
        self, flow: TurnsWorkflow, sample: Trajectory, row: Row
    ) -> Sequence[Message]:
        respond = partial(self._interaction.respond, flow.conversation(sample), row)
        return flow.heard(sample, await call(respond, timeout=flow.timeout))

    async def aclose(self) -> None:
        await self._interaction.aclose()


class TurnOptions(ChatOptions, total=False):
    """Declares the options of workflows of several turns.

    max_turns: the most answers of one sample.
    turn_discount: what an answer earns is multiplied by turn_discount ** (answers before it).
    max_length: the most tokens of one sample, prompt included; a sample without room for another
    answer (gconfig.max_new_tokens) ends. None is no bound: a request that does not fit the servers'
    context is then an error.
    compact_at: the most tokens of one context, in place of max_length. Where what comes next would
    leave no room for an answer and for a summary after it, the policy writes a summary, and goes on
    behind the row's messages, the summary and its last answer: in a new row of the same rollout.
    compact_prompt: the user's message that asks for the summary.
    """

    max_turns: int
    turn_discount: float
    max_length: int | None
    compact_at: int | None
    compact_prompt: str


class TurnsWorkflow(ChatWorkflow):
    """Lets a partner answer the policy within bounds, each sample on its own after the first
    answers, and scores the samples' last answers. A subclass makes the partners (`partner`), and
    has `usual_turns` where max_turns is left out, and `timeout`, the seconds that a partner may
    take, None where it has a bound itself. The options: see TurnOptions."""

    usual_turns = 2
    timeout: float | None = None

    def __init__(
        self,
        reward_fn: Callable[..., float],
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        *,
        max_turns: int | None = None,
        turn_discount: float = 1.0,
        max_length: int | None = None,
        compact_at: int | None = None,
        compact_prompt: str = COMPACT,
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
        self.compact_at, self._ask = compact_at, {"role": "user", "content": compact_prompt}
        self._summary_room = 0 if compact_at is None else self._room_of_summary(compact_at)

    def _room_of_summary(self, compact_at: int) -> int:
        """Returns how many tokens the request for a summary and the summary take. Raises ValueError
        where the bound has no room for them."""
        most, asking = self.gconfig.max_new_tokens, 0
        if self.max_length is not None:
            raise ValueError(
                f"compact_at={compact_at} and max_length={self.max_length}: both are the most "
                "tokens of a context; leave max_length out"
            )
        if self.tokenizer is not None:
            chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "?"}]
            asking = len(self._chat.after(chat, [self._ask], last_token=None))
        if compact_at <= 2 * most + asking:
            raise ValueError(
                f"compact_at={compact_at} has no room for a prompt, an answer and a summary of "
                f"gconfig.max_new_tokens={most} each; raise it above {2 * most + asking}"
            )
        return most + asking

    @abstractmethod
    def partner(self, row: Row) -> Partner:
        """Returns the partner of one sample of the row."""

    async def arun_episode(self, engine: InferenceEngine, data: Row) -> Padded:
        """Returns a padded batch [n,S], n = gconfig.n_samples, by trajectory.to_batch. Samples
        whose partner failed are not valid."""
        partners = [self.partner(data) for _ in range(self.count(data))]
        unclosed = list(partners)
        async with closing(unclosed):
            begun = await all_of(_guarded(p, p.first_message(self, data)) for p in partners)
            data = _opened(data, partners, begun)
            samples = self.begin(data)
            self.check_room(data, len(samples[0].tokens))
            for sample, partner, error in zip(samples, partners, begun, strict=True):
                if isinstance(error, Exception):
                    self.failed(sample, partner.kind, error, data)
            going = [(s, p) for s, p in zip(samples, partners, strict=True) if s.failure is None]
            await self.generate(engine, [sample for sample, _ in going], data)
            await all_of(self._converse(engine, s, p, data, unclosed) for s, p in going)
        unscored = [s for s, p in going if s.failure is None and not p.scores]
        await all_of(self.score_one(sample, data) for sample in unscored)
        return to_batch(samples)

    async def _converse(
        self,
        engine: InferenceEngine,
        sample: Trajectory,
        partner: Partner,
        data: Row,
        unclosed: list[Partner],
    ) -> None:
        """Brings a sample to its last answer, and closes its partner, which it takes off those that
        the episode closes: a task that is cancelled before it begins has none of its own."""
        unclosed.remove(partner)
        async with closing([partner]):
            while True:
                news = await _guarded(partner, partner.next_messages(self, sample, data))
                if isinstance(news, Exception):
                    return self.failed(sample, partner.kind, news, data)
                if not news or not self.may_go_on(sample):
                    return
                tokens, messages = self.told(sample, news, data.get("tools") or ())
                if self._fits(len(sample.tokens) + len(tokens)):
                    self.hear(sample, tokens, messages)
                elif not await self._compact(engine, sample, data, tokens, messages):
                    return
                await self.generate(engine, [sample], data)

    async def _compact(
        self,
        engine: InferenceEngine,
        sample: Trajectory,
        data: Row,
        tokens: Sequence[int],
        messages: Sequence[Message],
    ) -> bool:
        """Has the policy sum up what came before, and begins a new row with the row's messages, the
        summary, the last answer, and what was to be read behind it, as `told` returned it. Returns
        False where the sample ends with its last answer: without compact_at, without room, or
        because the summary was cut."""
        if self.compact_at is None:
            return False
        tools = data.get("tools") or ()
        last, chat = sample.head, list(sample.messages)
        asking, asked = self.told(sample, [self._ask], tools)
        summary, whole = "", False
        if self._has_room(len(sample.tokens) + len(asking)):
            self.hear(sample, asking, asked)
            (summary,) = await self.generate(engine, [sample], data)
            whole = sample.answers[-1].stop_reason != "length"
        opening = self.compacted(data["messages"], summary)
        prompt = [*self._chat.encode(self._chat.text(opening, tools)), *last.tokens, *tokens]
        goes_on = whole and self._fits(len(prompt))
        add_counts({"compactions": int(goes_on), "compactions_failed": int(not goes_on)})
        if goes_on:
            sample.restart(prompt)
            sample.messages = [*opening, *messages]
        else:
            sample.branch(last)
            sample.messages = chat
        return goes_on

    def compacted(self, messages: Sequence[Message], summary: str) -> list[Message]:
        """Returns the chat that a sample goes on with: the row's messages and the summary, without
        its thoughts. It stands in the last message of the user, since some chat templates refuse
        two in a row."""
        text = f"{SUMMARY}\n{summary.rpartition('</think>')[2].strip()}"
        *before, last = messages
        if last["role"] != "user" or not isinstance(last["content"], str):
            return [*messages, {"role": "user", "content": text}]
        return [*before, {**last, "content": f"{last['content']}\n\n{text}"}]

    def static_prompt(self, row: Row) -> Row:
        """Returns a row with the tokens of its prompt, if they are known without its partners."""
        return row

    def check_room(self, data: Row, length: int) -> None:
        """Raises ValueError if compact_at has no room for a prompt of `length` tokens."""
        if self.compact_at is None:
            return
        row = data.get("row_id", "?")
        if not data.get("messages"):
            raise ValueError(f"row {row} has no messages; compact_at needs some to begin anew with")
        if not self._fits(length):
            raise ValueError(
                f"row {row}: its prompt of {length} tokens leaves no room for an answer and a "
                f"summary in compact_at={self.compact_at}; set it to at least "
                f"{length + self.gconfig.max_new_tokens + self._summary_room}, or leave such rows "
                "out by train_dataset.max_length"
            )

    def may_go_on(self, sample: Trajectory) -> bool:
        """Returns whether the sample may have another answer: its last one came to its end, and
        there is room for a turn and for tokens."""
        if sample.answers and sample.answers[-1].stop_reason == "length":
            return False
        return sample.answered < self.max_turns and self.has_room(sample)

    def has_room(self, sample: Trajectory) -> bool:
        """Returns whether an answer fits max_length, or compact_at."""
        return self._has_room(len(sample.tokens))

    def _has_room(self, length: int) -> bool:
        bound = self.max_length if self.compact_at is None else self.compact_at
        return bound is None or length + self.gconfig.max_new_tokens <= bound

    def _fits(self, length: int) -> bool:
        """Returns whether an answer to `length` tokens, and with compact_at a summary after it, fit
        the bound."""
        return self._has_room(length + self._summary_room)

    def heard(self, sample: Trajectory, reply: Reply) -> Sequence[Message]:
        """Returns a reply as a user's message, nothing where it is the last, and notes what the
        answer before it earned."""
        sample.head.reward += reply.reward
        return () if reply.done else ({"role": "user", "content": utf8(reply.text)},)

    def failed(self, sample: Trajectory, kind: str, error: BaseException, data: Row) -> None:
        """Notes that something of `kind` (api.inference.FAILURES) failed, and logs what."""
        sample.fail(kind)
        row_id = data.get("row_id", "?")
        warn_recurring(log, f"row {row_id}: sample {sample.index} failed ({kind})", error)

    async def score_one(self, sample: Trajectory, data: Row) -> float:
        """Returns the reward of the sample's last answer, and notes it as the sample's outcome. The
        reward gets the `conversation` beside the row's columns."""
        reward: float
        (reward,) = await self.score([sample], data | {"conversation": self.conversation(sample)})
        sample.score(reward, discount=self.turn_discount)
        return reward

    def conversation(self, sample: Trajectory) -> list[Message]:
        """Returns the messages up to now, the last answer included."""
        if sample.head.response is None:  # something was told after it
            return list(sample.messages)
        last = {"role": "assistant", "content": self.text(sample.answers[-1])}
        return [*sample.messages, last]


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
        self._make: Callable[[], Interaction] | None = None
        if interaction:
            options = interaction_options or {}
            self._make = maker(interaction, options, what="interaction", base=Interaction)

    def partner(self, row: Row) -> Partner:
        """Returns the interaction, or who says that an answer was wrong."""
        return _Feedback(self) if self._make is None else _Speaker(self._make())


class _Feedback(Partner):
    """Says of every answer that it is wrong, until one is right."""

    breaks = ()
    scores = True

    def __init__(self, flow: MultiTurnWorkflow) -> None:
        self._flow = flow

    async def next_messages(
        self, flow: TurnsWorkflow, sample: Trajectory, row: Row
    ) -> Sequence[Message]:
        right = not await flow.score_one(sample, row) < self._flow.solved
        return flow.heard(sample, Reply(text=self._flow.feedback, done=right))


def maker(
    target: str, options: dict[str, Any], *, what: str, base: type | None = None
) -> partial[Any]:
    """Returns what makes an object of the class or function `target`. Raises ValueError where it
    cannot be made with the options, which `{what}_options` are, or is no subclass of `base`."""
    make = load_object(target, what=what)
    if base is not None and not (isinstance(make, type) and issubclass(make, base)):
        raise ValueError(
            f"{what} {target}: no subclass of {base.__module__}.{base.__name__}; make it one"
        )
    if not callable(make):
        raise ValueError(
            f"{what} {target}: a {type(make).__name__}, neither a class nor a function"
        )
    if problems := "; ".join(option_problems(make, options, key=f"{what}_options")):
        raise ValueError(problems)
    return partial(make, **options)


async def _guarded(partner: Partner, answer: Awaitable[Any]) -> Any:
    """Returns what was awaited, or the error of the partner's that it ended with."""
    try:
        return await answer
    except ThreadsExhausted:
        raise
    except partner.breaks as e:
        return e


def _opened(row: Row, partners: Sequence[Partner], begun: Sequence[Any]) -> Row:
    """Returns the row with what its partners began with: a first message, and tools, for which the
    prompt is rendered anew. Raises ValueError where the messages differ: the samples of a row share
    their prompt."""
    sound = [i for i, first in enumerate(begun) if not isinstance(first, Exception)]
    firsts = {begun[i] for i in sound}
    if len(firsts) > 1:
        raise ValueError(
            f"row {row.get('row_id', '?')}: the interactions of one row begin with different "
            "messages; let the row decide how they begin, for instance by a seed in it"
        )
    first = firsts.pop() if firsts else None
    tools = partners[sound[0]].tools if sound else ()
    if first is None and not tools:
        return row
    if not row.get("messages"):
        raise ValueError(
            f"row {row.get('row_id', '?')} has no messages; tools and interactions need some, for "
            "the chat template"
        )
    opened = {k: v for k, v in row.items() if k not in ("prompt", "prompt_ids")}
    if tools:
        opened["tools"] = list(tools)
    if first is not None:
        opened["messages"] = [*row["messages"], {"role": "user", "content": utf8(first)}]
    return opened
