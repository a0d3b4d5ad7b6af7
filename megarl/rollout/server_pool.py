"""Keeps the servers a client talks to, and makes control calls to all of them.

No other module knows which of them are there. A server that gives no answer to a request is asked
last until it answers again; one that gives none to a control call is lost: it missed what keeps
servers alike. A lost server that answers again joins at the next pause: it gets the weights of the
update that follows, and requests once it serves them. Until then it may hold any weights, and so
may one that was silent: it shows its version before it gets a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import aiohttp

from megarl.api.records import INITIAL_VERSION
from megarl.config.recipe_engines import server_addresses
from megarl.config.rollout import RolloutConfig
from megarl.observability.logging import get_logger
from megarl.rollout.server_choice import Server, State
from megarl.utils.http import (
    LINGER,
    Deadline,
    HttpError,
    accepted,
    as_object,
    authorization,
    decode_answer,
    in_thread,
    outcomes,
    retry_after,
    shown,
    split_address,
    start_calls,
)

log = get_logger(__name__)

POLL_INTERVAL = 0.2
PROBE_TIMEOUT = 30.0  # of one /health or /model_info; SGLang's /health generates a token
# how long a pause waits to hear from lost servers; those that are back answer at once
RETURN_TIMEOUT = 1.0
CLOSE_TIMEOUT = 5.0  # of a resume at the end
CONNECT_TIMEOUT = 30.0  # of one connection


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
        self._session: aiohttp.ClientSession | None = None

    @property
    def addresses(self) -> list[str]:
        """Returns host:port of the servers that are not lost."""
        return [s.address for s in self.present]

    @property
    def serving(self) -> list[Server]:
        """Returns the servers that get requests: a joining one is paused, and holds a request until
        it has the weights, but is better than none."""
        return [s for s in self._servers if s.state is State.SERVING] or self.present

    @property
    def present(self) -> list[Server]:
        """Returns the servers that are not lost."""
        return [s for s in self._servers if s.state is not State.LOST]

    async def open(self) -> None:
        """Opens the HTTP session; no server is called yet."""
        connector = aiohttp.TCPConnector(limit=0)  # concurrency is bounded by the executor
        self._session = aiohttp.ClientSession(connector=connector, headers=authorization())

    async def close(self, *, resume: bool = False) -> None:
        """Closes the HTTP session. `resume` has paused servers go on first, since nobody else will:
        the next user of the servers must not find them paused."""
        if self._session is not None:
            if resume:
                await self._continue(self.present)
            await self._session.close()
            self._session = None

    async def _continue(self, servers: Sequence[Server]) -> None:
        """Has servers that this run leaves go on; warns of those that do not answer, or cannot."""
        calls = (self._leave(s) for s in servers)
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, Exception):
                log.warning("left paused: %s", answer)

    async def _leave(self, server: Server) -> None:
        """Has a server go on with all its memory. Raises HttpError where it cannot."""
        path = "/continue_generation"
        if server.empty:
            said = "its weights were released, and no others came: update them, or start it again"
            raise HttpError(server.address, path, said)
        if server.released:  # the KV cache
            tags = {"tags": ["kv_cache", "cuda_graph"]}
            await self.call(
                server.address, "POST", "/resume_memory_occupation", tags, timeout=CLOSE_TIMEOUT
            )
        await self.call(server.address, "POST", path, {}, timeout=CLOSE_TIMEOUT)

    async def check_version(self, server: Server) -> None:
        """Asks a silent server for its version: another process may be at its address now. Raises
        HttpError where it has none, or one from before the last update."""
        timeout = self._server_timeout
        info = await self.call(server.address, "GET", "/model_info", timeout=timeout)
        info = as_object(server.address, "/model_info", info, "weight_version")
        self.check_served(server, info, "/model_info")

    def check_served(self, server: Server, info: Mapping[str, Any], path: str) -> None:
        """Drops a server and raises HttpError where it reports, after an update, the weights that
        servers start with: it was started again."""
        if self.version is not None and info.get("weight_version") == INITIAL_VERSION:
            version = self.version
            said = (
                f"serves the weights it started with, not version {version}: it was started again"
            )
            error = HttpError(server.address, path, said)
            self.drop({server.address: error})
            raise error

    def drop(self, lost: Mapping[str, object], *, bound: str = "") -> None:
        """Goes on without the servers `lost` (address -> reason). Raises RuntimeError if no other
        is left. `bound` says how long they were waited for."""
        newly = [s for s in self.present if s.address in lost]
        if not newly:
            return
        for server in newly:
            server.state = State.LOST
            for call in server.generating:
                call.cancel()
        left = len(self.present)
        causes = "; ".join(str(lost[s.address]) for s in newly)
        if not left:
            raise RuntimeError(f"no generation server is left: {causes}{bound}")
        log.warning("going on with %d server(s), without those lost: %s%s", left, causes, bound)
        self.changed()

    async def pause(
        self, body: dict[str, Any], *, timeout: float, listed: Sequence[str] | None = None
    ) -> None:
        """Pauses every server, the lost ones that answer again among them: they join. listed: the
        servers there are to be from now on, None for no change. New ones join once they answer;
        the others are let go, unless no server would be left."""
        if listed is not None:
            self._add(listed)
        lost = [s for s in self._servers if s.state is State.LOST]
        returned = await asyncio.gather(*(self._is_back(s, body) for s in lost))
        for server in (s for s, back in zip(lost, returned, strict=True) if back):
            server.state, server.silent = State.JOINING, False
            log.info("server %s is back: it gets the weights of this update", server.address)
        await self.control("/pause_generation", body, timeout=timeout)
        if listed is not None:
            await self._let_go(listed)

    def _add(self, listed: Sequence[str]) -> None:
        """Takes the listed servers that are new for lost ones, which join when they answer."""
        known = {s.address for s in self._servers}
        for address in listed:
            if address not in known:
                known.add(address)
                self._servers.append(Server(address, state=State.LOST))
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
        await self._continue([s for s in leaving if s.state is not State.LOST])

    async def _is_back(self, server: Server, pause: dict[str, Any]) -> bool:
        try:
            info = await self.call(server.address, "GET", "/model_info", timeout=RETURN_TIMEOUT)
            info = as_object(server.address, "/model_info", info, "weight_version")
            if info["weight_version"] == INITIAL_VERSION:  # a new process
                server.released, server.empty = frozenset(), False
            if server.released is None:
                log.debug("still lost: %s was asked for memory and gave no answer", server.address)
                return False
            await self.call(
                server.address, "POST", "/pause_generation", pause, timeout=PROBE_TIMEOUT
            )
        except HttpError as e:
            log.debug("still lost: %s", e)
            return False
        return True

    def serves(self, version: int) -> None:
        """Notes that all servers that are not lost serve `version` now."""
        self.version = str(version)
        for server in self.present:
            server.state, server.empty = State.SERVING, False
        self.changed()

    def follow(self, addresses: Sequence[str], version: str | None) -> None:
        """Has the servers be those at `addresses`, and serve `version`, as the pool of another
        process has found. Requests to others are given up."""
        known = {s.address: s for s in self._servers}
        self._servers = [known[a] if a in known else Server(a) for a in addresses]
        for server in self._servers:
            server.state = State.SERVING
        for call in (c for s in known.values() if s.address not in addresses for c in s.generating):
            call.cancel()
        self.version = version

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
        calls = start_calls([s.address for s in servers], method, path, body, timeout)
        deadline = Deadline(timeout + LINGER, patience=self._server_timeout)
        answers: dict[str, Any] = await asyncio.wrap_future(
            in_thread(outcomes, calls, path, deadline)
        )
        for server in servers:
            answer = answers[server.address]
            server.silent = isinstance(answer, HttpError) and answer.status is None
        return answers

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

    async def unhealthy(self, *, timeout: float = PROBE_TIMEOUT) -> dict[str, HttpError]:
        """Returns the servers whose /health does not answer 200, with the reason."""
        answers = await self.everywhere("GET", "/health", timeout=timeout)
        return {a: e for a, e in answers.items() if isinstance(e, HttpError)}

    async def check_protocol(self, *, timeout: float = PROBE_TIMEOUT) -> None:
        """Raises HttpError naming a server that is healthy, but not a generation server."""
        for address, info in (await self.everywhere("GET", "/model_info", timeout=timeout)).items():
            if isinstance(info, HttpError):
                raise info
            as_object(address, "/model_info", info, "weight_version")

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
        assert self._session is not None, "ServerPool.open() was not awaited"
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_TIMEOUT)
        url = f"http://{address}{path}"
        try:
            async with self._session.request(method, url, json=body, timeout=limit) as response:
                status, raw = response.status, await response.read()
                rest = retry_after(response.headers.get("Retry-After"))
        except TimeoutError as e:
            waited = CONNECT_TIMEOUT if timeout is None else timeout
            raise HttpError(address, path, f"gave no answer within {waited:.0f} s") from e
        except (aiohttp.ClientError, OSError) as e:
            reason = f"failed: {type(e).__name__}: {shown(str(e)) if str(e) else ''}".rstrip(": ")
            raise HttpError(address, path, reason) from e
        return accepted(address, path, status, decode_answer(raw), retry_after=rest)


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


def silent(answers: Mapping[str, Any]) -> dict[str, HttpError]:
    """Returns the servers, of everywhere's `answers`, that gave none, with their errors."""
    return {a: e for a, e in answers.items() if isinstance(e, HttpError) and e.status is None}


def gone(answers: Mapping[str, Any]) -> dict[str, HttpError]:
    """Returns the servers that are there no more, without slow ones, with their errors."""
    unheard = silent(answers)
    return {a: e for a, e in unheard.items() if not isinstance(e.__cause__, TimeoutError)}
