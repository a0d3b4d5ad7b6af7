"""WeightSender: moves a training engine's weights to the generation servers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from megarl.api.records import WeightUpdateMeta
from megarl.models.adapters import Adapters
from megarl.models.gather import Dtypes
from megarl.models.piece_table import PieceTable
from megarl.parallel.agreement import SLACK, Agreement
from megarl.parallel.layout import Layout
from megarl.utils.liveness import Deadline
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.plan import uniform_dtype
from megarl.weight_sync.transports import Transport, WeightSource, make_transport
from megarl.wire.process_group import bounded


class WeightSender:
    """Sends an engine's weights to the servers. Every rank of the engine constructs one, alike, and
    uploads at the same time.

    table, layout: where every HF tensor lives.
    rank:   this rank's number in the layout, which is its rank in `group`.
    params: canonical name -> local parameter; read at every upload.
    group:  spans the layout's ranks; None is the default group.
    dtype:  of what is sent, one for all or by HF name; None is the parameters' own.
    sender: the rank that gathers and sends, the first of them where there are several (files are
            always written by rank 0).
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
        trained = {n: p for n, p in params.items() if n not in table.buffers}
        self._source = WeightSource(
            table=table,
            layout=layout,
            rank=rank,
            params=params,
            group=group,
            sender=sender,
            dtype=dtype or uniform_dtype(trained),
            device=next(iter(params.values())).device,
            adapters=adapters,
            base_model_path=base_model_path,
            agreement=Agreement(group),
        )
        self._transports: dict[str, Transport] = {}  # by type and options

    def upload(self, meta: WeightUpdateMeta) -> dict[str, float]:
        """Sends the weights as `meta` says. Collective over the engine's ranks; returns when every
        server serves `meta.version`.

        The servers should be paused. Returns the leading rank's metrics on every rank: bytes,
        buckets, broadcasts, gb_per_s, seconds by phase, all under "weight_sync/". A failure of any
        rank or server is an error on every rank, in at most `meta.timeout` seconds plus half a
        minute; the servers may then hold a mixture, under their old version, and the next upload
        starts from scratch.
        """
        deadline = Deadline(meta.timeout, patience=meta.server_timeout)
        phases, agreement = Phases(), self._source.agreement
        agreement.set_timeout(meta.timeout)
        transport = agreement.together(self._transport, meta)
        with bounded(self._source.group, meta.timeout + SLACK):  # gathers go through this group
            transport.upload(meta, deadline, phases)
        phases.metrics["servers"] = float(len(meta.addresses))
        return agreement.gather(phases.stats())[transport.lead]

    def _transport(self, meta: WeightUpdateMeta) -> Transport:
        key = f"{meta.type} {dict(meta.options)}"
        if key not in self._transports:
            self._transports[key] = make_transport(meta.type, self._source, meta.options)
        return self._transports[key]

    def close(self) -> None:
        """Leaves the groups. Collective only in that every rank should do it."""
        for transport in self._transports.values():
            transport.close()
        self._source.agreement.close()
