"""Runs one node's processes of a job: starts them, watches them, ends them.

Servers come first. Trainers start once every server of the job is healthy, and all ends when they
are done or something fails, here or on another node; under a controller all ends with that one.
Nodes tell each other by names (names.py): the endpoints that they chose, `ready.server.<i>`, and
`end.<node>` with a node's exit status. A launcher that has lost a node says so in its place:
`lost.<node>`, with the reason.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from megarl.config.loader import CHECKED
from megarl.config.secrets import masked_override
from megarl.launcher.job import SERVER, SERVERS, Job, Task, endpoints, fill
from megarl.launcher.names import ForgedName, Names, Superseded
from megarl.observability.logging import get_logger
from megarl.observability.presence import LauncherPresence
from megarl.rollout.server_process import ServerProcess
from megarl.utils import stacks
from megarl.utils.child import (
    POLL_INTERVAL,
    Child,
    Signals,
    deaf_to,
    signal_group,
    spelled,
    stop_all,
    wait_until,
)
from megarl.utils.env import cores, free_port, visible_gpus
from megarl.utils.http import in_thread
from megarl.utils.job_token import job_token

log = get_logger("launcher")

SERVER_FAILED = 3  # exit status: a server died or never became healthy
NODE_FAILED = 4  # exit status: the nodes did not meet, or this one is not as the job needs it
FAIL_GRACE = 5.0  # seconds the peers of a failed trainer get to say what happened
STACKS = 16  # processes at most whose stacks are shown of a trainer and of what it started


class NodeFailed(RuntimeError):
    """Ends a node's part of the job with `status`; the message says why."""

    def __init__(self, message: str, status: int = NODE_FAILED) -> None:
        super().__init__(message)
        self.status = status


class PeerFailed(NodeFailed):
    """Says that another node failed."""


class ServerFailed(NodeFailed):
    """Says that a server died or never became healthy; the message shows the end of its log."""

    def __init__(self, message: str) -> None:
        super().__init__(message, SERVER_FAILED)


def run_node(job: Job, node: int, *, host: str, names: Names, signals: Signals) -> int:
    """Runs node `node` of the job to its end and ends everything it started; returns the exit
    status. host: the address at which the other nodes reach this one."""
    with ExitStack() as stack:  # it ends things in reverse order
        run = _NodeRun(job, node, host, names, signals)
        stack.callback(stop_all, run.servers, signals, whole=True)
        stack.callback(stop_all, run.workers, signals, timeout=FAIL_GRACE)
        stack.callback(stop_all, run.leaders, signals, timeout=FAIL_GRACE)
        try:
            status = run.to_the_end()
        except NodeFailed as e:
            log.error("%s", e)
            run.presence.failed(str(e))
            status = e.status
            if isinstance(e, PeerFailed):
                run.await_trainers()
        except (Superseded, ForgedName) as e:
            log.error("%s", e)
            for child in run.trainers:  # at once: they write where the newer attempt does
                signal_group(child.pid, signal.SIGKILL)
            return NODE_FAILED
        names.put(f"end.{node}", str(status))
        return status


class _NodeRun:
    """Holds the state of run_node. What runs here: `servers`, `leaders` (Job.leaders), and the
    `workers` that a leader calls, and ends."""

    def __init__(self, job: Job, node: int, host: str, names: Names, signals: Signals) -> None:
        self.job, self.node, self.host = job, node, host
        self.names, self.signals = names, signals
        self.servers: list[ServerProcess] = []
        self.leaders: list[Child] = []
        self.workers: list[Child] = []
        self.presence = LauncherPresence(Path(job.directory), node)
        self.tasks = [t for role in SERVERS for t in job.of(role, node)]
        self.restarts = Counter({task.name: task.restarts for task in self.tasks})

    def to_the_end(self) -> int:
        self.start_servers()
        if not self.wait_for_servers():
            return 128 + self.signals.received[0]
        if not self.start_trainers():
            return 128 + self.signals.received[0]
        return self.watch()

    @property
    def trainers(self) -> list[Child]:
        """Returns the processes that are no servers."""
        return [*self.workers, *self.leaders]

    # what nodes tell each other

    def choose(self, name: str) -> None:
        """Publishes an endpoint of this node."""
        self.names.put(name, f"{self.host}:{free_port(self.host)}")

    def await_names(self, wanted: Sequence[str], *, timeout: float) -> bool:
        """Waits until others have published all of `wanted`; returns False when a signal came
        first. Raises PeerFailed where another node failed, NodeFailed after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while missing := [name for name in wanted if self.names.peek(name) is None]:
            if self.signals.received:
                return False
            self.check_peers()
            self.bury()
            if time.monotonic() > deadline:
                raise NodeFailed(
                    f"node {self.node} waited {timeout:g} s for {', '.join(missing)} of other "
                    "nodes (cluster.rendezvous_timeout); are all of them up, with the same "
                    f"{self.job.directory}?"
                )
            time.sleep(POLL_INTERVAL)
        return not self.signals.received

    def address(self, name: str) -> str:
        found = self.names.peek(name)
        assert found is not None, f"{name} has been waited for"
        return found

    def check_peers(self) -> None:
        """Raises PeerFailed where another node ended with a failure, NodeFailed where one is
        lost."""
        self.names.check()
        for node in range(len(self.job.pools)):
            if (lost := self.names.peek(f"lost.{node}")) is not None:
                raise NodeFailed(f"node {node} is lost: {lost}")
            if node == self.node:
                continue
            if (ended := self.names.peek(f"end.{node}")) not in (None, "0"):
                raise PeerFailed(f"node {node} ended with status {ended}", int(ended))

    def ended_elsewhere(self) -> list[str | None]:
        """Returns the exit statuses of the other nodes that have leaders, None of one that runs."""
        others = sorted({task.node for task in self.job.leaders} - {self.node})
        return [self.names.peek(f"end.{node}") for node in others]

    def filled(self, task: Task) -> tuple[list[str], dict[str, str]]:
        """Returns a task's command and environment with their marks replaced."""

        def put_in(text: str) -> str:
            return fill(text, address=self.address, gpus=self.gpus, cores=cores())

        env = {name: put_in(value) for name, value in task.env.items()}
        if task in self.job.leaders and self.job.config:
            env[CHECKED] = self.job.config
        return [put_in(word) for word in task.command], {**os.environ, **env}

    def gpus(self, numbers: str) -> str:
        """Returns the names of this node's GPUs of these numbers."""
        visible, wanted = visible_gpus(os.environ), [int(n) for n in numbers.split(",")]
        if max(wanted) >= len(visible):
            raise NodeFailed(
                f"node {self.node}: {len(visible)} GPUs are visible and the job uses number "
                f"{max(wanted)}; correct cluster.n_gpus_per_node, or ask for more GPUs"
            )
        return ",".join(visible[n] for n in wanted)

    # servers

    def start_servers(self) -> None:
        """Starts them all at once."""
        for name in (name for task in self.tasks for name in task.ports):
            self.choose(name)
        needed = endpoints(word for task in self.tasks for word in task.command)
        if not self.await_names(needed, timeout=self.job.rendezvous_timeout):
            return
        for task in self.tasks:
            self.servers.append(self.start_server(task))

    def start_server(self, task: Task) -> ServerProcess:
        """Starts one server at its endpoint."""
        command, env = self.filled(task)
        host, _, port = self.address(task.endpoint).rpartition(":")
        with deaf_to(signal.SIGUSR1):
            server = ServerProcess(
                command,
                host=host,
                port=int(port),
                log_path=Path(task.log),
                env=env,
                # SGLang logs its arguments, of which the key is one
                private_log=job_token() is not None and "sglang" in " ".join(command),
                linked=task.linked,
            )
        log.info("server %s: pid %d, log %s", server.address, server.pid, server.log_path)
        return server

    def wait_for_servers(self) -> bool:
        """Waits until all servers are healthy; returns False when a signal came first. Raises
        ServerFailed for one that dies, or is not healthy in time."""
        tasks, limit = self.tasks, self.job.start_timeout
        waiting: dict[Future[None], Task] = {
            in_thread(server.wait_healthy, limit): task
            for server, task in zip(self.servers, tasks, strict=False)
            if task.part == 0  # the others of its nodes answer through it
        }
        while waiting:
            if self.signals.received:
                return False
            self.check_peers()
            for future in [f for f in waiting if f.done()]:
                if (error := future.exception()) is not None:
                    raise ServerFailed(str(error)) from error
                self.names.put(f"ready.{waiting.pop(future).endpoint}", "yes")
            time.sleep(POLL_INTERVAL)
        return not self.signals.received

    def bury(self) -> None:
        """Raises ServerFailed where a server has died."""
        for obituary in self.obituaries():
            raise ServerFailed(obituary)

    def revive(self) -> None:
        """Starts servers that have died again, at the same endpoint: the trainers, which have gone
        on with the others, take one back at the weight update at which it answers, and a judge or a
        reward worker with the next reward. Raises ServerFailed where its restarts are used up. A
        server of several nodes is not started again: its other nodes wait for the dead one."""
        for i, (task, server) in enumerate(zip(self.tasks, self.servers, strict=True)):
            if (obituary := _obituary(server)) is None:
                continue
            spans = any(t.index == task.index and t != task for t in self.job.of(task.role))
            if spans or not self.restarts[task.name]:
                raise ServerFailed(obituary)
            self.restarts[task.name] -= 1
            left = self.restarts[task.name]
            log.error("%s", obituary)
            log.warning("%s: starting it again, %d restart(s) of it left", task.name, left)
            server.stop()  # what it left in its group
            self.servers[i] = self.start_server(task)

    def obituaries(self) -> Iterator[str]:
        """Yields, for each server that has died, its status and the end of its log."""
        yield from filter(None, map(_obituary, self.servers))

    # trainers

    def start_trainers(self) -> bool:
        """Starts the trainers as torchrun does, but without its agent: the exit status stays the
        trainers'. Returns False when a signal came first."""
        leaders, workers = (
            [t for t in tasks if t.node == self.node]
            for tasks in (self.job.leaders, self.job.workers)
        )
        if not (tasks := [*workers, *leaders]):
            return True
        servers = [t.endpoint for t in self.job.of(SERVER) if t.part == 0]
        needed = [t.endpoint for role in SERVERS for t in self.job.of(role) if t.part == 0]
        patience = self.job.start_timeout + self.job.rendezvous_timeout
        if not self.await_names([f"ready.{name}" for name in needed], timeout=patience):
            return False
        if servers:
            addresses = ", ".join(map(self.address, servers))
            log.info("%d server(s) healthy: %s", len(servers), addresses)
        for name in (name for task in tasks for name in task.ports):
            self.choose(name)
        named = endpoints(w for t in tasks for w in (*t.command, *t.env.values()))
        if not self.await_names(named, timeout=self.job.rendezvous_timeout):
            return False
        self.workers += map(self.start_child, workers)
        self.leaders += map(self.start_child, leaders)
        command, _ = self.filled(tasks[-1])
        shown = " ".join(masked_override(a) for a in command[2:])
        names = ", ".join(
            f"{count} {role}" for role, count in Counter(t.role for t in tasks).items()
        )
        log.info("started %s: %s %s", names, command[1], shown)
        return True

    def start_child(self, task: Task) -> Child:
        """Starts a process that is no server."""
        command, env = self.filled(task)
        with deaf_to(signal.SIGUSR1):
            return Child(task.name, command, env=env, log_path=task.log)

    # watching

    def watch(self) -> int:
        """Waits until all leaders are done or something fails; returns the exit status. After a
        signal those here have job.grace seconds to end. Raises NodeFailed when a server dies, or
        another node fails."""
        while True:
            if self.signals.received:
                return self._interrupted()
            for child in self.trainers:
                if status := child.poll():
                    return self._failed(child, status)
            if all(leader.poll() == 0 for leader in self.leaders):
                if self.leaders:
                    self.names.put(f"end.{self.node}", "0")
                if all(status == "0" for status in self.ended_elsewhere()):
                    return 0
            self.check_peers()
            self.revive()
            time.sleep(POLL_INTERVAL)

    def _failed(self, trainer: Child, status: int) -> int:
        why = f"{trainer.name} exited with status {spelled(status)}"
        log.error("%s; ending the run%s", why, trainer.tail())
        self.presence.failed(why)
        for obituary in self.obituaries():  # which may be why
            log.error("%s", obituary)
        self.await_trainers()
        return status

    def await_trainers(self) -> None:
        """Waits for the end of trainers whose peer has failed: they are failing too, and one of
        them may be about to print the cause. Logs which of them do not end, and the stacks of all
        that runs here: where the others gave up waiting, it is those that they waited for."""
        if wait_until(lambda: all(t.poll() is not None for t in self.trainers), timeout=FAIL_GRACE):
            return
        left = [t for t in self.trainers if t.poll() is None]
        names = ", ".join(f"{t.name} (pid {t.pid}, state {stacks.state(t.pid)})" for t in left)
        log.error(
            "%s: not ended %g s after a peer failed. If the others gave up waiting, they waited "
            "for this. The stacks of the processes that are left:",
            names,
            FAIL_GRACE,
        )
        leaders = [*((t.name, t.pid) for t in left), *((s.address, s.pid) for s in self.servers)]
        named = [(n, pid) for n, leader in leaders for pid in stacks.session(leader)[:STACKS]]
        with ThreadPoolExecutor(max_workers=STACKS) as pool:
            shown = pool.map(stacks.show, (pid for _, pid in named))
            for (name, _), text in zip(named, shown, strict=True):
                log.error("%s: %s", name, text)

    def _interrupted(self) -> int:
        """Passes the signal on to the leaders; 0 if every one then ends well, else 128 + its
        number. A node without them waits for the others, which need it to end their step."""
        number = self.signals.received[0]
        if number == signal.SIGUSR1:  # a scheduler's word for it
            number = signal.SIGTERM
        if not self.leaders:
            stopped = wait_until(
                lambda: len(self.signals.received) > 1 or None not in self.ended_elsewhere(),
                timeout=self.job.grace,
            )
            well = stopped and all(status == "0" for status in self.ended_elsewhere())
            return 0 if well else 128 + number
        log.warning(
            "signal %d: %s has %g s (recover.grace) to save a checkpoint and end",
            self.signals.received[0],
            ", ".join(leader.name for leader in self.leaders),
            self.job.grace,
        )
        stop_all(self.leaders, self.signals, first=number, timeout=self.job.grace)
        return 128 + number if any(leader.poll() for leader in self.leaders) else 0


def _obituary(server: ServerProcess) -> str | None:
    """Returns the status of a server that has died and the end of its log; None while it runs."""
    if (status := server.poll()) is None:
        return None
    return f"{server.name} exited with {spelled(status)}{server.tail()}"
