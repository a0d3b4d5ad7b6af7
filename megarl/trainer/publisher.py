"""WeightPublisher brings a model's new weights to every generation server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from megarl.api.records import ServersLost, WeightUpdateMeta
from megarl.config.rollout import WeightSyncConfig
from megarl.observability.timeline import SYNCS, timeline
from megarl.rollout.client import RemoteSGLangEngine
from megarl.trainer.turns import Turns


class Uploads(Protocol):
    """Uploads weights to servers: a role or an engine."""

    def upload_weights(self, meta: WeightUpdateMeta) -> dict[str, float]:
        """Sends the weights to the servers of `meta`; returns phases (s) and bytes. Raises
        ServersLost where servers are lost on the way. Collective."""

    def get_version(self) -> int:
        """Returns the version of the weights."""

    def set_version(self, version: int) -> None:
        """Sets the version of the weights."""


class WeightPublisher:
    """Sends the weights of `model` to the servers of `client`; every rank makes one.

    path: a directory on shared storage, for transports that write files. turns: those of servers
    and trainers on the same devices; None lets both keep their memory.
    """

    def __init__(
        self,
        model: Uploads,
        client: RemoteSGLangEngine,
        config: WeightSyncConfig,
        *,
        path: str | Path,
        turns: Turns | None = None,
    ) -> None:
        self._model, self._client, self._config, self._path = model, client, config, path
        self._turns = turns or Turns(client)
        self._published = False

    def publish(self, version: int | None = None) -> dict[str, float]:
        """Pauses generation, uploads, waits until every server has the weights, and resumes; where
        devices are used in turn, generation goes on in its own turn.

        version: the number of these weights, from then on the model's and the client's; None is the
        next. Returns phases (s) and bytes as weight_sync/... Collective. Where servers are lost on
        the way, all of it is sent again to the others: they hold a mixture until then, and are
        paused.
        """
        client, turns = self._client, self._turns
        version = self._model.get_version() + 1 if version is None else version
        begun = time.monotonic()
        with timeline.span(SYNCS, "pause"):
            turns.sync()
            addresses = client.on_driver(_addresses, client)
        seconds = {"weight_sync/pause_s": time.monotonic() - begun}
        while True:
            meta = self._meta(version, addresses)
            try:
                with timeline.span(SYNCS, "upload") as about:
                    stats = self._model.upload_weights(meta)
                    about |= {"version": version, **stats}
                break
            except ServersLost as e:  # the same on every rank
                addresses = client.on_driver(_go_on_without, client, e.servers)
        begun = time.monotonic()
        with timeline.span(SYNCS, "resume"):
            # the arrival's own bound, meta.timeout, comes first
            client.update_weights(meta).result(timeout=2 * meta.timeout)
            turns.synced()
        seconds["weight_sync/resume_s"] = time.monotonic() - begun
        self._model.set_version(version)
        self._published = True
        return stats | seconds

    def _meta(self, version: int, addresses: list[str]) -> WeightUpdateMeta:
        return WeightUpdateMeta.from_config(
            self._config,
            path=self._path,
            addresses=addresses,
            version=version,
            first=not self._published,
            flush_cache=self._client.config.kv_after_sync == "flush",
        )


def _addresses(client: RemoteSGLangEngine) -> list[str]:
    """Returns the servers that paused; the others have been dropped. On the driver."""
    return client.addresses


def _go_on_without(client: RemoteSGLangEngine, lost: dict[str, str]) -> list[str]:
    """Drops the lost servers and returns those that are left. On the driver."""
    client.drop_servers(lost)
    return client.addresses
