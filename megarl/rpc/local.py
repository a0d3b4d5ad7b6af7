"""Starts workers on this machine, as children of this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence

from megarl.api.scheduler import GroupSpec
from megarl.rpc.gathering import Gathering
from megarl.rpc.group import WatchedGroup, worker_env, worker_log
from megarl.rpc.nodes import LOOPBACK, MEETING
from megarl.utils.child import Child, Signals, stop_all
from megarl.utils.env import memory_bytes, uses_gpus, visible_gpus
from megarl.utils.job_token import ensure_job_token


class LocalScheduler:
    """Starts groups of workers on this machine, which end with this process, however it ends.

    Each worker has GPUs of its own, of those that are visible here; where the job computes on the
    CPU, none are asked for. Cores are shared among all, and so is memory: there must be as much as
    they ask for.
    """

    def __init__(self, *, host: str = LOOPBACK) -> None:
        """host: this machine's address, where others than its own processes call the workers.
        Raises RuntimeError in a job whose trainers its launcher has started."""
        if MEETING in os.environ:
            raise RuntimeError(
                "the launcher has started this job's trainers: take the scheduler that "
                "megarl.make_scheduler(config) returns in place of a LocalScheduler"
            )
        ensure_job_token()
        self._host = host
        self._free = visible_gpus(os.environ)
        self._stack = contextlib.ExitStack()  # ends what is left, whatever one end raises

    def start(self, spec: GroupSpec) -> WatchedGroup:
        """Returns a group whose workers serve. Raises RuntimeError where too few GPUs are free, or
        the machine has too little memory, WorkerDied where a worker ends before it serves,
        TimeoutError after spec.start_timeout."""
        each = spec.worker.gpus if uses_gpus(os.environ) else 0
        wanted = each * spec.count
        if wanted > len(self._free):
            raise RuntimeError(
                f"{spec.name}: {spec.count} workers with {each} GPUs each need {wanted}, and "
                f"{len(self._free)} are free on this machine"
            )
        memory = spec.worker.memory * spec.count
        if memory > (total := memory_bytes()):
            raise RuntimeError(
                f"{spec.name}: {spec.count} workers want {memory / 2**30:.3g} GiB of memory, and "
                f"here there are {total / 2**30:.3g} GiB"
            )
        taken = [self._free.pop(0) for _ in range(wanted)]
        gathering = Gathering(spec, self._host)
        children: list[Child] = []
        processes = _Children(children, taken, self._free)
        try:
            for index in range(spec.count):
                gpus = taken[index * each :][:each]
                children.append(self._child(spec, index, gathering, gpus))
        except BaseException:
            gathering.close()
            processes.close()
            raise
        group = WatchedGroup(spec, gathering, processes)
        self._stack.callback(group.stop)
        return group

    def close(self) -> None:
        """Ends the groups that are left."""
        self._stack.close()

    def _child(
        self, spec: GroupSpec, index: int, gathering: Gathering, gpus: Sequence[str]
    ) -> Child:
        env = {**os.environ, **worker_env(spec, gathering.address, index)}
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return Child(
            f"{spec.name}/{index}",
            [spec.python, "-m", "megarl.rpc.worker"],
            env=env,
            log_path=worker_log(spec, index),
        )


class _Children:
    """Holds the children of a group, and the GPUs that they have taken of the free ones."""

    def __init__(self, children: Sequence[Child], taken: list[str], free: list[str]) -> None:
        self._children, self._taken, self._free = children, taken, free

    def poll(self) -> Mapping[int, int]:
        polled = {index: child.poll() for index, child in enumerate(self._children)}
        return {index: status for index, status in polled.items() if status is not None}

    def close(self) -> None:
        stop_all(self._children, Signals(), timeout=0)
        self._free.extend(self._taken)
        self._taken.clear()
