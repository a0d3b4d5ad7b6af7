"""Holds one agent's session: the requests it made, and the trajectory that they make up.

A request whose messages begin with a chat that the policy has answered before goes on from the
policy's own tokens: only what is new is rendered and read. Every other request begins a chat of its
own, which is a fork.
"""

from __future__ import annotations

import asyncio
import contextvars
import secrets
import time
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megarl.api.inference import InferenceEngine
from megarl.api.records import ModelRequest, ModelResponse
from megarl.config.gateway import GatewayConfig
from megarl.config.rollout import GenerationHyperparameters
from megarl.rollout.gateway.errors import BadRequest
from megarl.rollout.gateway.messages import ChatRequest, Key, Message, keys_of
from megarl.rollout.gateway.prompt import Renderer
from megarl.rollout.gateway.token_ids import TokenRequest
from megarl.rollout.generation import stable_seed
from megarl.rollout.server_choice import Home, current_home
from megarl.rollout.trajectory import Trajectory, Turn

T = TypeVar("T")


@dataclass(kw_only=True)
class Answer:
    """Holds one answer of the policy. prompt: the ids it was written after."""

    id: str
    message: Message
    prompt: list[int]
    response: ModelResponse

    @property
    def cut(self) -> bool:
        """Returns whether a bound on tokens ended the answer."""
        return self.response.stop_reason == "length"


@dataclass(kw_only=True)
class _Chat:
    """Holds a chat that ends with an answer of the policy, and where that is in the trajectory."""

    messages: tuple[Message, ...]
    keys: tuple[Key, ...]  # of `messages`
    tools: str
    turn: Turn


@dataclass(kw_only=True, eq=False)
class _Call:
    """Holds a request on its way, which several attempts of the client may share."""

    answers: asyncio.Task[list[Answer]]
    key: str
    waiting: int = 0
    ended: float | None = None  # on the monotonic clock


class Session:
    """Serves one agent; made by Gateway.session.

    base_url, api_key: what an OpenAI client gets. anthropic_url: what an Anthropic client gets.
    worker_url, worker_key: what a worker of environments gets, the same in every session; its
    requests name the session's id.
    reward: the outcome, set by the workflow or by POST .../reward; None until then.
    trajectory: what the policy read and wrote in chats. traces: what it read and wrote as token
    ids, by the name that the client gave each conversation. lost: answers that were written and
    that no client took; they are in no trajectory.
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
    ) -> None:
        self.worker_url, self.worker_key = f"{address}/v1", worker_key
        self.id, self.api_key = uuid.uuid4().hex, f"sk-{secrets.token_hex(24)}"
        self.anthropic_url = f"{address}/s/{self.id}"
        self.base_url = f"{self.anthropic_url}/v1"
        self.reward: float | None = None
        self.lost = 0
        self.trajectory = Trajectory(index=index)
        self.traces: dict[str, Trajectory] = {}
        self._engine, self._renderer, self._config = engine, renderer, config
        self._gconfig, self._seed_key = gconfig, tuple(seed_key)
        self._context_length = context_length
        self._chats: list[_Chat] = []
        self._calls: dict[tuple[int, str], list[_Call]] = {}
        self._turns: dict[str, Turn] = {}  # by the answer's id
        self._asked: dict[tuple[int, ...], int] = {}
        self._errors: dict[str, str] = {}
        self._generating: set[asyncio.Task[Any]] = set()
        # of the episode; requests arrive in the context of the gateway, which serves all of them
        self._context = contextvars.copy_context()
        self._context.run(current_home.set, Home(near=current_home.get()))

    @property
    def failures(self) -> list[str]:
        """Returns the errors of requests that the servers did not answer, at any attempt."""
        return list(self._errors.values())

    # -- requests

    async def complete(self, request: ChatRequest) -> list[Answer]:
        """Returns the policy's answers. A request that the client sends again gets those of its
        first attempt. Raises BadRequest for what cannot be answered."""
        keys = keys_of(request.messages, self._config.match)
        parent = self._parent(request, keys)
        call = self._find_call(parent, request)
        call.waiting += 1
        try:
            answers = await asyncio.shield(call.answers)
        finally:
            call.waiting -= 1
        self._record(parent, request, keys, answers)
        return answers

    async def generate(self, request: TokenRequest) -> ModelResponse:
        """Returns the policy's answer to token ids, which goes into the trajectory of its trace.
        Raises BadRequest for what cannot be answered."""
        ids, asked = request.token_ids, f"{request.trace} {len(request.token_ids)}"
        gconfig = self._bounds(len(ids), request.max_tokens, ())
        stops = dict.fromkeys([*gconfig.stop_token_ids, *request.stop_token_ids])
        (seed,) = self._seeds(ids, 1)
        gconfig = gconfig.new(stop_token_ids=list(stops))
        trace = self.traces.setdefault(request.trace, Trajectory(index=self.trajectory.index))
        known = trace.find(ids).routed()
        asked_for = ModelRequest(
            input_ids=ids,
            gconfig=gconfig,
            seed=seed,
            routes_from=known if request.session else min(known, request.routes_from),
        )
        work = self._started(self._engine.agenerate_many([asked_for]))
        self._generating.add(work)
        try:
            (response,) = await work
        except Exception as e:
            self._errors[asked] = f"{type(e).__name__}: {e}"
            raise
        finally:
            work.cancel()
            self._generating.discard(work)
        self._errors.pop(asked, None)
        before = trace.find(ids)
        trace.wrote(response, after=trace.read(ids[before.end :], after=before))
        return response

    def close(self) -> None:
        """Ends the requests that are under way; what nobody waits for any more is counted."""
        self.lost += len(self._generating)
        for work in self._generating:
            work.cancel()
        for call in (c for calls in self._calls.values() for c in calls):
            if not call.answers.done():
                call.answers.cancel()
                self.lost += 1
            elif not call.answers.cancelled() and call.answers.exception() is None:
                self.lost += sum(a.id not in self._turns for a in call.answers.result())

    def set_reward(self, reward: float, answer_id: str | None = None) -> None:
        """Sets the outcome, or the reward of one answer. Raises BadRequest for an id that is no
        answer's."""
        if answer_id is None:
            self.reward = reward
        elif (turn := self._turns.get(answer_id)) is not None:
            turn.reward = reward
        else:
            raise BadRequest(f"no answer of this session has the id {answer_id!r}", status=404)

    # -- the chat that a request goes on with

    def _parent(self, request: ChatRequest, keys: tuple[Key, ...]) -> _Chat | None:
        """Returns the longest chat that ends with an answer and begins the request's messages."""
        if not request.messages:
            raise BadRequest("messages is empty")
        if not self._config.reuse:
            return None
        tools = repr(request.tools)
        found = [
            chat
            for chat in self._chats
            if len(chat.keys) < len(keys)
            and chat.tools == tools
            and chat.keys == keys[: len(chat.keys)]
        ]
        return max(found, key=lambda chat: len(chat.keys), default=None)

    def _find_call(self, parent: _Chat | None, request: ChatRequest) -> _Call:
        """Returns the call of the request's first attempt, else a new one."""
        where = (-1 if parent is None else self._chats.index(parent), repr(request.asked))
        now, calls = time.monotonic(), self._calls.setdefault(where, [])
        for call in calls:
            if request.key or call.key:
                same = request.key == call.key
            else:  # two that wait at the same time are two samples
                fresh = call.ended is None or now - call.ended < self._config.retry_window
                same = call.waiting == 0 and fresh
            if same and not _failed(call):
                return call
        call = _Call(answers=self._started(self._generate(parent, request)), key=request.key)
        call.answers.add_done_callback(lambda _: setattr(call, "ended", time.monotonic()))
        calls.append(call)
        return call

    def _started(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return asyncio.get_running_loop().create_task(work, context=self._context)

    async def _generate(self, parent: _Chat | None, request: ChatRequest) -> list[Answer]:
        prompt = self._prompt(parent, request)
        gconfig = self._bounds(len(prompt), request.max_tokens, request.stop)
        known = parent.turn.routed() if parent is not None else 0
        requests = [
            ModelRequest(input_ids=prompt, gconfig=gconfig, seed=seed, routes_from=known)
            for seed in self._seeds(prompt, request.n)
        ]
        try:
            responses = await self._engine.agenerate_many(requests)
        except Exception as e:
            self._errors[request.asked] = f"{type(e).__name__}: {e}"
            raise
        self._errors.pop(request.asked, None)
        said = sum(len(m.calls) for m in request.messages)
        return [
            Answer(
                id=uuid.uuid4().hex,
                message=self._renderer.answer(r, request.tools, calls_so_far=said),
                prompt=prompt,
                response=r,
            )
            for r in responses
        ]

    def _prompt(self, parent: _Chat | None, request: ChatRequest) -> list[int]:
        if parent is None:
            return self._renderer.whole(request.messages, request.tools)
        before = parent.turn.path_tokens()
        rest = request.messages[len(parent.messages) :]
        return before + self._renderer.after(parent.messages, rest, request.tools, before[-1])

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
                raise BadRequest(
                    f"the chat has {length} tokens, which leaves no room in a context of {context}",
                    code="context_length_exceeded",
                )
            most = min(most, context - length)
        stops = [*gconfig.stop, *(s for s in stop if s not in gconfig.stop)]
        return gconfig.new(n_samples=1, max_new_tokens=most, stop=stops)

    def _seeds(self, prompt: list[int], n: int) -> list[int | None]:
        """Returns a seed for each of n answers, keyed by the prompt and by how often it came."""
        if self._gconfig.seed is None:
            return [None] * n
        key = tuple(prompt)
        first = self._asked.get(key, 0)
        self._asked[key] = first + n
        version = self._engine.get_version()
        return [
            stable_seed(self._gconfig.seed, version, *self._seed_key, key, first + i)
            for i in range(n)
        ]

    def _record(
        self,
        parent: _Chat | None,
        request: ChatRequest,
        keys: tuple[Key, ...],
        answers: Sequence[Answer],
    ) -> None:
        """Puts answers into the trajectory, once, when a client takes them."""
        if not answers or answers[0].id in self._turns:
            return
        before = self.trajectory.root if parent is None else parent.turn
        read = self.trajectory.read(answers[0].prompt[before.end :], after=before)
        for answer in answers:
            turn = self.trajectory.wrote(answer.response, after=read)
            self._turns[answer.id] = turn
            self._chats.append(
                _Chat(
                    messages=(*request.messages, answer.message),
                    keys=keys + keys_of([answer.message], self._config.match),
                    tools=repr(request.tools),
                    turn=turn,
                )
            )


def _failed(call: _Call) -> bool:
    done = call.answers
    return done.done() and (done.cancelled() or done.exception() is not None)
