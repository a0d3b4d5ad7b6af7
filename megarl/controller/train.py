"""TrainController has the verbs of a role or engine whose model lives on trainer processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.config.recipes import BaseConfig
from megarl.controller.remote import Remote
from megarl.controller.start import trainers
from megarl.rpc.group import Scheduler


class TrainController(Remote):
    """Sends a role that is not initialized (`MegatronActor(...)`) to the trainer processes of
    `scheduler`, which it starts if they are not there yet, and has its verbs from then on. Several
    of them share the processes. A verb's Batch is a RemoteBatch."""

    def __init__(
        self,
        role: Any,
        config: BaseConfig,
        scheduler: Scheduler,
        *,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Takes the role, the run's configuration, which says how many processes there are, and
        what starts them. ranks: the processes that have the model, None for all."""
        made: Remote = trainers(config, scheduler, role, ranks).put(role)
        super().__init__(made._group, made._id, made._kind, made._methods)
