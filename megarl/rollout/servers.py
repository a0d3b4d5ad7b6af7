"""Knows the generation servers: which there are, which of them gets a request, how they are called.

A server that gives no answer to a request is asked last until it answers again; one that gives none
to a control call is lost: it missed what keeps servers alike. A lost server that answers again
joins at the next pause: it gets the weights of the update that follows, and requests once it serves
them. Until then it may hold any weights, and so may one that was silent: it shows its version
before it gets a request.

An episode stays with its *home*, the server whose prefix cache holds its earlier turns, until that
server is lost or overloaded. Everything else goes where the fewest tokens are outstanding: those of
prompts, and those that answers are expected to bring. Requests differ in length by orders of
magnitude, so their number says little.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from logging import DEBUG, WARNING
from typing import Any

import aiohttp

from megarl.api.records import INITIAL_VERSION, WeightUpdateMeta
from megarl.config.recipe_engines import ADDRESSES_ENV, server_addresses
from megarl.config.rollout import RolloutConfig
from megarl.observability.logging import get_logger
from megarl.rollout.episode_context import Home
from megarl.utils.http import (
    SIGN_OF_LIFE,
    STRANGER,
    HttpError,
    as_object,
    call_server,
    open_session,
    shown,
    split_address,
    while_alive,
)

log = get_logger(__name__)

POLL_INTERVAL = 0.2
PROBE_TIMEOUT = 30.0  # of one /health or /model_info; SGLang's /health generates a token
# how long a pause waits to hear from lost servers; those that are back answer at once
RETURN_TIMEOUT = 1.0
CLOSE_TIMEOUT = 5.0  # of a resume at the end
LEARN = 1 / 64  # weight of the latest answer in the mean that tells how long the next will be


class ServerState(Enum):
    """Says what a server gets; the value of each state is its meaning."""

    SERVING = "gets requests and control calls"
    JOINING = "paused; gets control calls, and requests once it serves the weights of an update"
    LOST = "gets nothing"


@dataclass(eq=False)
class Server:
    """Holds what the client knows of a server.

    address: host:port. outstanding: tokens of the requests under way, prompts and expected answers.
    silent: its last call got no answer. rests_until: the time (time.monotonic) until which it asked
    to be left alone. generating: the /generate calls. released: the parts of its memory that it has
    given back (ServerMemory), None where that is not known. empty: its weights were released and
    not updated since. paused: it was asked to pause, and not yet to go on.
    """

    address: str
    state: ServerState = ServerState.SERVING
    outstanding: float = 0.0
    silent: bool = False
    rests_until: float = 0.0
    generating: set[asyncio.Future[Any]] = field(default_factory=set)
    released: frozenset[str] | None = frozenset()
    empty: bool = False
    paused: bool = False

    @property
    def rests(self) -> bool:
        """Returns whether it asked to be left alone until later."""
        return self.rests_until > time.monotonic()


class ServerChoice:
    """Chooses servers, and learns how long answers are.

    affinity: a home is overloaded where the tokens outstanding there exceed this many times those
        that the least loaded server would have with the request; 0 gives up homes.
    """

    def __init__(self, *, affinity: float) -> None:
        self._affinity = affinity
        self._share = 1.0  # of max_new_tokens that answers have taken
        self._next = 0

    def expected(self, prompts: int, budget: int) -> float:
        """Returns the tokens that a request brings: those of its prompts, and the part of its
        budget that answers have used lately."""
        return prompts + self._share * budget

    def learn(self, written: int, budget: int) -> None:
        """Notes the length of an answer that ended by itself, in tokens."""
        if budget > 0:
            self._share += LEARN * (written / budget - self._share)

    def pick(
        self,
        servers: Sequence[Server],
        tokens: float,
        *,
        home: Home | None = None,
        avoid: Sequence[str] = (),
    ) -> Server:
        """Returns the server for a request of `tokens`, and makes it the home. Those at addresses
        in `avoid`, which just failed, silent ones and resting ones come last; equals take turns."""

        def ailing(server: Server) -> tuple[int, bool, bool]:
            return avoid.count(server.address), server.silent, server.rests

        n = len(servers)
        order = [servers[(self._next + i) % n] for i in range(n)]
        best = min(order, key=lambda s: (*ailing(s), s.outstanding))
        if home is not None and self._affinity:
            most = self._affinity * (best.outstanding + tokens)  # where a home is not overloaded
            for server in servers:
                well = ailing(server) <= ailing(best) and server.outstanding <= most
                if server.address == home.first_choice and well:
                    best = server
            home.settle(best.address)
        self._next = (servers.index(best) + 1) % n
        return best


class ServerPool:
    """Talks to the generation servers. All methods run in the event loop that `open` ran in.

    version: that of the last update, as servers report it. changed: called when other servers get
    requests than before.
    """

    def __init__(self, addresses: Sequence[str], *, server_timeout: float = 30.0) -> None:
        if not addresses:
            raise ValueError(
                "no generation server: set rollout.addresses=[host:port,...] or the environment "
                "variable MEGARL_LLM_SERVER_ADDRS, or use megarl.launcher.local, which starts them"
            )
        self._servers = [Server(_normal(a)) for a in addresses]
        self._server_timeout = server_timeout
        self.version: str | None = None
        self.changed: Callable[[], None] = lambda: None
        self._sessions: list[aiohttp.ClientSession] = []  # of control calls; of generation

    # which there are

    @property
    def addresses(self) -> list[str]:
        """Returns host:port of the servers that are not lost."""
        return [s.address for s in self.present]

    @property
    def serving(self) -> list[Server]:
        """Returns the servers that get requests: a joining one is paused, and holds a request until
        it has the weights, but is better than none."""
        return [s for s in self._servers if s.state is ServerState.SERVING] or self.present

    @property
    def present(self) -> list[Server]:
        """Returns the servers that are not lost."""
        return [s for s in self._servers if s.state is not ServerState.LOST]

    def drop(self, lost: Mapping[str, object], *, bound: str = "") -> None:
        """Goes on without the servers `lost` (address -> reason). Raises RuntimeError if no other
        is left. `bound` says how long they were waited for."""
        newly = [s for s in self.present if s.address in lost]
        if not newly:
            return
        for server in newly:
            server.state = ServerState.LOST
            for call in server.generating:
                call.cancel()
        left = len(self.present)
        causes = "; ".join(str(lost[s.address]) for s in newly)
        if not left:
            raise RuntimeError(f"no generation server is left: {causes}{bound}")
        log.warning("going on with %d server(s), without those lost: %s%s", left, causes, bound)
        self.changed()

    def serves(self, version: int) -> None:
        """Notes that all servers that are not lost serve `version` now."""
        self.version = str(version)
        for server in self.present:
            server.state, server.empty = ServerState.SERVING, False
        self.changed()

    def follow(self, addresses: Sequence[str], version: str | None) -> None:
        """Has the servers be those at `addresses`, and serve `version`, as the pool of another
        process has found. Requests to others are given up."""
        known = {s.address: s for s in self._servers}
        self._servers = [known[a] if a in known else Server(a) for a in addresses]
        for server in self._servers:
            server.state = ServerState.SERVING
        for call in (c for s in known.values() if s.address not in addresses for c in s.generating):
            call.cancel()
        self.version = version

    async def check_version(self, server: Server) -> None:
        """Asks a silent server for its version: another process may be at its address now. Raises
        HttpError where it has none, or one from before the last update."""
        info = await self._model_info(server, self._server_timeout)
        self.check_served(server, info, "/model_info")

    def check_served(self, server: Server, info: Mapping[str, Any], path: str) -> None:
        """Drops a server and raises HttpError where it reports, after an update, the weights that
        servers start with: it was started again."""
        if self.version is not None and info.get("weight_version") == INITIAL_VERSION:
            reason = (
                f"serves the weights it started with, not version {self.version}: it was started "
                "again"
            )
            error = HttpError(server.address, path, reason)
            self.drop({server.address: error})
            raise error

    # pauses, at which servers join and leave

    async def pause(
        self, body: dict[str, Any], *, timeout: float, listed: Sequence[str] | None = None
    ) -> None:
        """Pauses every server, the lost ones that answer again among them: they join. listed: the
        servers there are to be from now on, None for no change. New ones join once they answer;
        the others are let go, unless no server would be left."""
        if listed is not None:
            self._add(listed)
        lost = [s for s in self._servers if s.state is ServerState.LOST]
        returned = await asyncio.gather(*(self._is_back(s, body) for s in lost))
        for server in (s for s, back in zip(lost, returned, strict=True) if back):
            server.state, server.silent = ServerState.JOINING, False
            log.info("server %s is back: it gets the weights of this update", server.address)
        for server in self.present:
            server.paused = True
        await self.control("/pause_generation", body, timeout=timeout)
        if listed is not None:
            await self._let_go(listed)

    async def go_on(self, *, timeout: float) -> None:
        """Has every server go on. One that is lost stays as it is until it joins, or the run
        ends."""
        await self.control("/continue_generation", {}, timeout=timeout)
        for server in self.present:
            server.paused = False

    def _add(self, listed: Sequence[str]) -> None:
        """Takes the listed servers that are new for lost ones, which join when they answer."""
        for address in dict.fromkeys(listed):
            if address not in [s.address for s in self._servers]:
                self._servers.append(Server(address, state=ServerState.LOST))
                log.info("server %s is new: it joins at the update at which it answers", address)

    async def _let_go(self, listed: Sequence[str]) -> None:
        """Removes the servers that are not listed, which are paused, and has them go on by
        themselves. Their last answers are waited for: the pause has cut them short."""
        leaving = [s for s in self._servers if s.address not in listed]
        if leaving and not any(s.address in listed for s in self.present):
            log.warning("no listed server answers: keeping %s", [s.address for s in leaving])
            return
        for server in leaving:
            self._servers.remove(server)
            if server.generating:
                _, late = await asyncio.wait(set(server.generating), timeout=RETURN_TIMEOUT)
                for call in late:  # its request goes to another server
                    call.cancel()
            log.info("server %s leaves the run: it is listed no more", server.address)
        self.changed()
        await self._continue(leaving)

    async def _is_back(self, server: Server, pause: dict[str, Any]) -> bool:
        try:
            info = await self._model_info(server, RETURN_TIMEOUT)
            if info["weight_version"] == INITIAL_VERSION:  # a new process
                server.released, server.empty = frozenset(), False
            if server.released is None:
                log.debug("still lost: %s was asked for memory and gave no answer", server.address)
                return False
            server.paused = True
            await self.call(
                server.address, "POST", "/pause_generation", pause, timeout=PROBE_TIMEOUT
            )
        except HttpError as e:
            log.debug("still lost: %s", e)
            return False
        return True

    async def _continue(self, servers: Sequence[Server]) -> None:
        """Has servers that this run leaves go on where it has paused them, lost ones, too, which
        may be back; warns of those that cannot, or do not answer though they were not lost. A lost
        one that had released memory is left alone: a new process in its place has released none."""
        paused = [
            s for s in servers if s.paused and not (s.released and s.state is ServerState.LOST)
        ]
        answers = await asyncio.gather(*map(self._leave, paused), return_exceptions=True)
        for server, answer in zip(paused, answers, strict=True):
            if isinstance(answer, Exception):
                expected = server.state is ServerState.LOST and not server.empty
                log.log(DEBUG if expected else WARNING, "left paused: %s", answer)

    async def _leave(self, server: Server) -> None:
        """Has a server go on with all its memory. Raises HttpError where it cannot."""
        path = "/continue_generation"
        if server.empty:
            reason = "its weights were released, and no others came: update them, or start it again"
            raise HttpError(server.address, path, reason)
        if server.released:  # the KV cache
            tags = {"tags": ["kv_cache", "cuda_graph"]}
            await self.call(
                server.address, "POST", "/resume_memory_occupation", tags, timeout=CLOSE_TIMEOUT
            )
        await self.call(server.address, "POST", path, {}, timeout=CLOSE_TIMEOUT)

    # waits

    async def unhealthy(self, *, timeout: float = PROBE_TIMEOUT) -> dict[str, HttpError]:
        """Returns the servers whose /health does not answer 200, with the reason."""
        answers = await self.everywhere("GET", "/health", timeout=timeout)
        return {a: e for a, e in answers.items() if isinstance(e, HttpError)}

    async def wait_healthy(self, setup_timeout: float) -> None:
        """Returns once every server is healthy and speaks the protocol.

        Raises RuntimeError with every cause after `setup_timeout` seconds, and at once for an
        answer that no server of ours gives while it starts.
        """
        deadline = time.monotonic() + setup_timeout
        while True:
            left = deadline - time.monotonic()
            patience = max(1.0, min(PROBE_TIMEOUT, left))
            down = await self.unhealthy(timeout=patience)
            if not down:
                await asyncio.gather(*(self._model_info(s, patience) for s in self.present))
                return
            for error in down.values():
                if 400 <= (error.status or 0) < 500:
                    raise RuntimeError(f"{error}: {STRANGER}")
            if left <= POLL_INTERVAL:
                causes = "\n  ".join(map(str, down.values()))
                raise RuntimeError(
                    f"{len(down)} of {len(self.addresses)} generation servers were not reachable "
                    f"within rollout.setup_timeout={setup_timeout:g} s:\n  {causes}\n"
                    f"Start them, correct rollout.addresses or {ADDRESSES_ENV}, or raise "
                    "rollout.setup_timeout if they are still loading."
                )
            await asyncio.sleep(POLL_INTERVAL)

    async def wait_for_version(self, meta: WeightUpdateMeta) -> None:
        """Returns once every server reports `meta.version`; drops those that are gone or silent.
        Raises TimeoutError after `meta.timeout` seconds."""
        wanted, patience = str(meta.number), self._server_timeout
        deadline = time.monotonic() + meta.timeout
        while True:
            left = deadline - time.monotonic()
            timeout = max(1.0, min(patience, left))
            infos = await self.everywhere("GET", "/model_info", timeout=timeout)
            self.drop(silent(infos, slow=left >= patience))
            served = {a: _served(info) for a, info in infos.items() if a in self.addresses}
            late = {a: version for a, version in served.items() if version != wanted}
            if not late:
                self.serves(meta.number)
                return
            if left <= POLL_INTERVAL:
                who = "; ".join(f"{a} serves {version}" for a, version in late.items())
                raise TimeoutError(
                    f"weights of version {wanted} did not reach {len(late)} of {len(infos)} "
                    f"servers within weight_sync.timeout={meta.timeout:g} s: {who}"
                )
            await asyncio.sleep(POLL_INTERVAL)

    async def context_length(self) -> int | None:
        """Returns the smallest context of the servers, in tokens; None where none of them says."""
        infos = await self.everywhere("GET", "/server_info", timeout=PROBE_TIMEOUT)
        lengths = [info.get("context_length") for info in infos.values() if isinstance(info, dict)]
        return min((n for n in lengths if isinstance(n, int)), default=None)

    # calls

    async def open(self) -> None:
        """Opens the HTTP sessions; no server is called yet."""
        self._sessions = [open_session(), open_session(keeps_connections=True)]

    async def close(self, *, resume: bool = False) -> None:
        """Closes the HTTP sessions. `resume` has servers go on first that this pool has paused,
        since nobody else will: the next user of the servers must not find them paused."""
        if self._sessions and resume:
            await self._continue(self._servers)
        for session in self._sessions:
            await session.close()
        self._sessions = []

    async def control(
        self,
        path: str,
        body: dict[str, Any],
        *,
        timeout: float,
        only: Collection[str] | None = None,
    ) -> None:
        """Sends a POST to every server, or to those `only`, to be answered in `timeout` s
        (weight_sync.timeout). Drops servers that give no answer, and raises one RuntimeError that
        names all that refused."""
        answers = await self.everywhere("POST", path, body, timeout=timeout, only=only)
        errors = {a: e for a, e in answers.items() if isinstance(e, HttpError)}
        if refused := [str(e) for e in errors.values() if e.status is not None]:
            raise RuntimeError("; ".join(refused))
        self.drop(
            errors,
            bound=f" (weight_sync.timeout={timeout:g} s, "
            f"weight_sync.server_timeout={self._server_timeout:g} s)",
        )

    async def everywhere(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout: float,
        only: Collection[str] | None = None,
    ) -> dict[str, Any]:
        """Makes one control call to every server at once, or to those `only`, and returns {address:
        answer or its HttpError}. A server that gives no sign of life does not get the whole
        `timeout` (s)."""
        servers = [s for s in self.present if only is None or s.address in only]

        async def ask(address: str) -> Any:
            answer = self.call(address, method, path, body, timeout=timeout)
            look = partial(self.call, address, "GET", SIGN_OF_LIFE, timeout=self._server_timeout)
            return await while_alive(answer, look)

        answers = await asyncio.gather(*(ask(s.address) for s in servers))
        for server, answer in zip(servers, answers, strict=True):
            server.silent = isinstance(answer, HttpError) and answer.status is None
        return {s.address: answer for s, answer in zip(servers, answers, strict=True)}

    async def call(
        self,
        address: str,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout: float | None,
    ) -> Any:
        """Returns the decoded answer, which may take `timeout` seconds (None: for ever). Every
        failure is an HttpError naming the server."""
        assert self._sessions, "ServerPool.open() was not awaited"
        # a kept connection may end just when a call begins: another request makes up for it
        session = self._sessions[path == "/generate"]
        return await call_server(session, method, address, path, body, timeout=timeout)

    async def _model_info(self, server: Server, timeout: float) -> dict[str, Any]:
        path = "/model_info"
        info = await self.call(server.address, "GET", path, timeout=timeout)
        return as_object(server.address, path, info, "weight_version")


def listed_servers(config: RolloutConfig) -> list[str] | None:
    """Returns the servers there are to be, where rollout.addresses_file lists some; None, with a
    warning, where it cannot be read now."""
    if not config.addresses_file:
        return None
    try:
        return [_normal(a) for a in server_addresses(config)]
    except (OSError, ValueError) as e:  # half written, perhaps: the next update reads it again
        log.warning("rollout.addresses_file=%s: no change of servers: %s", config.addresses_file, e)
        return None


def _normal(address: str) -> str:
    """Returns an address as host:port. Raises ValueError for what is none."""
    return "{}:{}".format(*split_address(address))


def silent(answers: Mapping[str, Any], *, slow: bool = True) -> dict[str, HttpError]:
    """Returns the servers, of everywhere's `answers`, that gave none, with their errors; those that
    are only slow, too, or without them."""
    unheard = {a: e for a, e in answers.items() if isinstance(e, HttpError) and e.status is None}
    return {a: e for a, e in unheard.items() if slow or not isinstance(e.__cause__, TimeoutError)}


def _served(info: Any) -> str:
    """Returns the weight version of a /model_info answer, or why there is none."""
    if not isinstance(info, dict):
        return f"nothing ({info if isinstance(info, HttpError) else shown(info)})"
    return str(info.get("weight_version"))
