"""The contract of a transport, a way to send weights to the generation servers.

A new transport is one file with one subclass of `Transport`, here or anywhere: a user names it by
`weight_sync.type: pkg.module:name`, and its keyword arguments in `weight_sync.options`. One of
megarl's own also has a line in config/transports.py, where names, help and requirements stand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from megarl.api.records import WeightUpdateMeta
from megarl.config.transports import Requirements, transport_class
from megarl.models.adapters import Adapters
from megarl.models.gather import BucketGatherer, Dtypes
from megarl.models.piece_table import PieceTable
from megarl.parallel.agreement import Agreement
from megarl.parallel.layout import Layout
from megarl.utils.liveness import Deadline
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.plan import SyncPlan, difference, plan_sync

if TYPE_CHECKING:
    from megarl.config.recipes import GRPOConfig


@dataclass(frozen=True, kw_only=True)
class WeightSource:
    """An engine's weights and where they are: the arguments of WeightSender.

    device: where the parameters are. agreement: of the engine's ranks.
    """

    table: PieceTable
    layout: Layout
    rank: int
    params: Mapping[str, torch.Tensor]
    group: dist.ProcessGroup | None
    dtype: Dtypes
    sender: int
    adapters: Adapters | None
    base_model_path: str
    device: torch.device
    agreement: Agreement


class Transport(ABC):
    """Sends weights in one way. Every rank of the engine makes one, with the same options.

    requirements: what it needs of a job, read before anything starts.
    lead: the rank that speaks for all, and whose metrics an upload returns.
    """

    requirements: ClassVar[Requirements] = Requirements()

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.lead = source.sender
        self._planned: tuple[Any, SyncPlan, BucketGatherer] | None = None

    @classmethod
    def validate(cls, cfg: GRPOConfig) -> Iterable[str]:
        """Yields what is wrong with a configuration, beyond what `requirements` say. Called in the
        launcher and in every trainer before any GPU is used."""
        return ()

    @abstractmethod
    def upload(self, meta: WeightUpdateMeta, deadline: Deadline, phases: Phases) -> None:
        """Returns when every server serves version `meta.number`, and raises otherwise. Collective
        over the engine's ranks: what may fail on one of them goes through
        `self.source.agreement.together`. Seconds and metrics are noted in `phases`.
        """

    def close(self) -> None:  # noqa: B027 (most keep nothing)
        """Gives back what is kept between uploads."""

    def plan_buckets(
        self, bucket_bytes: int, senders: Sequence[int] | None = None, *, staging: int = 0
    ) -> tuple[SyncPlan, BucketGatherer]:
        """Returns the buckets that hold all weights, and what gathers them (see
        `models.gather.BucketGatherer`); made anew where an argument has changed. Collective. Raises
        RuntimeError naming the first entry in which a rank's plan is not rank 0's.

        senders: ranks that gather and send by turns, by default `source.sender` alone. staging:
        bytes of the messages on their way to a sender, 0 for as many as a bucket's.
        """
        s, key = self.source, (bucket_bytes, senders, staging)

        def make() -> tuple[SyncPlan, BucketGatherer]:
            if self._planned is None or self._planned[0] != key:
                plan = plan_sync(s.table, s.dtype, bucket_bytes, senders or (s.sender,))
                gatherer = BucketGatherer(
                    s.table,
                    s.layout,
                    s.rank,
                    s.params,
                    plan.buckets,
                    plan.senders,
                    group=s.group,
                    device=s.device,
                    **({"staging": staging} if staging else {}),
                )
                self._planned = key, plan, gatherer
            return self._planned[1:]

        plan, gatherer = s.agreement.together(make)
        if len(set(s.agreement.gather(plan.digest))) > 1:
            raise RuntimeError(difference(s.agreement.gather(plan.entries)))
        return plan, gatherer


def make_transport(type_: str, source: WeightSource, options: Mapping[str, Any]) -> Transport:
    """Returns a transport of this type (see config.transports). Raises ValueError for others."""
    transport: Transport = transport_class(type_)(source, **options)
    return transport
