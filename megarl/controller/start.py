"""Starts the workers of a controller, once for each scheduler and name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from megarl.api.inference import InferenceEngine
from megarl.config.errors import ConfigError
from megarl.config.loader import run_dir
from megarl.config.recipe_engines import trainer_processes
from megarl.config.recipes import BaseConfig
from megarl.controller.group import WorkerGroup
from megarl.controller.worker import SERVE
from megarl.observability.logging import get_logger
from megarl.rpc.group import ROLLOUT, TRAINERS, GroupSpec, Scheduler, WorkerSpec
from megarl.utils.env import set_collective_timeout

log = get_logger(__name__)

_started: WeakKeyDictionary[Scheduler, dict[str, WorkerGroup]] = WeakKeyDictionary()


def trainers(
    config: BaseConfig, scheduler: Scheduler, engine: Any, ranks: Sequence[int] | None = None
) -> WorkerGroup:
    """Returns the trainer processes of a run, which share one world of torch.distributed: so many
    as trainer.workers says, or the part of them that `ranks` names. Each has what the engine or
    role whose model comes first asks for (`get_scheduling_config`)."""
    asked = WorkerSpec.of(engine.get_scheduling_config())
    whole = workers(TRAINERS, trainer_processes(config), config, scheduler, asked)
    return whole if ranks is None else whole.on(ranks)


def driver(
    config: BaseConfig, scheduler: Scheduler, client: InferenceEngine | None = None
) -> WorkerGroup:
    """Returns the one process of a run that drives rollouts. It has what the client that comes
    first asks for (`get_scheduling_config`); None stands for one whose servers are elsewhere."""
    asked = WorkerSpec() if client is None else WorkerSpec.of(client.get_scheduling_config())
    return workers(ROLLOUT, 1, config, scheduler, asked)


def workers(
    name: str, count: int, config: BaseConfig, scheduler: Scheduler, worker: WorkerSpec
) -> WorkerGroup:
    """Returns the group that the scheduler has started under a name, starting it where there is
    none. Their logs are <run>/logs/<name>_<i>.log; the first one's is shown here, too. They end
    with this process, or by scheduler.close(). Raises ValueError where the group that there is has
    another size, ConfigError in one of several ranks of torchrun."""
    groups = _started.setdefault(scheduler, {})
    # under torchrun every rank would start the same workers again
    if not groups and (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
        fix = "start the script by python, or by a launcher with trainer.mode=controller"
        raise ConfigError(f"a controller in {ranks} processes: one starts the workers; {fix}")
    if name not in groups:
        spec = GroupSpec(
            name=name,
            count=count,
            serve=SERVE,
            options={"group": name},
            worker=worker,
            log_dir=str(run_dir(config) / "logs"),
            echo=True,
        )
        log.info("starting %d worker(s) of %s, which log to %s", count, name, spec.log_dir)
        group = scheduler.start(spec)
        groups[name] = WorkerGroup(name, group.workers, group.clients)
        groups[name].call(set_collective_timeout, config.collective_timeout)
    if len(groups[name]) != count:
        why = f"this wants {count}: one group serves all models of a run"
        raise ValueError(f"the scheduler has started {len(groups[name])} {name}, and {why}")
    return groups[name]
