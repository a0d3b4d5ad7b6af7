"""Defines InferenceEngine and RolloutWorkflow, which make samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from megarl.api.batch import Batch, Padded
from megarl.api.records import FinetuneSpec, ModelRequest, ModelResponse, WeightUpdateMeta
from megarl.config.foreign_names import AnswersForeignNames
from megarl.config.rollout import GenerationHyperparameters

# why a sample may fail, see RolloutWorkflow.arun_episode; context: it is longer than a model reads
FAILURES = ("other", "environment", "reward", "tool", "server", "timeout", "context")
# of a workflow's data: how many rollouts are to be made anew, where not all samples are asked for
SAMPLES_MISSING = "samples_missing"


class RolloutFailed(RuntimeError):
    """Says that something failed for all samples of a row: a workflow raises it where it has no
    batch to return. `kind` is one of FAILURES."""

    def __init__(self, kind: str, why: str) -> None:
        """Raises ValueError for another kind."""
        if kind not in FAILURES:
            raise ValueError(f"RolloutFailed: {kind!r} is none of {', '.join(FAILURES)}")
        super().__init__(f"{kind}: {why}")
        self.kind = kind


class RolloutWorkflow(ABC):
    """Turns one row of data into trajectories by talking to an InferenceEngine."""

    @abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Padded | None:
        """Returns a padded batch [n,S] of this row's n samples (input_ids, attention_mask,
        loss_mask, logprobs, versions, rewards, ...), or None to reject the row.

        Where something failed for single samples, `valid` [n] bool is False for them: they leave
        the batch, are counted, and are never trained on. `failure` [n] int says why, as an index
        into FAILURES. The workflow is then called again, up to rollout.failure_retries times, with
        the number of samples that are missing in data["samples_missing"]; of what it returns, the
        first so many are taken. Where all samples failed it may raise RolloutFailed instead.

        `rollout_ids` [n] int names rows that are branches of one rollout, and `unit_ids` [n] int
        samples that stay in one mini-batch and on one rank, as the rows of a rollout do anyway.
        """


class Arrival(Protocol):
    """Stands for weights on their way to the servers; a Future is one, too."""

    def done(self) -> bool:
        """Returns whether `result` would not wait."""

    def result(self, timeout: float | None = None) -> None:
        """Waits until the servers have the weights, at most `timeout` s. Raises what kept them from
        it."""


class InferenceEngine(AnswersForeignNames, ABC):
    """Defines what a script may ask of generation; every rank makes one, and rank 0 drives.

    Collective: initialize, prepare_batch, rollout_batch, update_weights, destroy; an error of the
    driver is raised on every rank. On the driver only: submit, wait, agenerate, check_health. On
    other ranks pause and resume do nothing.
    """

    @abstractmethod
    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Waits until every server is healthy; an error names the ones that are not.

        addr: host:port of the servers in place of the configured ones; ft_spec: how many batches
        there will be.
        """

    @abstractmethod
    def destroy(self) -> None:
        """Ends generation: cancels episodes in flight and closes the connections."""

    def get_scheduling_config(self) -> dict[str, Any]:
        """Returns what a scheduler needs to place the process that drives: gpus_per_process and
        cpus_per_process, both 0 unless the client has servers of its own."""
        return {"gpus_per_process": 0, "cpus_per_process": 0}

    @abstractmethod
    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Generates one sample."""

    @abstractmethod
    async def agenerate_many(self, reqs: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Generates several samples in one request to one server, and returns them in the order of
        `reqs`; a group shares its prompt's prefill."""

    def session(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Any = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        index: int = 0,
        seed_key: Sequence[Any] = (),
        rewarded: bool = True,
    ) -> AbstractAsyncContextManager[Any]:
        """Opens a session of the gateway, through which an agent reaches the policy by HTTP:

            async with engine.session(gconfig, tokenizer) as s:
                await my_agent(s.base_url, s.api_key)

        Afterwards s.trajectory holds what the policy read and wrote. See rollout.gateway.session.

        template_kwargs: of the chat template. index: the rollout's place among those of its row.
        seed_key: tells its seeds from those of other sessions. rewarded: whether the workflow
        computes the reward. If so, nobody can send one with the session's key, unless
        rollout.gateway.rewards is "always". Raises
        NotImplementedError for a backend without a gateway.
        """
        raise NotImplementedError(f"{type(self).__name__} has no gateway for agents")

    @abstractmethod
    def submit(
        self,
        data: dict[str, Any],
        workflow: RolloutWorkflow | None = None,
        workflow_builder: Callable[[], RolloutWorkflow] | None = None,
        should_accept: Callable[[Padded], bool] | None = None,
    ) -> None:
        """Queues one episode of the row `data`; `wait` returns its samples. `should_accept` may
        reject its padded batch [n,S]. Give either a workflow or a builder of one."""

    @abstractmethod
    def wait(
        self,
        count: int,
        timeout: float | None = None,
        should_accept: Callable[[Padded], bool] | None = None,
    ) -> Padded:
        """Returns the next `count` accepted episodes in order of submission, joined and padded.
        `timeout` is in seconds; `should_accept` may reject some more of them."""

    @abstractmethod
    def rollout_batch(
        self,
        data: Sequence[dict[str, Any]],
        workflow: RolloutWorkflow | None = None,
        workflow_builder: Callable[[], RolloutWorkflow] | None = None,
        should_accept: Callable[[Padded], bool] | None = None,
    ) -> Batch:
        """Returns the samples of all rows; the staleness bound does not apply (evaluation)."""

    @abstractmethod
    def prepare_batch(
        self,
        dataloader: Iterable[list[dict[str, Any]]],
        workflow: RolloutWorkflow | None = None,
        workflow_builder: Callable[[], RolloutWorkflow] | None = None,
        should_accept: Callable[[Padded], bool] | None = None,
    ) -> Batch:
        """Returns one training batch: keeps episodes in flight up to the staleness bound, then
        waits."""

    @abstractmethod
    def update_weights(self, meta: WeightUpdateMeta) -> Arrival:
        """Returns the arrival of the weights: it is done once every server serves `meta.version`,
        counted as TrainEngine.upload_weights does: None is the next, and one that does not rise is
        a ValueError."""

    @abstractmethod
    def set_version(self, version: int) -> None:
        """Sets the version of the weights, which decides admission and staleness."""

    @abstractmethod
    def get_version(self) -> int:
        """Returns the version that `set_version` or the last finished update has set."""

    @abstractmethod
    def pause(self) -> None:
        """Pauses every server until `resume`, so that weights can be replaced."""

    @abstractmethod
    def resume(self) -> None:
        """Has the servers go on after `pause`."""

    @abstractmethod
    def check_health(self) -> None:
        """Raises an error that names every server that does not answer."""
