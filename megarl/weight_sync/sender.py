"""WeightSender: moves a training engine's weights to the generation servers."""

from __future__ import annotations

from megarl.api.records import WeightUpdateMeta
from megarl.config.rollout import transport_class
from megarl.parallel.agreement import SLACK
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.servers import Deadline
from megarl.weight_sync.transports import Transport, WeightSource
from megarl.wire.process_group import bounded


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
        phases, agreement = Phases(), self._source.agreement
        agreement.set_timeout(meta.timeout)
        transport = agreement.together(self._transport, meta)
        with bounded(self._source.group, meta.timeout + SLACK):  # gathers go through this group
            transport.upload(meta, deadline, phases)
        phases.metrics["servers"] = float(len(meta.addresses))
        return agreement.gather_from((transport.lead,), phases.stats())[0]

    def _transport(self, meta: WeightUpdateMeta) -> Transport:
        key = f"{meta.type} {dict(meta.options)}"
        if key not in self._transports:
            self._transports[key] = transport_class(meta.type)(self._source, **meta.options)
        return self._transports[key]

    def close(self) -> None:
        """Leaves the groups. Collective only in that every rank should do it."""
        for transport in self._transports.values():
            transport.close()
        self._source.agreement.close()
