"""Sends weights by slices where the servers can take them, else by broadcasts of whole tensors."""

from __future__ import annotations

from megarl.api.records import WeightUpdateMeta
from megarl.config.rollout import TRANSPORTS
from megarl.weight_sync.broadcast import Broadcast
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.servers import Deadline
from megarl.weight_sync.slices import SliceSync
from megarl.weight_sync.transports import Transport, WeightSource


class DistributedTransport(Transport):
    """Chooses between slices and the broadcast, at every upload."""

    requirements = TRANSPORTS["distributed"].requirements

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        self._slices = SliceSync(source)
        self._broadcast: Broadcast | None = None

    def upload(self, meta: WeightUpdateMeta, deadline: Deadline, phases: Phases) -> None:
        """Sends slices, or whole tensors, to the servers. Collective. Raises
        RuntimeError where a rank or server fails, ServersLost where some are lost; the next upload
        then connects anew."""
        sharded = meta.sharded != "off" and self._slices.upload(meta, deadline, phases)
        phases.metrics["sharded"] = float(sharded)
        if sharded:
            return
        plan, gatherer = self.plan_buckets(meta.bucket_bytes)
        self._broadcast = self._broadcast or Broadcast(self.source)
        if self._broadcast.upload(plan, gatherer, meta, deadline, phases):
            self._slices.ask_again()

    def close(self) -> None:
        """Drops copies and buffers, and leaves the groups. Servers may object, which is logged."""
        self._slices.close()
        if self._broadcast is not None:
            self._broadcast.close()
