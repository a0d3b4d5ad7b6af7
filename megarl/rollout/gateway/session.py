"""Holds one agent's session: the requests it made, and the trajectory that they make up.

A request whose messages begin with a chat that the policy has answered before goes on from the
policy's own tokens: only what is new is rendered and read. Every other request begins a chat of its
own, which is a fork.
"""

from __future__ import annotations

import asyncio
import contextvars
import secrets
import uuid
from collections.abc import Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeVar

from megarl.api.inference import InferenceEngine
from megarl.api.records import ModelRequest, ModelResponse
from megarl.config.rollout import GenerationHyperparameters
from megarl.rollout.episode_context import EpisodeContext, Home, current_episode
from megarl.rollout.gateway.messages import (
    BadRequest,
    ChatRequest,
    GatewayConfig,
    Message,
    Renderer,
    TokenRequest,
    ToolCall,
    digest,
    too_long,
)
from megarl.rollout.trajectory import Trajectory, Turn

T = TypeVar("T")

MODEL = "policy"  # its name for clients
MOST_REWARD = 1e6  # no reward is larger; as float32 it has its last digit
LONG = 1 << 16  # characters from which on a chat is rendered in a thread

MAX_N, MAX_ANSWERS = 8, 1024  # answers of one request, and of one session
MAX_ENDED = 64  # answered requests that a session can answer again


@dataclass(kw_only=True)
class Answer:
    """Holds one answer of the policy. stop: the request's stop string that ended it."""

    id: str
    message: Message
    response: ModelResponse
    stop: str | None = None

    @property
    def prompt(self) -> list[int]:
        """Returns the ids that it was written after."""
        return self.response.input_tokens

    @property
    def cut(self) -> bool:
        """Returns whether a bound on tokens ended the answer."""
        return self.response.stop_reason == "length"


@dataclass(kw_only=True)
class _Chat:
    """Holds a chat that ends with an answer of the policy, and where that is in the trajectory."""

    messages: tuple[Message, ...]
    told: bytes  # see ChatRequest
    turn: Turn


@dataclass(kw_only=True, eq=False)
class _Attempt:
    """Holds a request on its way, and its answers afterwards.

    name: a digest of what it asks for, and the client's key of it, "" for none. waiting: how many
    of the client's connections wait for it. taken: one of them got the answers.
    """

    name: tuple[bytes, str]
    work: asyncio.Task[list[Answer]]
    waiting: int = 0
    taken: bool = False

    @property
    def failed(self) -> bool:
        """Returns whether it ended without answers."""
        return self.work.done() and (self.work.cancelled() or self.work.exception() is not None)

    @property
    def left(self) -> bool:
        """Returns whether its client has gone before it got the answers."""
        return not (self.failed or self.waiting or self.taken)

    @property
    def lost(self) -> int:
        """Returns how many answers nobody got: those of a request on its way count as one."""
        if self.taken or self.failed:
            return 0
        return len(self.work.result()) if self.work.done() else 1

    async def answers(self) -> list[Answer]:
        """Returns the answers, which go on being written where whoever waits is cancelled. Raises
        BadRequest where the session ends before."""
        self.waiting += 1
        try:
            await asyncio.wait({self.work})
            if self.work.cancelled():
                raise ended()
            answers = self.work.result()
        finally:
            self.waiting -= 1
        self.taken = True
        return answers


def ended() -> BadRequest:
    """Returns what a request is refused with that is of no open session."""
    return BadRequest(
        "no open session has this URL and key: the session has ended, or the key is another's",
        status=401,
        code="invalid_api_key",
    )


class Session:
    """Serves one agent; made by Gateway.session.

    base_url, api_key: what an OpenAI client gets. anthropic_url: what an Anthropic client gets.
    worker_url, worker_key: what a worker of environments gets, the same in every session; its
    requests name the session's id.
    reward: the outcome, set by the workflow or by POST .../reward; None until then.
    lost: answers that no client took, once the session is closed; they are in no trajectory.
    trajectory: what the policy read and wrote in chats. traces: what it read and wrote as token
    ids, by the name that the client gave each conversation.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        renderer: Renderer,
        config: GatewayConfig,
        gconfig: GenerationHyperparameters,
        *,
        address: str,
        context_length: int | None,
        index: int = 0,
        seed_key: Sequence[Any] = (),
        worker_key: str = "",
        rewards: bool = True,
        threads: Executor | None = None,
    ) -> None:
        self.worker_url, self.worker_key = f"{address}/v1", worker_key
        self.id, self.api_key = uuid.uuid4().hex, f"sk-{secrets.token_hex(24)}"
        self.anthropic_url = f"{address}/s/{self.id}"
        self.base_url = f"{self.anthropic_url}/v1"
        self.reward: float | None = None
        self.trajectory = Trajectory(index=index)
        self.traces: dict[str, Trajectory] = {}
        self._engine, self._renderer, self._config = engine, renderer, config
        self._gconfig, self._seed_key = gconfig, tuple(seed_key)
        self._context_length, self._rewards, self._threads = context_length, rewards, threads
        self._chats: list[_Chat] = []
        self._attempts: list[_Attempt] = []
        self._turns: dict[str, Turn] = {}  # by the answer's id
        self._calls: dict[str, ToolCall] = {}  # of the policy, by id
        self._errors: dict[bytes, str] = {}  # by a digest of the request
        self._generating: set[asyncio.Task[Any]] = set()
        self._begun = self.lost = 0
        self._closed = False
        # of the episode; requests arrive in the context of the gateway, which serves all of them
        episode = current_episode.get() or EpisodeContext()
        self._seeding = EpisodeContext(admitted=episode.admitted)  # the seed's key names the rest
        self._context = contextvars.copy_context()
        own = replace(episode, home=Home(near=episode.home))
        self._context.run(current_episode.set, own)

    @property
    def failures(self) -> list[str]:
        """Returns the errors of requests that the servers did not answer, at any attempt."""
        return list(self._errors.values())

    # -- requests

    async def complete(self, request: ChatRequest, *, again: bool = False) -> list[Answer]:
        """Returns the policy's answers; of a request that its client sends `again`, or by the same
        key, those of its first attempt. Raises BadRequest for what cannot be answered."""
        self._check_open()
        if request.n > MAX_N:
            raise BadRequest(f"n={request.n}: ask for at most {MAX_N} answers at once")
        request = self._as_sampled(request)
        parent = self._parent(request)
        place = -1 if parent is None else self._chats.index(parent)
        name = digest(place, request.fingerprint), request.key
        attempt = self._earlier(name) if again or request.key else None
        if attempt is None:
            work = self._started(self._generate(parent, request))
            attempt = _Attempt(name=name, work=work)
            self._attempts.append(attempt)
            self._forget()
        answers = await attempt.answers()
        self._check_open()
        self._record(parent, request, answers)
        return answers

    def _earlier(self, name: tuple[bytes, str]) -> _Attempt | None:
        """Returns the attempt that a client repeats: an equal one whose client has gone; else none
        where one has failed, whose client asks; else the latest that was answered, or that has the
        client's key."""
        equal = [a for a in self._attempts if a.name == name]
        failed = [a for a in equal if a.failed]
        if left := [a for a in equal if a.left]:
            return left[0]
        if failed:
            self._attempts.remove(failed[0])
            return None
        _, key = name
        return next((a for a in reversed(equal) if key or a.taken), None)

    def _forget(self) -> None:
        ended = [a for a in self._attempts if a.work.done() and not a.waiting]
        for attempt in ended[: max(0, len(ended) - MAX_ENDED)]:
            self.lost += attempt.lost
            self._attempts.remove(attempt)

    async def count(self, request: ChatRequest) -> int:
        """Returns how many tokens the request's prompt has. Raises BadRequest for what cannot be
        answered."""
        self._check_open()
        request = self._as_sampled(request)
        return len(await self._prompt(self._parent(request), request))

    async def generate(self, request: TokenRequest) -> ModelResponse:
        """Returns the policy's answer to token ids, which goes into the trajectory of its trace.
        Raises BadRequest for what cannot be answered."""
        self._check_open()
        ids = request.token_ids
        self._renderer.check_ids([*ids, *request.stop_token_ids])
        gconfig = self._bounds(len(ids), request.max_tokens, ())
        self._count(1)
        stops = dict.fromkeys([*gconfig.stop_token_ids, *request.stop_token_ids])
        (seed,) = self._seeds(ids, 1)
        trace = self.traces.setdefault(request.trace, Trajectory(index=self.trajectory.index))
        routed = trace.find(ids).routed()
        sample = ModelRequest(
            input_ids=ids,
            gconfig=gconfig.new(stop_token_ids=list(stops)),
            seed=seed,
            routes_from=routed if request.session else min(routed, request.routes_from),
        )
        work = self._started(self._responses(digest(request.trace, len(ids)), [sample]))
        self._generating.add(work)
        try:
            await asyncio.wait({work})
            self._check_open()
            (response,) = work.result()
        finally:
            work.cancel()
            self._generating.discard(work)
        before = trace.find(ids)
        trace.wrote(response, after=trace.read(ids[before.end :], after=before))
        return response

    def close(self) -> None:
        """Ends the requests that are under way, and refuses others; what nobody took is counted."""
        self._closed = True
        self.lost += len(self._generating) + sum(a.lost for a in self._attempts)
        for work in (*self._generating, *(a.work for a in self._attempts)):
            work.cancel()
        self._attempts.clear()
        self._generating.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise ended()

    def set_reward(self, reward: float, answer_id: str | None = None) -> None:
        """Sets the outcome, or the reward of one answer.

        Raises BadRequest if the session takes no rewards, if the id is no answer's, and if the
        reward is not finite or makes the sum of the absolute rewards larger than MOST_REWARD."""
        self._check_open()
        if not self._rewards:
            raise BadRequest(
                "reward: this session takes none, because the workflow computes it; set "
                "rollout.gateway.rewards=always to send rewards",
                status=403,
                code="rewards_off",
            )
        turn = None if answer_id is None else self._turns.get(answer_id)
        if answer_id is not None and turn is None:
            raise BadRequest(f"no answer of this session has the id {answer_id!r}", status=404)
        others = 0.0 if turn is None else abs(self.reward or 0.0)
        others += sum(abs(t.reward) for t in self._turns.values() if t is not turn)
        if not abs(reward) <= MOST_REWARD - others:
            raise BadRequest(
                f"reward={reward!r:.40}: the absolute rewards of a rollout add up to at most "
                f"{MOST_REWARD:g}, of which {others:g} is taken; send a smaller finite number"
            )
        if turn is None:
            self.reward = float(reward)
        else:
            turn.reward = float(reward)

    # -- the chat that a request goes on with

    def _as_sampled(self, request: ChatRequest) -> ChatRequest:
        """Returns the request with the policy's calls, known by their ids, as it wrote them:
        clients put defaults into arguments, strip them, rename calls of tools they do not have."""

        messages = []
        for message in request.messages:
            calls = tuple(self._calls.get(call.id, call) for call in message.calls)
            messages.append(message if calls == message.calls else replace(message, calls=calls))
        return replace(request, messages=tuple(messages))

    def _parent(self, request: ChatRequest) -> _Chat | None:
        """Returns the longest chat that ends with an answer and begins the request's messages."""
        if not request.messages:
            raise BadRequest("messages is empty")
        if not self._config.reuse:
            return None
        chats = sorted(self._chats, key=lambda chat: len(chat.messages), reverse=True)
        for chat in (c for c in chats if len(c.messages) < len(request.messages)):
            begins = zip(chat.messages, request.messages, strict=False)
            if chat.told == request.told and all(a.key == b.key for a, b in begins):
                return chat
        return None

    def _started(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return asyncio.get_running_loop().create_task(work, context=self._context)

    async def _generate(self, parent: _Chat | None, request: ChatRequest) -> list[Answer]:
        prompt = await self._prompt(parent, request)
        gconfig = self._bounds(len(prompt), request.max_tokens, request.stop)
        self._count(request.n)
        routed = parent.turn.routed() if parent is not None else 0
        requests = [
            ModelRequest(input_ids=prompt, gconfig=gconfig, seed=seed, routes_from=routed)
            for seed in self._seeds(prompt, request.n)
        ]
        answers = []
        for r in await self._responses(request.fingerprint, requests):
            message, stop = self._renderer.answer(r, request)
            answers.append(Answer(id=uuid.uuid4().hex, message=message, response=r, stop=stop))
        return answers

    async def _responses(
        self, request: bytes, requests: Sequence[ModelRequest]
    ) -> list[ModelResponse]:
        """Returns the servers' answers. request: a digest under which an error is kept until they
        answer."""
        try:
            responses = await self._engine.agenerate_many(requests)
        except Exception as e:
            self._errors[request] = f"{type(e).__name__}: {e}"
            raise
        self._errors.pop(request, None)
        return responses

    async def _prompt(self, parent: _Chat | None, request: ChatRequest) -> list[int]:
        """Returns the request's ids; those of a long one come from a thread, for rendering it would
        hold up all episodes."""
        if self._context_length is not None:
            self._renderer.check_length(request.messages, self._context_length)
        length = sum(len(m.content) + len(m.reasoning) for m in request.messages)
        if length < LONG or self._threads is None:
            return self._rendered(parent, request)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._rendered, parent, request)

    def _rendered(self, parent: _Chat | None, request: ChatRequest) -> list[int]:
        if parent is None:
            return self._renderer.whole(request)
        before = parent.turn.path_tokens()
        return before + self._renderer.after(parent.messages, request, before[-1])

    def _count(self, answers: int) -> None:
        """Counts answers that are asked for. Raises BadRequest for more than a session may have."""
        if self._begun + answers > MAX_ANSWERS:
            raise BadRequest(
                f"this session has {self._begun} answers, of at most {MAX_ANSWERS}",
                code="too_many_answers",
            )
        self._begun += answers

    def _bounds(
        self, length: int, max_tokens: int | None, stop: Sequence[str]
    ) -> GenerationHyperparameters:
        """Returns the session's sampling parameters, with a request's bound and stop strings, for a
        prompt of `length` tokens."""
        gconfig, most = self._gconfig, self._gconfig.max_new_tokens
        if max_tokens is not None:
            most = min(most, max_tokens)
        if (context := self._context_length) is not None:
            if length >= context:
                raise too_long(f"{length} tokens", context)
            most = min(most, context - length)
        stops = [*gconfig.stop, *(s for s in stop if s not in gconfig.stop)]
        return gconfig.new(n_samples=1, max_new_tokens=most, stop=stops)

    def _seeds(self, prompt: list[int], n: int) -> list[int | None]:
        """Returns a seed for each of n answers, keyed by the prompt and by how often it came."""
        if self._gconfig.seed is None:
            return [None] * n
        key, version = (self._gconfig.seed, *self._seed_key), self._engine.get_version()
        return [self._seeding.seed(*key, prompt=prompt, version=version) for _ in range(n)]

    def _record(
        self, parent: _Chat | None, request: ChatRequest, answers: Sequence[Answer]
    ) -> None:
        """Puts answers into the trajectory, once, when a client takes them."""
        if not answers or answers[0].id in self._turns:
            return
        before = self.trajectory.root if parent is None else parent.turn
        read = self.trajectory.read(answers[0].prompt[before.end :], after=before)
        # what the chat before has is kept once
        before_messages = () if parent is None else parent.messages
        messages = tuple(
            old if old == message else message
            for old, message in zip_longest(before_messages, request.messages)
        )
        for answer in answers:
            turn = self.trajectory.wrote(answer.response, after=read)
            self._turns[answer.id] = turn
            self._calls |= {call.id: call for call in answer.message.calls}
            chat = (*messages, answer.message)
            self._chats.append(_Chat(messages=chat, told=request.told, turn=turn))
