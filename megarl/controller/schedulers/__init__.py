"""Starts workers on clusters: on Ray, and in an allocation of Slurm."""

from __future__ import annotations

import os
from collections.abc import Callable

from megarl.api.scheduler import Scheduler
from megarl.config.recipes import BaseConfig
from megarl.rpc.nodes import MEETING
from megarl.utils.importing import load_object

_KINDS = {  # by trainer.scheduler, and under a launcher
    "launched": "megarl.rpc.launched:LaunchedScheduler",
    "local": "megarl.rpc.local:LocalScheduler",
    "ray": "megarl.controller.schedulers.ray:RayScheduler",
    "slurm": "megarl.controller.schedulers.slurm:SlurmScheduler",
}


def make_scheduler(config: BaseConfig) -> Scheduler:
    """Returns the scheduler that trainer.scheduler names, and under a launcher that has started the
    trainers on several nodes, the one that meets them. Raises what it does without a cluster."""
    name = "launched" if MEETING in os.environ else config.trainer.scheduler
    make: Callable[..., Scheduler] = load_object(_KINDS[name], what="scheduler")
    elsewhere = name in ("ray", "slurm")
    return make(interface=config.cluster.interface) if elsewhere else make()
