"""WeightSender: moves a training engine's weights to the generation servers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from megarl.api.records import WeightUpdateMeta
from megarl.models.piece_table import PieceTable
from megarl.parallel.layout import Layout
from megarl.weight_sync.agreement import SLACK, Agreement, Deadline
from megarl.weight_sync.disk import DiskTransport
from megarl.weight_sync.distributed import DistributedTransport
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.plan import Dtypes, uniform_dtype
from megarl.weight_sync.process_group import bounded


class WeightSender:
    """Every rank of an engine constructs one, alike, and uploads at the same time.

    table, layout: where every HF tensor lives.
    rank:   this rank's number in the layout, which is its rank in `group`.
    params: canonical name -> local parameter; read at every upload.
    group:  spans the layout's ranks; None is the default group.
    dtype:  what is sent, one for all or by HF name; None is the parameters' own.
    owner:  the rank that gathers and sends (distributed; files are always written by rank 0).
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
    ) -> None:
        if not 0 <= owner < layout.world_size:
            raise ValueError(f"owner={owner}: use a rank of the layout, 0..{layout.world_size - 1}")
        self.owner, self._group = owner, group
        trained = {n: p for n, p in params.items() if n not in table.buffers}
        self._agreement = Agreement(group)
        self._distributed = DistributedTransport(
            table, layout, rank, params, group, agreement=self._agreement, owner=owner,
            dtype=dtype or uniform_dtype(trained), device=next(iter(params.values())).device,
        )  # fmt: skip
        self._disk = DiskTransport(
            table, layout, rank, params, group, agreement=self._agreement,
            dtype=dtype if isinstance(dtype, torch.dtype) else None,
        )  # fmt: skip

    def upload(self, meta: WeightUpdateMeta) -> dict[str, float]:
        """Collective over the engine's ranks; returns when every server serves `meta.version`.

        The servers should be paused. Returns the owner's figures on every rank: bytes, buckets,
        broadcasts, gb_per_s, seconds by phase, all under "weight_sync/". A failure of any rank or
        server is an error on every rank, in at most `meta.timeout` plus half a minute; the servers
        may then hold a mixture, under their old version, and the next upload starts from scratch.
        """
        if meta.type == "colocated":
            raise ValueError(
                "WeightUpdateMeta.type='colocated' is not supported: use type='distributed', or "
                "'disk' where trainer and servers share a file system"
            )
        deadline, phases = Deadline(meta.timeout), Phases()
        disk = meta.type == "disk"
        self._agreement.set_timeout(meta.timeout)
        with bounded(self._group, meta.timeout + SLACK):  # gathers go through the engine's group
            (self._disk if disk else self._distributed).upload(meta, deadline, phases)
        return self._agreement.gather(phases.stats())[0 if disk else self.owner]

    def close(self) -> None:
        """Leaves the groups. Collective only in that every rank should do it."""
        self._distributed.close()
        self._agreement.close()
