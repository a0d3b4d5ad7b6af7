"""Has servers write samples, over as many requests as pauses, failures and time limits ask for.

A try of a request is one call of one server, under ids of its own. What a server has written counts
whatever ends the try: a pause, an update, a time limit. The next request of such a sample holds the
prompt and the tokens so far, and the remaining budget. Its seed stays, since seeded sampling is
keyed by the position in the sequence. (A stop string that straddles the interruption is not seen;
stop tokens are.) A failed try is made again at other servers while `Retries` allows it.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megarl.api.inference import RolloutFailed
from megarl.api.records import INITIAL_VERSION, ModelRequest, ModelResponse
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig
from megarl.observability.logging import get_logger
from megarl.rollout.episode_context import Home, current_episode
from megarl.rollout.loop_thread import LoopThread
from megarl.rollout.servers import Server, ServerChoice, ServerPool
from megarl.utils.http import MAX_REST, STRANGER, HttpError, Retries, is_final, shown
from megarl.wire.routes import Routes, RouteShape

log = get_logger(__name__)

# aborts in a row, without a token and without a pause of ours, before it is an error
MAX_FRUITLESS_ABORTS = 20
EXACT_TRIES = 2  # of those in a row that go on with an answer to the bit
ABORT_DELAY = 0.1  # seconds before a sample that somebody else's pause aborted is sent again
ABORT_TIMEOUT = 10.0  # seconds in which a server brings the tokens of a request that it aborts
SETTLE_TIMEOUT = 5.0  # seconds a pause's partial answers may take to arrive
POLL_INTERVAL = 0.01
_FIX = "start a server that speaks SGLang's protocol, or correct rollout.addresses"


class Generator:
    """Sends samples to the servers of `pool` until none is unfinished, but none while it is held.
    Its methods run in the pool's event loop.

    patience: seconds that a request waits while it is held. adapter: the name of the adapter that
    requests ask for, None for none. cache: begins the keys of the servers' caches, the same in all
    processes of a run.
    """

    def __init__(self, pool: ServerPool, config: RolloutConfig, *, patience: float) -> None:
        self._pool, self._choice = pool, ServerChoice(affinity=config.affinity)
        self._timeout, self._retry_timeout = config.request_timeout, config.retry_timeout
        self._patience, self._keeps_kv = patience, config.kv_after_sync == "keep"
        self.adapter: str | None = None
        self.cache = uuid.uuid4().hex[:8]
        self._version = 0
        self._admitted = asyncio.Event()
        self._admitted.set()
        self._holds = 0
        self._under_way = 0  # requests

    def set_version(self, version: int) -> None:
        """Sets the version of the weights. A lower one than before begins new keys of the servers'
        caches: what is cached under its number, and those that follow, comes from other weights."""
        if version < self._version:
            self.cache = uuid.uuid4().hex[:8]
        self._version = version

    # pauses

    @property
    def held(self) -> bool:
        """Returns whether no request is sent."""
        return not self._admitted.is_set()

    def hold(self) -> None:
        """Sends no more requests until `release`."""
        self._admitted.clear()
        self._holds += 1

    def release(self) -> None:
        """Sends requests again."""
        self._admitted.set()

    async def settled(self, timeout: float = SETTLE_TIMEOUT) -> bool:
        """Waits, while it is held, for the answers under way; returns whether all came in `timeout`
        seconds."""
        deadline = time.monotonic() + timeout
        while self._under_way and time.monotonic() < deadline:
            await asyncio.sleep(POLL_INTERVAL)
        return not self._under_way

    async def _admission(self) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await self._admitted.wait()
        except TimeoutError:
            raise TimeoutError(
                f"generation was paused for {self._patience:.0f} s: pause() without resume()"
            ) from None

    # samples

    async def generate(self, samples: Sequence[Sample]) -> list[ModelResponse]:
        """Returns the samples' responses, once all have ended. Samples that a pause aborts are sent
        again, and those of a request that fails. Raises RolloutFailed ("server") where that goes on
        for too long, RuntimeError where no server is left, HttpError for a refusal (4xx but 429)
        and ValueError for a broken answer."""
        episode = current_episode.get()
        home = None if episode is None else episode.home
        begun = self._version if episode is None or episode.began is None else episode.began
        fruitless, holds = 0, self._holds
        retries, failed = Retries(self._retry_timeout), list[str]()
        while unfinished := [s for s in samples if not s.done]:
            await self._admission()
            if holds != self._holds:  # a pause is not the time of a server that fails
                holds, retries = self._holds, Retries(self._retry_timeout)
            try:
                # reading a token at a time may take longer than a request may
                exact = fruitless < EXACT_TRIES
                gained = await self._ask(unfinished, begun, home, failed, exact=exact)
            except HttpError as error:
                # on its way across an update: the adapter it names is gone
                if self.adapter is None or holds == self._holds:
                    await self._rest(retries, error)
                    failed.append(error.server)
                continue
            retries = Retries(self._retry_timeout)
            failed.clear()
            if holds == self._holds and not all(s.done for s in unfinished):
                progress = gained or any(s.done for s in unfinished)
                fruitless = 0 if progress else fruitless + 1
                if fruitless == MAX_FRUITLESS_ABORTS:
                    raise RolloutFailed(
                        "server",
                        f"request {unfinished[0].request.rid}: aborted {fruitless} times in a row "
                        "without a token; something keeps aborting the servers' requests",
                    )
                await asyncio.sleep(ABORT_DELAY)
        return [s.response for s in samples]

    async def _rest(self, retries: Retries, error: HttpError) -> None:
        """Waits before the next try. Raises what `generate` raises where there is none."""
        if is_final(error):
            raise error
        if (seconds := retries.rest()) is not None:
            log.debug("failure %d: %s", retries.failures, error)
            await asyncio.sleep(seconds)
            return
        present = self._pool.present
        if all(server.silent for server in present):
            self._pool.drop({server.address: error for server in present})
        raise RolloutFailed(
            "server",
            f"generation failed {retries.failures} times in {self._retry_timeout:g} s "
            f"(rollout.request_timeout, at most 120), the last time because {error}",
        ) from error

    async def _ask(
        self,
        samples: Sequence[Sample],
        begun: int,
        home: Home | None,
        failed: Sequence[str],
        *,
        exact: bool,
    ) -> int:
        """Sends one request for all, whose episode began at version `begun`, if possible to none of
        the servers that `failed`, and takes the answers in; returns how many tokens came. exact: a
        deterministic server reads what these weights wrote as it did then. Raises HttpError where
        it fails, RuntimeError where no server is left."""
        body = batch_body(
            samples, self._cache_key(begun), self.adapter, self._version if exact else None
        )
        routed = routes_from(samples) or 0
        budget = sum(params["max_new_tokens"] for params in body["sampling_params"])
        tokens = self._choice.expected(sum(map(len, body["input_ids"])), budget)
        if not (serving := self._pool.serving):
            raise RuntimeError("no generation server is left")
        server = self._choice.pick(serving, tokens, home=home, avoid=failed)
        server.outstanding += tokens
        self._under_way += 1
        try:
            await self._ready(server)
            items = _checked(await self._answer(server, body), len(samples), server.address)
            for item in items:
                self._pool.check_served(server, item["meta_info"], "/generate")
        except HttpError as error:
            if not is_final(error):
                _note(server, error)
            raise
        finally:
            server.outstanding -= tokens
            self._under_way -= 1
        _note(server)
        try:
            pairs = zip(samples, items, strict=True)
            gained = sum(sample.absorb(item, routes_from=routed) for sample, item in pairs)
        except ValueError as e:
            raise ValueError(f"server {server.address}: /generate: {e}") from e
        for sample in samples:
            if sample.done:
                most = sample.request.gconfig.max_new_tokens
                self._choice.learn(sample.response.output_len, most)
        return gained

    def _cache_key(self, begun: int) -> str:
        """Returns the key under which a server shares KV among requests, with an update between
        them, too. It names a version, and the run, for servers may have others' KV.

        With kv_after_sync=keep all requests of an episode name the version at which it began: they
        go on with its KV, and no KV is older than the episode that reads it.
        """
        version = begun if self._keeps_kv else self._version
        return f"megarl-{self.cache}-v{version}"

    # one try

    async def _ready(self, server: Server) -> None:
        """Waits as long as the server asked for, and finds out about it where it was silent."""
        if (left := server.rests_until - time.monotonic()) > 0:
            await asyncio.sleep(left)
        if server.silent:
            await self._pool.check_version(server)

    async def _answer(self, server: Server, body: dict[str, Any]) -> Any:
        """Returns a server's answer. One that takes longer than the timeout is aborted: it has the
        tokens so far. A pause in which the server keeps the request does not count."""
        call = asyncio.ensure_future(
            self._pool.call(server.address, "POST", "/generate", body, timeout=None)
        )
        server.generating.add(call)
        try:
            while not (await asyncio.wait({call}, timeout=self._timeout))[0]:
                if not self.held:
                    await self._cut_short(call, server, body["rid"])
            if call.cancelled():  # by ServerPool.drop
                raise HttpError(server.address, "/generate", "was given up: the server is lost")
            return call.result()
        finally:
            server.generating.discard(call)
            call.cancel()

    async def _cut_short(
        self, call: asyncio.Future[Any], server: Server, rids: Sequence[str]
    ) -> None:
        """Has a server answer a request with the tokens it has. Raises HttpError where it does
        not."""
        aborts = (
            self._pool.call(
                server.address, "POST", "/abort_request", {"rid": rid}, timeout=ABORT_TIMEOUT
            )
            for rid in rids
        )
        for refused in await asyncio.gather(*aborts, return_exceptions=True):
            if isinstance(refused, BaseException):
                log.debug("not aborted: %s", refused)
        if not (await asyncio.wait({call}, timeout=ABORT_TIMEOUT))[0]:
            reason = f"gave no answer within {self._timeout:g} s"
            raise HttpError(server.address, "/generate", reason) from TimeoutError()


@dataclass(frozen=True, kw_only=True)
class Connection:
    """Holds what an open client has: its event loop, the servers, and what sends them samples."""

    loop: LoopThread
    pool: ServerPool
    samples: Generator


def _note(server: Server, error: HttpError | None = None) -> None:
    """Notes how a request ended; one warning for however many a server leaves unanswered."""
    silent = error is not None and error.status is None
    if error is not None and not (silent and server.silent):
        log.warning("%s", error)
    server.silent = silent
    if error is not None and error.retry_after is not None:
        server.rests_until = time.monotonic() + min(error.retry_after, MAX_REST)


def _checked(answer: Any, samples: int, address: str) -> list[dict[str, Any]]:
    """Returns the answers to so many samples. Raises RuntimeError for what is none."""
    items = answer if isinstance(answer, list) else [answer]
    if len(items) != samples or not all(
        isinstance(i, dict) and isinstance(i.get("meta_info"), dict) for i in items
    ):
        raise RuntimeError(
            f"server {address}: /generate answered {shown(answer)!r} to {samples} samples: "
            f"{STRANGER}"
        )
    return items


class Sample:
    """Collects the tokens of one ModelRequest over as many requests as it takes. Raises ValueError
    for a request without tokens. routes: the model's, where the answer is to have them."""

    def __init__(
        self, request: ModelRequest, *, seed: int | None, routes: RouteShape | None = None
    ) -> None:
        if not request.input_ids:
            raise ValueError(f"request {request.rid}: input_ids is empty")
        self.request, self.seed = request, seed
        self.response = ModelResponse(input_tokens=list(request.input_ids), stop_reason="")
        self.routes: Routes | None = None
        if routes is not None:
            start, n = min(request.routes_from, len(request.input_ids)), len(request.input_ids)
            self.routes = Routes(routes, start=start, prompt_len=n)
            self.response.routes_from, self.response.routed_experts = start, self.routes.known
        self._begun = time.monotonic()

    @property
    def done(self) -> bool:
        """Returns whether the sample has ended."""
        return bool(self.response.stop_reason)

    @property
    def tokens(self) -> list[int]:
        """Returns the prompt and the tokens generated so far."""
        return self.response.input_tokens + self.response.output_tokens

    def sampling_params(self) -> dict[str, Any]:
        """Returns SGLang's sampling parameters for the next request, with the budget left."""
        config, written = self.request.gconfig, self.response.output_len
        params = _sampling_params(config)
        params["max_new_tokens"] = config.max_new_tokens - written
        params["min_new_tokens"] = max(0, config.min_new_tokens - written)
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        return params

    def absorb(self, item: dict[str, Any], *, routes_from: int = 0) -> int:
        """Takes one answer in, whose routes begin at position `routes_from`; returns how many
        tokens it brought. Raises ValueError for an answer that breaks the protocol and RuntimeError
        for a request that the server gave up on."""
        meta = item["meta_info"]
        tokens, logprobs = _tokens_and_logprobs(item)
        finish = meta.get("finish_reason")
        if not isinstance(finish, dict):
            raise ValueError(f"finish_reason {shown(finish)} is no object; {_FIX}")
        response = self.response
        if response.output_len + len(tokens) > (most := self.request.gconfig.max_new_tokens):
            raise ValueError(
                f"{response.output_len + len(tokens)} tokens where {most} were asked for; {_FIX}"
            )
        versions = _versions(meta, len(tokens))
        if self.routes is not None:
            sent = len(self.tokens)
            self.routes.absorb(meta, sent=sent, got=len(tokens), first=routes_from)
            response.routed_experts = self.routes.known
        response.output_tokens += tokens
        response.output_logprobs += logprobs
        response.output_versions += versions
        self._take_reason(finish)
        return len(tokens)

    def _take_reason(self, finish: dict[str, Any]) -> None:
        """Ends the sample where finish_reason says so. Raises RuntimeError for a refusal."""
        reason = finish.get("type")
        if reason == "abort":
            if finish.get("status_code") is not None:  # a refusal; a pause's abort has none
                raise RuntimeError(
                    f"request {self.request.rid}: server aborted it with status "
                    f"{finish['status_code']}: {finish.get('message', '(no message)')}"
                )
            if self.response.output_len >= self.request.gconfig.max_new_tokens:
                self._finish("length")
        elif reason in ("stop", "length"):
            self._finish(reason)
        else:
            raise ValueError(f"finish_reason {shown(finish)} is not known; {_FIX}")

    def _finish(self, reason: str) -> None:
        self.response.stop_reason = reason
        self.response.latency = time.monotonic() - self._begun


def fill_ids(req: ModelRequest, tokenizer: Any) -> None:
    """Gives a request of text alone the ids of its text. Raises ValueError where there is no
    tokenizer for it."""
    if req.input_ids or not req.text:
        return
    if tokenizer is None:
        raise ValueError(
            f"request {req.rid} has text and no input_ids: give the client a tokenizer "
            "(RemoteSGLangEngine(config, tokenizer=...)), or the request its ids"
        )
    req.input_ids = list(tokenizer(req.text, add_special_tokens=False)["input_ids"])


def batch_body(
    samples: Sequence[Sample],
    extra_key: str,
    adapter: str | None = None,
    version: int | None = None,
) -> dict[str, Any]:
    """Returns the body of ONE /generate request for all samples, each with its own parameters and
    seed. extra_key: of the prefix cache; adapter: the name of the adapter that the servers compute
    with; version: of the weights whose tokens are to be read as they were written."""
    more: dict[str, Any] = {} if adapter is None else {"lora_path": [adapter] * len(samples)}
    if (start := routes_from(samples)) is not None:  # one for all samples of a request
        more |= {"return_routed_experts": True, "routed_experts_start_len": start}
    return more | {
        "rid": [f"{s.request.rid}-{uuid.uuid4().hex[:8]}" for s in samples],
        "input_ids": [s.tokens for s in samples],
        "written": [sum(v == version for v in s.response.output_versions) for s in samples],
        "sampling_params": [s.sampling_params() for s in samples],
        "return_logprob": True,
        "extra_key": extra_key,
    }


def routes_from(samples: Sequence[Sample]) -> int | None:
    """Returns the first position whose routes one of the samples lacks; None where they are to have
    none."""
    return min((s.routes.end for s in samples if s.routes is not None), default=None)


def _sampling_params(config: GenerationHyperparameters) -> dict[str, Any]:
    params: dict[str, Any] = {"ignore_eos": config.ignore_eos}
    if config.greedy:
        params["temperature"] = 0.0
    else:
        if config.temperature <= 0:
            raise ValueError(f"gconfig.temperature={config.temperature}: use greedy=true for 0")
        params |= {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
        }
    if config.stop_token_ids:
        params["stop_token_ids"] = list(config.stop_token_ids)
    if config.stop:
        params["stop"] = list(config.stop)
    return params


def _tokens_and_logprobs(item: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Returns tokens and logprobs, both from output_token_logprobs ([logprob, id, text] each), so
    that they cannot disagree."""
    entries, ids = item["meta_info"].get("output_token_logprobs"), item.get("output_ids")
    if entries is None:  # a request aborted while it queued has a reduced meta_info
        if ids:
            raise ValueError(f"tokens came without output_token_logprobs; {_FIX}")
        return [], []
    if not isinstance(entries, list) or not (
        {type(e) for e in entries} <= {list}  # all at a time: there is one of every token
        and min(map(len, entries), default=2) > 1
        and {type(e[0]) for e in entries} <= {int, float}
        and {type(e[1]) for e in entries} <= {int}
    ):
        raise ValueError(
            f"output_token_logprobs {shown(entries)} is no list of [logprob, token id, ...]; {_FIX}"
        )
    tokens, logprobs = [e[1] for e in entries], [float(e[0]) for e in entries]
    if isinstance(ids, list) and len(ids) != len(entries):
        raise ValueError(f"{len(ids)} tokens came with {len(entries)} logprobs; {_FIX}")
    if not all(map(math.isfinite, logprobs)):
        bad = next(lp for lp in logprobs if not math.isfinite(lp))
        raise ValueError(
            f"the server answered a logprob of {bad}; its weights are broken, or overflow in its "
            "dtype"
        )
    return tokens, logprobs


def _versions(meta: dict[str, Any], count: int) -> list[int]:
    """Returns the weight version of each of `count` tokens, from spans [{version, start, end}]."""
    spans = meta.get("weight_versions") or [
        {"version": meta.get("weight_version", INITIAL_VERSION), "start": 0, "end": count}
    ]
    versions: list[int | None] = [None] * count
    try:
        for span in spans:
            number = _version(str(span["version"]))
            start = max(0, span["start"])
            end = max(start, min(span["end"], count))
            versions[start:end] = [number] * (end - start)
    except (TypeError, KeyError):
        raise ValueError(
            f"weight_versions {shown(spans)} is no list of version, start, end; {_FIX}"
        ) from None
    if None in versions:
        raise ValueError(
            f"weight_versions {shown(spans)} do not cover all {count} output tokens; {_FIX}"
        )
    return [v for v in versions if v is not None]


def _version(text: str) -> int:
    """Returns the number of a server's weight version, 0 for the weights it started with. Raises
    ValueError for other text."""
    try:
        return 0 if text == INITIAL_VERSION else int(text)
    except ValueError:
        raise ValueError(
            f"server weight_version {text!r} is not a number: only megarl may update its weights"
        ) from None
