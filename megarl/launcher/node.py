"""Runs one node's part of a job: starts its processes, watches them, ends them.

    python -m megarl.launcher.node --job FILE --attempt ID --node K [--environment FILE]

    --node-variable NAME [--first-node N]   in place of --node: N plus the number in that variable

The scheduler of a cluster starts this once on every node. FILE holds the records that a launcher
wrote. Nodes meet at <run>/names/ID on storage that all of them see; a later attempt has an ID with
greater numbers. With --environment processes get the variables of that file, those of the
scheduler, and no others. SIGUSR1 and SIGTERM save a checkpoint and end the job. The exit status is
that of the job.

Servers come first. Trainers start once every server of the job is healthy, and all ends when they
are done or something fails, here or on another node; under a controller all ends with that one.
Nodes tell each other by names (names.py): the endpoints that they chose, `ready.server.<i>`, and
`end.<node>` with a node's exit status. A launcher that has lost a node says so in its place:
`lost.<node>`, with the reason.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path

from megarl.config.command_line import CommandLine, help_or_command_line
from megarl.config.errors import EXIT_CODE, ConfigError
from megarl.config.loader import CHECKED
from megarl.config.secrets import masked_override
from megarl.launcher.job import SERVER, SERVERS, Job, Task, endpoints, fill, take_environment
from megarl.launcher.names import FileNames, ForgedName, Names, Superseded, node_address
from megarl.observability.logging import get_logger
from megarl.observability.timeline import LauncherPresence
from megarl.rollout.server_process import ServerProcess
from megarl.rpc.group import LOOPBACK
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
from megarl.utils.env import JOB_TOKEN as TOKEN
from megarl.utils.env import cores, ensure_job_token, free_port, job_token, visible_gpus
from megarl.utils.http import in_thread
from megarl.utils.stopping import SETTLE

log = get_logger("launcher")

OPTIONS = ("job", "attempt", "node", "node-variable", "first-node", "environment")
NAMES = "names"  # below the run directory
FENCE = 10.0  # seconds that processes of an earlier attempt have to see that there is a newer one
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


class _Signalled(Exception):
    """Says that a signal has come before there are trainers to end."""


def names_of(job: Job, attempt: str) -> FileNames:
    """Returns what the agents of an attempt tell each other."""
    directory = Path(job.working_directory, job.directory, NAMES)
    return FileNames(directory, attempt, token=ensure_job_token())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (None: this process's); returns the exit status."""
    try:
        command = help_or_command_line(argv, __doc__ or "", options=OPTIONS)
        if command is None:
            return 0
        job = _read_job(command)
        node = node_number(command.options, os.environ, len(job.pools))
        if "environment" in command.options:
            take_environment(Path(command.options["environment"]))
        if job_token() is None:
            raise ConfigError(f"{TOKEN} is not set: the nodes of a job know each other by it")
        apart = len(job.pools) > 1 and any(task.ports for task in job.tasks)
        host = node_address(job.interface) if apart else LOOPBACK
        _enter(job.working_directory)
    except ConfigError as e:
        print(e.report(), file=sys.stderr)
        return EXIT_CODE
    os.environ.setdefault(SETTLE, "5")
    names = names_of(job, command.options["attempt"])
    # Slurm sends its signal to the agents, and to the batch script, which passes it on to them
    with Signals(signal.SIGUSR1, settle=float(os.environ[SETTLE])) as signals:
        try:
            names.begin(len(job.pools), timeout=FENCE)
        except Superseded as e:
            log.error("%s", e)
            return NODE_FAILED
        log.info("node %d of %s at %s", node, job.name, host)
        return run_node(job, node, host=host, names=names, signals=signals)


def _enter(directory: str) -> None:
    try:
        os.chdir(directory)
    except OSError as e:
        why = f"{e.strerror} on this node; start the job in a directory that nodes share"
        raise ConfigError(f"{directory}: {why}") from e


def _read_job(command: CommandLine) -> Job:
    for name in ("job", "attempt"):
        if name not in command.options:
            raise ConfigError(f"--{name}: required; see --help")
    path = Path(command.options["job"])
    try:
        return Job.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, LookupError) as e:
        raise ConfigError(f"--job {path}: not the records of a job: {e}") from e


def node_number(options: Mapping[str, str], env: Mapping[str, str], nodes: int) -> int:
    """Returns the number of this node. Raises ConfigError where it is not told, or the job has no
    such node."""
    text = options.get("node", "")
    if name := options.get("node-variable", ""):
        text = env.get(name, "")
    if not text.isdecimal():
        where = f"--node-variable {name}={text!r}" if name else f"--node {text!r}"
        raise ConfigError(f"{where}: the number of this node, from 0")
    number = int(text) + int(options.get("first-node", "0"))
    if number >= nodes:
        raise ConfigError(f"node {number}: the job has {nodes} node(s), counted from 0")
    return number


def run_node(job: Job, node: int, *, host: str, names: Names, signals: Signals) -> int:
    """Runs node `node` of the job to its end and ends everything it started; returns the exit
    status. host: the address at which the other nodes reach this one."""
    with ExitStack() as stack:  # it ends things in reverse order
        run = _NodeRun(job, node, host, names, signals)
        stack.callback(stop_all, run.servers, signals, whole=True)
        stack.callback(stop_all, run.workers, signals, timeout=FAIL_GRACE)
        stack.callback(stop_all, run.leaders, signals, timeout=FAIL_GRACE)
        try:
            run.start_servers()
            run.start_trainers()
            status = run.watch()
        except _Signalled:
            status = signals.status
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

    @property
    def trainers(self) -> list[Child]:
        """Returns the processes that are no servers."""
        return [*self.workers, *self.leaders]

    # what nodes tell each other

    def meet(self, tasks: Sequence[Task]) -> None:
        """Publishes the endpoints that are chosen here for `tasks`, and waits for those that they
        name."""
        for name in (name for task in tasks for name in task.ports):
            self.names.put(name, f"{self.host}:{free_port(self.host)}")
        needed = endpoints(w for t in tasks for w in (*t.command, *t.env.values()))
        self.await_names(needed, timeout=self.job.rendezvous_timeout)

    def await_names(self, needed: Sequence[str], *, timeout: float) -> None:
        """Waits until others have published all of `needed`. Raises NodeFailed after `timeout`
        seconds, and what `check` does."""
        deadline = time.monotonic() + timeout
        while missing := [name for name in needed if self.names.peek(name) is None]:
            self.check()
            if time.monotonic() > deadline:
                why = f"node {self.node} waited {timeout:g} s for {', '.join(missing)} of others"
                fix = f"are all nodes up, with the same {self.job.directory}?"
                raise NodeFailed(f"{why} (collective_timeout); {fix}")
            time.sleep(POLL_INTERVAL)
        self.check()

    def check(self) -> None:
        """Raises _Signalled after a signal, PeerFailed where another node ended with a failure,
        NodeFailed where one is lost or a server has died."""
        if self.signals.received:
            raise _Signalled
        self.check_peers()
        for obituary in self.obituaries():
            raise NodeFailed(obituary, SERVER_FAILED)

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

    # processes

    def filled(self, task: Task) -> tuple[list[str], dict[str, str]]:
        """Returns a task's command and environment with their marks replaced."""

        def put_in(text: str) -> str:
            return fill(text, address=self.address, gpus=self.gpus, cores=cores())

        env = {name: put_in(value) for name, value in task.env.items()}
        if task in self.job.leaders and self.job.config:
            env[CHECKED] = self.job.config
        return [put_in(word) for word in task.command], {**os.environ, **env}

    def address(self, name: str) -> str:
        """Returns an endpoint that has been waited for."""
        address = self.names.peek(name)
        assert address is not None, f"{name} has been waited for"
        return address

    def gpus(self, numbers: str) -> str:
        """Returns the names of this node's GPUs of these numbers."""
        visible, taken = visible_gpus(os.environ), [int(n) for n in numbers.split(",")]
        if max(taken) >= len(visible):
            why = f"{len(visible)} GPUs are visible and the job uses number {max(taken)}"
            fix = "correct cluster.n_gpus_per_node, or ask for more GPUs"
            raise NodeFailed(f"node {self.node}: {why}; {fix}")
        return ",".join(visible[n] for n in taken)

    def start_servers(self) -> None:
        """Starts this node's servers all at once, and waits until they are healthy. Raises
        NodeFailed for one that is not in time."""
        self.meet(self.tasks)
        self.servers += map(self.start_server, self.tasks)
        waiting: dict[Future[None], Task] = {
            in_thread(server.wait_healthy, self.job.start_timeout): task
            for server, task in zip(self.servers, self.tasks, strict=True)
            if task.part == 0  # the others of its nodes answer through it
        }
        while waiting:
            self.check()
            for future in [f for f in waiting if f.done()]:
                if (error := future.exception()) is not None:
                    raise NodeFailed(str(error), SERVER_FAILED) from error
                self.names.put(f"ready.{waiting.pop(future).endpoint}", "yes")
            time.sleep(POLL_INTERVAL)

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

    def start_trainers(self) -> None:
        """Starts the trainers as torchrun does, but without its agent: the exit status stays the
        trainers'."""
        leaders, workers = (
            [t for t in tasks if t.node == self.node]
            for tasks in (self.job.leaders, self.job.workers)
        )
        if not (tasks := [*workers, *leaders]):
            return
        needed = [t.endpoint for role in SERVERS for t in self.job.of(role) if t.part == 0]
        patience = self.job.start_timeout + self.job.rendezvous_timeout
        self.await_names([f"ready.{name}" for name in needed], timeout=patience)
        if servers := [t.endpoint for t in self.job.of(SERVER) if t.part == 0]:
            addresses = ", ".join(map(self.address, servers))
            log.info("%d server(s) healthy: %s", len(servers), addresses)
        self.meet(tasks)
        self.workers += map(self.start_child, workers)
        self.leaders += map(self.start_child, leaders)
        command, _ = self.filled(tasks[-1])
        shown = " ".join(masked_override(a) for a in command[2:])
        counts = Counter(t.role for t in tasks)
        names = ", ".join(f"{count} {role}" for role, count in counts.items())
        log.info("started %s: %s %s", names, command[1], shown)

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
            # of several that ended since the last look a signal's status, the highest, is the cause
            if statuses := {child: status for child in self.trainers if (status := child.poll())}:
                return self._failed(*max(statuses.items(), key=itemgetter(1)))
            if all(leader.poll() == 0 for leader in self.leaders):
                if self.leaders:
                    self.names.put(f"end.{self.node}", "0")
                if all(status == "0" for status in self.ended_elsewhere()):
                    return 0
            self.check_peers()
            self.revive()
            time.sleep(POLL_INTERVAL)

    def revive(self) -> None:
        """Starts servers that have died again, at the same endpoint: the trainers, which have gone
        on with the others, take one back at the weight update at which it answers, and a judge or a
        reward worker with the next reward. Raises NodeFailed where its restarts are used up. A
        server of several nodes is not started again: its other nodes wait for the dead one."""
        for i, (task, server) in enumerate(zip(self.tasks, self.servers, strict=True)):
            if (obituary := _obituary(server)) is None:
                continue
            spans = any(t.index == task.index and t != task for t in self.job.of(task.role))
            if spans or not self.restarts[task.name]:
                raise NodeFailed(obituary, SERVER_FAILED)
            self.restarts[task.name] -= 1
            restarts = self.restarts[task.name]
            log.error("%s", obituary)
            log.warning("%s: starting it again, %d restart(s) of it left", task.name, restarts)
            server.stop()  # what it left in its group
            self.servers[i] = self.start_server(task)

    def obituaries(self) -> Iterator[str]:
        """Yields, for each server that has died, its status and the end of its log."""
        yield from filter(None, map(_obituary, self.servers))

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
        running = [t for t in self.trainers if t.poll() is None]
        names = ", ".join(f"{t.name} (pid {t.pid}, state {stacks.state(t.pid)})" for t in running)
        why = "If the others gave up waiting, they waited for this. The stacks of what is left:"
        log.error("%s: not ended %g s after a peer failed. %s", names, FAIL_GRACE, why)
        leaders = [*((t.name, t.pid) for t in running), *((s.address, s.pid) for s in self.servers)]
        named = [(n, pid) for n, leader in leaders for pid in stacks.session(leader)[:STACKS]]
        with ThreadPoolExecutor(max_workers=STACKS) as pool:
            shown = pool.map(stacks.show, (pid for _, pid in named))
            for (name, _), text in zip(named, shown, strict=True):
                log.error("%s: %s", name, text)

    def _interrupted(self) -> int:
        """Passes the signal on to the leaders; 0 if every one then ends well, else 128 + its
        number. A node without them waits for the others, which need it to end their step."""
        status = self.signals.status
        if not self.leaders:
            wait_until(
                lambda: len(self.signals.received) > 1 or None not in self.ended_elsewhere(),
                timeout=self.job.grace,
            )
            return 0 if all(ended == "0" for ended in self.ended_elsewhere()) else status
        log.warning(
            "signal %d: %s has %g s (recover.grace) to save a checkpoint and end",
            self.signals.received[0],
            ", ".join(leader.name for leader in self.leaders),
            self.job.grace,
        )
        stop_all(self.leaders, self.signals, first=status - 128, timeout=self.job.grace)
        return status if any(leader.poll() for leader in self.leaders) else 0


def _obituary(server: ServerProcess) -> str | None:
    """Returns the status of a server that has died and the end of its log; None while it runs."""
    if (status := server.poll()) is None:
        return None
    return f"{server.name} exited with {spelled(status)}{server.tail()}"


if __name__ == "__main__":
    sys.exit(main())
