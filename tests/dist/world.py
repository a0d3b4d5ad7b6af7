"""A persistent world of gloo processes for one test file; the processes serve the files after it.

    def test_x(world2):  # of conftest.py
        results = world2.run(my_module_level_function, arg1, kw=arg2)   # one result per rank

Functions run on every rank at once, with the default process group up. They are pickled by
reference, so they live at module level. An error on any rank is raised here with its traceback,
and the world is torn down (ranks may be stuck in a collective).
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing as mp
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.warm import IMPORTS, be_another

JOB_TOKEN = "MEGARL_JOB_TOKEN"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    import megarl.parallel.mcore  # noqa: F401  (CPU patches before megatron)

    be_another()

    # a file, not a port: somebody else may take a free port before rank 0 listens at it
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size
    )
    libraries_known = False
    while (job := pipe.recv()) is not None:
        fn, args, kw, token = job
        os.environ.pop(JOB_TOKEN, None)
        if token is not None:
            os.environ[JOB_TOKEN] = token
        if not libraries_known:  # engines collect garbage as they go: it need not look through them
            gc.freeze()  # once: what a job leaves behind in cycles, threads too, must be collected
            libraries_known = True
        try:
            pipe.send((True, fn(*args, **kw)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    torch.distributed.destroy_process_group()


class _Processes:
    """The ranks of a world. What takes seconds is to import everything: a server of forks does it
    once for all."""

    def __init__(self, size: int) -> None:
        ctx, self.folder = mp.get_context("forkserver"), tempfile.TemporaryDirectory()
        ctx.set_forkserver_preload(list(IMPORTS))
        self.procs: list[Any] = []
        self.pipes: list[Connection] = []
        for rank in range(size):
            here, there = ctx.Pipe()
            args = (rank, size, f"{self.folder.name}/store", there)
            process = ctx.Process(target=_serve, args=args, daemon=False)
            process.start()
            there.close()
            self.procs.append(process)
            self.pipes.append(here)

    def alive(self) -> bool:
        return all(p.is_alive() for p in self.procs)

    def end(self, *, kill: bool) -> None:
        for pipe, p in zip(self.pipes, self.procs, strict=True):
            if not kill and p.is_alive():
                pipe.send(None)
        for p in self.procs:
            if not kill:
                p.join(20)
            if p.is_alive():
                p.kill()
                p.join()
        self.folder.cleanup()


# by size: those of worlds that were closed in good order; the next file goes on with them
_idle: dict[int, list[_Processes]] = {}


@atexit.register  # before multiprocessing would wait for them
def end_idle() -> None:
    while _idle:
        for ranks in _idle.popitem()[1]:
            ranks.end(kill=False)


class World:
    def __init__(self, size: int, timeout: float = 240.0) -> None:
        self.size, self.timeout = size, timeout
        self._ranks: _Processes | None = None

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any, **kw: Any) -> list[Any]:
        """fn(*args, **kw) on every rank; the list of results by rank. Ranks outlive tests: a call
        brings the job's token of its caller, which servers that the caller starts ask for."""
        if self._ranks is None:
            idle = _idle.get(self.size)
            self._ranks = idle.pop() if idle else _Processes(self.size)
        pipes = self._ranks.pipes
        try:
            for pipe in pipes:
                pipe.send((fn, args, kw, os.environ.get(JOB_TOKEN)))
        except OSError:
            self.close(kill=True)
            raise
        results: list[Any] = [None] * self.size
        pending = dict(zip(pipes, range(self.size), strict=True))
        deadline = time.monotonic() + self.timeout
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = sorted(pending.values())
                self.close(kill=True)
                raise TimeoutError(f"{fn.__name__}: ranks {ranks} gave no answer")
            for pipe in ready:
                rank = pending.pop(pipe)  # type: ignore[call-overload]
                try:
                    ok, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    self.close(kill=True)
                    raise RuntimeError(f"{fn.__name__}: rank {rank} died") from None
                if not ok:
                    self.close(kill=True)
                    raise RuntimeError(f"{fn.__name__} failed on rank {rank}:\n{value}")
                results[rank] = value
        return results

    def close(self, kill: bool = False) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is None:
            return
        if kill or not ranks.alive():
            ranks.end(kill=True)
        else:
            _idle.setdefault(self.size, []).append(ranks)
