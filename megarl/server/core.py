"""Puts a server together: the model, its scheduler, its text tools, its weight updates."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from megarl.server.args import ServerArgs
from megarl.server.errors import ServerError
from megarl.server.generate import RequestParser
from megarl.server.occupation import Occupation, make_resizable
from megarl.server.runner import ModelRunner
from megarl.server.scheduler import Scheduler
from megarl.server.sequence import ServedSequence
from megarl.server.text import TextTools, eos_token_ids
from megarl.server.updates import WeightUpdates
from megarl.server.weights import WeightStore

T = TypeVar("T")


class ServerCore:
    """Holds the parts of a server below its HTTP face. `on_death` is called, in the scheduler's
    thread, when the generation loop fails."""

    def __init__(self, args: ServerArgs, *, on_death: Callable[[], None]) -> None:
        self.args = args
        # OpenMP gives workers to each thread that computes; with more workers than cores they sleep
        # between operations. So only the scheduler's thread has workers.
        threads = args.threads or torch.get_num_threads()
        torch.set_num_threads(1)
        self.runner = ModelRunner(args)
        self.text = TextTools(args.model_path)
        self.model_path = args.model_path
        make_resizable(self.runner.model)
        self.updates = WeightUpdates(
            WeightStore(self.runner.model), self.runner.device, timeout=args.dist_timeout
        )
        self.occupation = Occupation(
            self.runner.model,
            self.runner.cache,
            self.updates,
            keep=args.enable_weights_cpu_backup,
        )
        self.parser = RequestParser(
            has_tokenizer=self.text.tokenizer is not None,
            context_length=self.runner.context_length,
            vocab_size=self.runner.vocab_size,
            eos=eos_token_ids(args.model_path, self.runner.config, self.text.tokenizer)
            & frozenset(range(self.runner.vocab_size)),
            rng=np.random.default_rng(args.random_seed),
        )
        self.scheduler = Scheduler(
            self.runner,
            self.text,
            notify=self._notify,
            on_death=on_death,
            unfit=self.occupation.unfit,
            threads=threads,
        )
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Starts the scheduler. Call it in the event loop that serves requests."""
        self._loop = asyncio.get_running_loop()
        self.scheduler.start()

    def check_alive(self) -> None:
        """Raises ServerError (503) where the generation loop has ended."""
        if not self.scheduler.alive:
            raise ServerError(self.scheduler.error or "the server is stopping", status=503)

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        """Returns fn(*args), run in the scheduler's thread before its next step."""
        return await asyncio.wrap_future(self.scheduler.call(functools.partial(fn, *args)))

    def _notify(self, ended: list[ServedSequence]) -> None:
        def tell() -> None:
            for seq in ended:
                seq.call.one_ended()

        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(tell)
