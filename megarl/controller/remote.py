"""The verbs of a role, or of a rollout client, that lives on processes of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pickle import PicklingError
from typing import Any

from megarl.api.batch import Batch
from megarl.api.inference import InferenceEngine, RolloutWorkflow
from megarl.config.recipes import BaseConfig
from megarl.controller.group import Remote, invoke
from megarl.controller.start import driver, trainers
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


class RolloutController(Remote):
    """Sends a client that is not initialized (`RemoteSGLangEngine(...)`) to the driver, a process
    that `scheduler` starts, and has its verbs from then on. The tokens of a batch stay there until
    trainers get them.

    The first time that a dataloader, a workflow or a function is given, the driver gets a copy,
    which it uses from then on: it reads the dataloader as rank 0 does in an SPMD script.
    """

    def __init__(self, engine: InferenceEngine, config: BaseConfig, scheduler: Scheduler) -> None:
        """Takes the client, the run's configuration, and what starts the process."""
        made: Remote = driver(config, scheduler, engine).put(engine)
        super().__init__(made._group, made._id, made._kind, made._methods)
        self._copies: dict[int, tuple[Any, Remote]] = {}

    def prepare_batch(
        self,
        dataloader: Iterable[list[dict[str, Any]]],
        workflow: RolloutWorkflow | None = None,
        workflow_builder: Callable[[], RolloutWorkflow] | None = None,
        should_accept: Callable[..., Any] | None = None,
    ) -> Batch:
        """Returns one training batch (RemoteSGLangEngine.prepare_batch), a RemoteBatch."""
        return self._rollouts(
            "prepare_batch", self._copy(dataloader), workflow, workflow_builder, should_accept
        )

    def rollout_batch(
        self,
        data: Sequence[dict[str, Any]],
        workflow: RolloutWorkflow | None = None,
        workflow_builder: Callable[[], RolloutWorkflow] | None = None,
        should_accept: Callable[..., Any] | None = None,
    ) -> Batch:
        """Returns the samples of all rows (RemoteSGLangEngine.rollout_batch), a RemoteBatch."""
        return self._rollouts(
            "rollout_batch", list(data), workflow, workflow_builder, should_accept
        )

    def _rollouts(self, verb: str, rows: Any, *given: Any) -> Batch:
        batch: Batch = self._group.call(invoke, self, verb, rows, *map(self._copy, given))
        return batch

    def _copy(self, value: Any) -> Any:
        """Returns the driver's copy of what is given again and again. Raises TypeError for what
        cannot be pickled."""
        if value is None or isinstance(value, Remote):
            return value
        if id(value) not in self._copies:
            try:
                self._copies[id(value)] = value, self._group.put(value)
            except (TypeError, AttributeError, NotImplementedError, PicklingError) as e:
                why = f"this {type(value).__name__} cannot be sent to the driver ({e!r})"
                fix = "make what cannot be pickled when it is first needed there"
                raise TypeError(f"{why}: {fix}, and iterate over no dataloader here") from e
        return self._copies[id(value)][1]
