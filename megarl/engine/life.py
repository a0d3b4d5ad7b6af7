"""Builds what an engine works with in `initialize`, and takes it apart in `destroy`."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from megarl.api.engine import TrainEngine
from megarl.api.records import FinetuneSpec
from megarl.config.engine import TrainEngineConfig
from megarl.engine.copying import Inflow
from megarl.engine.offload import Memory
from megarl.engine.setup import EngineState, Resolved, build, release, resolve
from megarl.parallel import cpu_memory, mcore
from megarl.parallel.exchange import world_comm
from megarl.parallel.groups import ProcessGroups, init_distributed, model_scope, waiting_for
from megarl.parallel.worlds import World, inside, this_rank
from megarl.weight_sync.sender import WeightSender

T = TypeVar("T")


class EngineLife(TrainEngine):
    """Holds what an engine is made of between `initialize` and `destroy`, and the scopes in which
    its verbs work."""

    def __init__(
        self, config: TrainEngineConfig, *, seed: int = 1, world: World | None = None
    ) -> None:
        self.config, self.seed, self.world = config, seed, world
        self._version = 0
        self._uploaded: int | None = None  # the last version that reached the servers
        self._training = config.optimizer is not None
        self._what: Resolved | None = None  # once it is initialized
        self._groups: ProcessGroups | None = None
        self._built: EngineState | None = None
        self._memory: Memory | None = None
        self._sender: WeightSender | None = None
        self._inflow = Inflow()

    @property
    def device(self) -> torch.device:
        """Returns the device on which this rank computes."""
        return mcore.device()

    @property
    def is_member(self) -> bool:
        """Returns whether this rank is one of the engine's; else it is a placeholder here."""
        return self.world is None or self.world.member

    def _made(self, part: T | None) -> T:
        """Returns what `initialize` makes. Raises RuntimeError before it, and in a placeholder."""
        if self._what is None:
            raise RuntimeError("the engine is not initialized: call initialize() first")
        if part is None:
            raise RuntimeError(f"this engine is on {self.world}, not on rank {this_rank()}")
        return part

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Makes process groups, model, weights, optimizer and schedule, in the world that `addr`
        ("host:port") or torchrun's environment names; `ft_spec` gives the schedule its length.
        Raises ValueError where model, machine or world cannot do what the config asks, and when
        called twice. Collective."""
        if self._what is not None or self._groups is not None:
            raise ValueError("initialize() was called twice; call destroy() in between")
        init_distributed(addr)
        what = resolve(self.config, len(self.world.ranks) if self.world else dist.get_world_size())
        self.model_config, self.layout, self.dtype = what.model, what.layout, what.dtype
        if self.is_member:
            with inside(self.world.group if self.world else dist.group.WORLD):
                self._groups = ProcessGroups(what.layout)
                world_comm()  # where it has to be made, all ranks make it here
            with model_scope(self._groups), waiting_for(self._groups, "initialize"):
                self._built = build(self.config, what, self._groups, self.seed, ft_spec)
                self._memory = Memory(self._built)
                self.train(self._training)
                if self.config.offload:
                    self._memory.offload(("params",))
        self._what = what

    def destroy(self) -> None:
        """Gives back connections, model and process groups; does nothing before `initialize`.
        Collective."""
        self._what, self._inflow = None, Inflow()
        if self._groups is None:
            return
        if self._sender is not None:
            with inside(self._groups.world):
                self._sender.close()
        if self._memory is not None:
            self._memory.arrive()
        if self._built is not None:
            release(self._built)
        self._sender = self._memory = self._built = None
        gc.collect()
        torch.cuda.empty_cache()
        cpu_memory.give_back()
        groups, self._groups = self._groups, None
        with inside(groups.world), waiting_for(groups, "destroy"):
            groups.barrier()
            groups.release()

    @property
    def groups(self) -> ProcessGroups:
        """Returns the process groups of the layout. Raises RuntimeError before `initialize`."""
        return self._made(self._groups)

    @property
    def state(self) -> EngineState:
        """Returns all that `initialize` made. Raises RuntimeError before it."""
        return self._made(self._built)

    @property
    def memory(self) -> Memory:
        """Returns the keeper of offloaded parts. Raises RuntimeError before `initialize`."""
        return self._made(self._memory)

    def scope(self) -> AbstractContextManager[None]:
        """Returns a context in which torch's default process group is of the engine's ranks alone.
        Raises RuntimeError on another rank."""
        if self._groups is not None:
            return inside(self._groups.world)
        return self.world.scope() if self.world is not None else super().scope()

    @contextmanager
    def _scope(
        self, what: str, needs: Sequence[str] = ("params",), *, behind: bool = False
    ) -> Iterator[None]:
        """Puts this engine's groups into megatron-core's globals, and has a wait that fails say who
        waited for `what`. Raises RuntimeError where a part in `needs` is offloaded. behind: `what`
        is a pass, whose modules wait for weights that are on their way."""
        self.memory.require(what, needs, behind=behind)
        with model_scope(self.groups), waiting_for(self.groups, what):
            yield

    def train(self, mode: bool = True) -> Self:
        """Puts the modules into training mode or out of it, and returns the engine. Each pass sets
        its own mode and restores this one."""
        self._training = mode
        for chunk in self._built.chunks if self._built else ():
            chunk.train(mode)
        return self

    @contextmanager
    def _mode(self, training: bool) -> Iterator[None]:
        before = self._training
        self.train(training)
        try:
            yield
        finally:
            self.train(before)
