"""The contract of a transport, a way to send weights to the generation servers.

A new transport is one file with one subclass of `Transport`, here or anywhere: a user names it by
`weight_sync.type: pkg.module:name`, and its keyword arguments in `weight_sync.options`. One of
megarl's own also has a line in config/rollout.py, where names, help and requirements stand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from megarl.api.records import WeightUpdateMeta
from megarl.config.rollout import Requirements, transport_class
from megarl.models.adapters import Adapters
from megarl.models.piece_table import PieceTable
from megarl.parallel.layout import Layout
from megarl.parallel.ranks import FAIL_GRACE, SLACK, Ranks
from megarl.transfer.gather import BucketGatherer, Dtypes
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.plan import SyncPlan, plan_sync, uniform_dtype
from megarl.weight_sync.servers import Deadline
from megarl.wire.process_group import bounded

if TYPE_CHECKING:
    from megarl.config.recipes import GRPOConfig


class WeightSource:
    """Holds an engine's weights and says where they are. Every rank of the engine makes one, alike.

    table, layout: where every HF tensor lives.
    rank:   this rank's number in the layout, which is its rank in `group`.
    params: canonical name -> local parameter; read at every upload. They are all on `device`.
    group:  spans the layout's ranks; None is the default group. `ranks` acts in it.
    dtype:  of what is sent, one for all or by HF name; None is the parameters' own.
    sender: the rank that gathers and sends (files are always written by rank 0).
    adapters: of the model at base_model_path; then they can be sent alone.

    Raises ValueError for a `sender` outside the layout, and for parameters of several dtypes
    without a `dtype`.
    """

    def __init__(
        self,
        table: PieceTable,
        layout: Layout,
        rank: int,
        params: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup | None = None,
        *,
        dtype: Dtypes | None = None,
        sender: int = 0,
        adapters: Adapters | None = None,
        base_model_path: str = "",
    ) -> None:
        if not 0 <= sender < layout.world_size:
            raise ValueError(
                f"sender={sender}: use a rank of the layout, 0..{layout.world_size - 1}"
            )
        trained = {n: p for n, p in params.items() if n not in table.fp32}
        self.table, self.layout, self.rank, self.params = table, layout, rank, params
        self.group, self.sender = group, sender
        self.dtype: Dtypes = dtype or uniform_dtype(trained)
        self.adapters, self.base_model_path = adapters, base_model_path
        self.device = next(iter(params.values())).device
        self.ranks = Ranks(group, what="weight sync", grace=FAIL_GRACE)

    def from_rank(self, rank: int, fn: Callable[..., Any], *args: Any) -> Any:
        """Returns on every rank what fn(*args) returns on one of them, which calls it. Collective.
        Raises everywhere where it does there."""
        value = self.ranks.together(lambda: fn(*args) if self.rank == rank else None)
        return self.ranks.gather_from([rank], value)[0]


class Transport(ABC):
    """Sends weights in one way. Every rank of the engine makes one, with the same options.

    requirements: what it needs of a job, read before anything starts.
    lead: the rank that speaks for all, and whose metrics an upload returns.
    """

    requirements: ClassVar[Requirements] = Requirements()

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.lead = source.sender
        self._planned: tuple[int, SyncPlan, BucketGatherer] | None = None

    @classmethod
    def validate(cls, cfg: GRPOConfig) -> Iterable[str]:
        """Yields what is wrong with a configuration, beyond what `requirements` say. Called in the
        launcher and in every trainer before any GPU is used."""
        return ()

    @abstractmethod
    def upload(self, meta: WeightUpdateMeta, deadline: Deadline, phases: Phases) -> None:
        """Returns when every server serves version `meta.number`, and raises otherwise. Collective
        over the engine's ranks: what may fail on one of them goes through
        `self.source.ranks.together`. Seconds and metrics are noted in `phases`.
        """

    def close(self) -> None:  # noqa: B027 (most keep nothing)
        """Gives back what is kept between uploads."""

    def plan_buckets(self, bucket_bytes: int) -> tuple[SyncPlan, BucketGatherer]:
        """Returns the buckets that hold all weights, and what gathers them to `source.sender`, with
        an eighth of a bucket for messages; made anew where `bucket_bytes` has changed. Collective:
        raises on all ranks where one has another plan than rank 0."""
        s = self.source
        if self._planned is None or self._planned[0] != bucket_bytes:
            plan = s.ranks.together(plan_sync, s.table, s.dtype, bucket_bytes)
            gatherer = BucketGatherer(
                s.table,
                s.rank,
                s.params,
                plan.buckets,
                s.sender,
                group=s.group,
                device=s.device,
                staging=bucket_bytes // 8,
                ranks=s.ranks,
            )
            self._planned = bucket_bytes, plan, gatherer
        return self._planned[1:]


class WeightSender:
    """Sends an engine's weights to the servers. Every rank of the engine makes one, alike, and
    uploads at the same time."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._transports: dict[str, Transport] = {}  # by type and options

    def upload(self, meta: WeightUpdateMeta) -> dict[str, float]:
        """Sends the weights as `meta` says. Collective over the engine's ranks; returns when every
        server serves `meta.version`.

        The servers should be paused. Returns the leading rank's metrics on every rank: bytes,
        buckets, gb_per_s, seconds by phase, all under "weight_sync/". A failure of any
        rank or server is an error on every rank, in at most `meta.timeout` seconds plus half a
        minute; the servers may then hold a mixture, under their old version, and the next upload
        starts from scratch.
        """
        deadline = Deadline(meta.timeout, patience=meta.server_timeout)
        phases, ranks = Phases(), self._source.ranks
        ranks.set_timeout(meta.timeout + SLACK, f"weight_sync.timeout + {SLACK:g} s")
        transport = ranks.together(self._transport, meta)
        with bounded(self._source.group, meta.timeout + SLACK):  # gathers go through this group
            transport.upload(meta, deadline, phases)
        phases.metrics["servers"] = float(len(meta.addresses))
        return ranks.gather_from((transport.lead,), phases.stats())[0]

    def _transport(self, meta: WeightUpdateMeta) -> Transport:
        key = f"{meta.type} {dict(meta.options)}"
        if key not in self._transports:
            self._transports[key] = transport_class(meta.type)(self._source, **meta.options)
        return self._transports[key]

    def close(self) -> None:
        """Leaves the groups. Collective only in that every rank should do it."""
        for transport in self._transports.values():
            transport.close()
        self._source.ranks.close()
