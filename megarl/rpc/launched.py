"""Meets the trainers that a launcher has started on the nodes of its job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import wait

from megarl.api.scheduler import GroupSpec
from megarl.rpc.gathering import Gathering
from megarl.rpc.group import WatchedGroup, worker_env
from megarl.rpc.local import LocalScheduler
from megarl.rpc.nodes import MEETING, TRAINERS
from megarl.rpc.worker import END
from megarl.utils.child import TERM_TIMEOUT


class LaunchedScheduler:
    """Takes the trainers of a job as its launcher has started them, whatever they ask for, and
    starts other groups on this machine. Where a trainer ends, its launcher ends the job."""

    def __init__(self) -> None:
        """Raises KeyError outside of a job whose trainers are to be met."""
        self._address = os.environ.pop(MEETING)  # for this process alone
        self._host, _, self._port = self._address.rpartition(":")
        self._here = LocalScheduler(host=self._host)
        self._processes = _Launched()
        self._met: WatchedGroup | None = None

    def start(self, spec: GroupSpec) -> WatchedGroup:
        """Returns a group whose workers serve. Raises TimeoutError where trainers have not come
        after spec.start_timeout, and of other groups what LocalScheduler.start does."""
        if spec.name != TRAINERS:
            return self._here.start(spec)
        told = worker_env(spec, self._address)
        gathering = Gathering(spec, self._host, port=int(self._port), variables=told)
        self._processes.count = spec.count
        self._met = WatchedGroup(spec, self._processes, gathering)
        return self._met

    def close(self) -> None:
        """Ends the groups that are left."""
        if self._met is not None:
            wait([client.call_async(END) for client in self._met.clients], TERM_TIMEOUT)
            self._processes.told = True
            self._met.stop()
        self._here.close()


class _Launched:
    """Knows of processes only that they were told to end: others watch them."""

    count, told = 0, False

    def poll(self) -> Mapping[int, int]:
        return dict.fromkeys(range(self.count), 0) if self.told else {}

    def close(self) -> None:
        pass
