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
from collections import Counter
from collections.abc import Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeVar

from megarl.api.inference import InferenceEngine
from megarl.api.records import ModelRequest, ModelResponse
from megarl.config.rollout import GenerationHyperparameters
from megarl.rollout.episode_context import EpisodeContext, Home, current_episode, stable_seed
from megarl.rollout.gateway.attempts import Attempts
from megarl.rollout.gateway.calls import GatewayConfig
from megarl.rollout.gateway.errors import BadRequest
from megarl.rollout.gateway.messages import ChatRequest, Key, Message, digest, keys_of
from megarl.rollout.gateway.prompt import Renderer
from megarl.rollout.gateway.token_ids import TokenRequest
from megarl.rollout.trajectory import Trajectory, Turn

T = TypeVar("T")

MOST_REWARD = 1e6  # no reward is larger; as float32 it has its last digit
LONG = 1 << 16  # characters from which on a chat is rendered in a thread

MAX_N, MAX_ANSWERS = 8, 1024  # answers of one request, and of one session


@dataclass(kw_only=True)
class Answer:
    """Holds one answer of the policy."""

    id: str
    message: Message
    response: ModelResponse

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
    keys: tuple[Key, ...]  # of `messages`
    tools: bytes  # a digest of them
    turn: Turn


class Session:
    """Serves one agent; made by Gateway.session.

    base_url, api_key: what an OpenAI client gets. anthropic_url: what an Anthropic client gets.
    worker_url, worker_key: what a worker of environments gets, the same in every session; its
    requests name the session's id.
    reward: the outcome, set by the workflow or by POST .../reward; None until then.
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
        self._attempts: Attempts[Answer] = Attempts()
        self._turns: dict[str, Turn] = {}  # by the answer's id
        self._asked: Counter[bytes] = Counter()  # how often, by a digest of the prompt
        self._errors: dict[bytes, str] = {}  # by a digest of the request
        self._generating: set[asyncio.Task[Any]] = set()
        self._unanswered = self._begun = 0
        # of the episode; requests arrive in the context of the gateway, which serves all of them
        episode = current_episode.get() or EpisodeContext()
        self._seeded_at = episode.admitted
        self._context = contextvars.copy_context()
        own = replace(episode, home=Home(near=episode.home))
        self._context.run(current_episode.set, own)

    @property
    def failures(self) -> list[str]:
        """Returns the errors of requests that the servers did not answer, at any attempt."""
        return list(self._errors.values())

    @property
    def lost(self) -> int:
        """Returns how many answers were written that no client took; they are in no trajectory."""
        return self._unanswered + self._attempts.lost

    # -- requests

    async def complete(self, request: ChatRequest, *, again: bool = False) -> list[Answer]:
        """Returns the policy's answers. A request that the client sends again gets those of its
        first attempt, see Attempts.get. Raises BadRequest for what cannot be answered."""
        if request.n > MAX_N:
            raise BadRequest(f"n={request.n}: ask for at most {MAX_N} answers at once")
        keys = keys_of(request.messages)
        parent = self._parent(request, keys)
        place = -1 if parent is None else self._chats.index(parent)
        attempt = self._attempts.get(
            digest(place, request.asked),
            request.key,
            again=again,
            start=lambda: self._started(self._generate(parent, request)),
        )
        with attempt.awaited() as awaited:
            answers = await awaited
        attempt.taken = True
        self._record(parent, request, keys, answers)
        return answers

    async def generate(self, request: TokenRequest) -> ModelResponse:
        """Returns the policy's answer to token ids, which goes into the trajectory of its trace.
        Raises BadRequest for what cannot be answered."""
        ids = request.token_ids
        self._renderer.check_ids([*ids, *request.stop_token_ids])
        self._count(1)
        asked = digest(request.trace, len(ids))
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
        """Ends the requests that are under way; what nobody took is counted."""
        self._unanswered += len(self._generating)
        for work in self._generating:
            work.cancel()
        self._attempts.close()

    def set_reward(self, reward: float, answer_id: str | None = None) -> None:
        """Sets the outcome, or the reward of one answer. Raises BadRequest where rewards are not
        taken, for one beyond MOST_REWARD, and for an id that is no answer's."""
        if not self._rewards:
            raise BadRequest(
                "the reward is its function's: rollout.gateway.rewards=always has the gateway take "
                "others",
                status=403,
                code="rewards_off",
            )
        if not abs(reward) <= MOST_REWARD:
            raise BadRequest(f"reward: send a number from -{MOST_REWARD:g} to {MOST_REWARD:g}")
        reward = float(reward)
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
        tools = digest(request.tools)
        found = [
            chat
            for chat in self._chats
            if len(chat.keys) < len(keys)
            and chat.tools == tools
            and chat.keys == keys[: len(chat.keys)]
        ]
        return max(found, key=lambda chat: len(chat.keys), default=None)

    def _started(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return asyncio.get_running_loop().create_task(work, context=self._context)

    async def _generate(self, parent: _Chat | None, request: ChatRequest) -> list[Answer]:
        prompt = await self._prompt(parent, request)
        gconfig = self._bounds(len(prompt), request.max_tokens, request.stop)
        self._count(request.n)
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
                response=r,
            )
            for r in responses
        ]

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
            return self._renderer.whole(request.messages, request.tools)
        before = parent.turn.path_tokens()
        rest = request.messages[len(parent.messages) :]
        return before + self._renderer.after(parent.messages, rest, request.tools, before[-1])

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
        asked = digest(key)
        first = self._asked[asked]
        self._asked[asked] += n
        version = self._seeded_at
        if version is None:
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
        # what the chat before has is kept once
        before_messages = () if parent is None else parent.messages
        messages = tuple(
            known if known == message else message
            for known, message in zip_longest(before_messages, request.messages)
        )
        before_keys = () if parent is None else parent.keys
        for answer in answers:
            turn = self.trajectory.wrote(answer.response, after=read)
            self._turns[answer.id] = turn
            self._chats.append(
                _Chat(
                    messages=(*messages, answer.message),
                    keys=(
                        *before_keys,
                        *keys[len(before_keys) :],
                        *keys_of([answer.message]),
                    ),
                    tools=digest(request.tools),
                    turn=turn,
                )
            )
