"""WeightSender: moves a training engine's weights to the generation servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from megarl.api.records import WeightUpdateMeta
from megarl.models.adapters import Adapters
from megarl.models.piece_table import PieceTable
from megarl.parallel.layout import Layout
from megarl.weight_sync.adapter import AdapterTransport
from megarl.weight_sync.agreement import SLACK, Agreement, Deadline
from megarl.weight_sync.colocated import ColocatedTransport
from megarl.weight_sync.disk import DiskTransport
from megarl.weight_sync.distributed import DistributedTransport
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.plan import Dtypes, uniform_dtype
from megarl.wire.process_group import bounded


class WeightSender:
    """Every rank of an engine constructs one, alike, and uploads at the same time.

    table, layout: where every HF tensor lives.
    rank:   this rank's number in the layout, which is its rank in `group`.
    params: canonical name -> local parameter; read at every upload.
    group:  spans the layout's ranks; None is the default group.
    dtype:  what is sent, one for all or by HF name; None is the parameters' own.
    owner:  the rank that gathers and sends (files are always written by rank 0).
    adapters: of the model at base_model_path; then they can be sent alone.
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
        owner: int = 0,
        adapters: Adapters | None = None,
        base_model_path: str = "",
    ) -> None:
        if not 0 <= owner < layout.world_size:
            raise ValueError(f"owner={owner}: use a rank of the layout, 0..{layout.world_size - 1}")
        self.owner, self._group = owner, group
        trained = {n: p for n, p in params.items() if n not in table.buffers}
        self._agreement = Agreement(group)
        where: dict[str, Any] = dict(
            table=table, layout=layout, rank=rank, params=params, group=group, owner=owner,
            dtype=dtype or uniform_dtype(trained), device=next(iter(params.values())).device,
            agreement=self._agreement,
        )  # fmt: skip
        self._disk = DiskTransport(**where)
        self._adapter = AdapterTransport(
            adapters, layout, rank, group, base_model_path=base_model_path,
            agreement=self._agreement,
        )  # fmt: skip
        self._streaming: dict[str, DistributedTransport | ColocatedTransport] = {
            "distributed": DistributedTransport(**where),
            "colocated": ColocatedTransport(**where),
        }

    def upload(self, meta: WeightUpdateMeta) -> dict[str, float]:
        """Collective over the engine's ranks; returns when every server serves `meta.version`.

        The servers should be paused. Returns the owner's metrics on every rank: bytes, buckets,
        broadcasts, gb_per_s, seconds by phase, all under "weight_sync/". A failure of any rank or
        server is an error on every rank, in at most `meta.timeout` plus half a minute; the servers
        may then hold a mixture, under their old version, and the next upload starts from scratch.
        """
        deadline = Deadline(meta.timeout, patience=meta.server_timeout)
        phases = Phases()
        files: dict[str, DiskTransport | AdapterTransport] = {
            "disk": self._disk, "adapter": self._adapter,
        }  # fmt: skip
        transport = files.get(meta.type) or self._streaming[meta.type]
        self._agreement.set_timeout(meta.timeout)
        with bounded(self._group, meta.timeout + SLACK):  # gathers go through the engine's group
            transport.upload(meta, deadline, phases)
        phases.metrics["servers"] = float(len(meta.addresses))
        return self._agreement.gather(phases.stats())[0 if meta.type in files else self.owner]

    def close(self) -> None:
        """Leaves the groups. Collective only in that every rank should do it."""
        for transport in self._streaming.values():
            transport.close()
        self._agreement.close()
