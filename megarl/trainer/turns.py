"""Brings a model's new weights to every generation server, and gives the devices to the servers
and to the trainers in turn, where both are on the same ones.

| turn | servers hold | trained models hold | what is done |
| --- | --- | --- | --- |
| generate | weights, KV cache | nothing | rollouts, evaluation |
| train | nothing | weights, optimizer, gradients | logprobs, values, updates |
| sync | weights | weights | the sync; models are saved |

A turn begins when the step needs it, and it is made so in one order: the servers are paused, the
side that gives up goes first, then the other takes. Whatever has failed on the way, the next turn
is made from what each side really holds. Frozen models rest in host memory but for their passes.
Checkpoints are written from where their parts are, in any turn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.algos import Role
from megarl.api.engine import PARTS, TrainEngine
from megarl.api.records import SaveLoadMeta, ServersLost, WeightUpdateMeta
from megarl.config.recipe_engines import FROZEN, engines, takes_turns
from megarl.config.recipes import GRPOConfig
from megarl.config.rollout import WeightSyncConfig
from megarl.engine.offload import other_bytes_in_use
from megarl.observability import stats_tracker
from megarl.observability.timeline import MEMORY, SYNCS, timeline
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.pausing import KV_CACHE, WEIGHTS
from megarl.trainer.saver import Saves


@dataclass(frozen=True)
class Turn:
    """Names a turn, and says which parts of their memory servers and trained models hold in it."""

    name: str
    servers: tuple[str, ...]
    models: tuple[str, ...]


GENERATE = Turn("generate", (WEIGHTS, KV_CACHE), ())
TRAIN = Turn("train", (), PARTS)
SYNC = Turn("sync", (WEIGHTS,), ("params",))


class Turns:
    """Lets servers and trainers keep their memory: a turn changes nothing but who may generate.
    `models`: those that are trained. Every method is collective."""

    def __init__(self, client: RemoteSGLangEngine) -> None:
        self.client = client
        self.models: list[Role | TrainEngine] = []

    def generate(self) -> None:
        """Has the servers be able to generate."""

    def train(self) -> None:
        """Has the trained models be able to train."""

    def sync(self) -> None:
        """Has paused servers be able to receive the trained models' weights."""
        self.client.on_driver(_pause, self.client)

    def synced(self) -> None:
        """Notes that the servers hold the models' weights."""
        self.client.on_driver(_resume, self.client)

    def saving(self, model: Saves) -> Saves:
        """Returns what saves `model` in a turn that lets it."""
        return model


class AlternateTurns(Turns):
    """Has servers and trained models give their memory up to each other. It begins with the
    trainers' turn: the servers sized their KV cache while they had the devices to themselves."""

    def __init__(self, client: RemoteSGLangEngine) -> None:
        super().__init__(client)
        self._turn: Turn | None = GENERATE  # None where a change has failed half way
        self._since = time.time()
        self._fresh = True  # the servers' weights are whole
        self._enter(TRAIN)

    def generate(self) -> None:
        """Begins the servers' turn. Raises RuntimeError where they hold no weights: nothing was
        published since they gave them up."""
        if not self._fresh:
            raise RuntimeError(
                "the servers gave up their weights for the trainers' turn, and got no others: call "
                "publisher.publish at the end of a step"
            )
        self._enter(GENERATE)

    def train(self) -> None:
        """Begins the trainers' turn."""
        self._enter(TRAIN)

    def sync(self) -> None:
        """Begins the turn of both: weights alone. The servers are paused."""
        self._enter(SYNC)

    def synced(self) -> None:
        """Notes that the servers' weights are whole; they wait for the next turn."""
        self._fresh = True
        _tell(SYNC.name, self._held())  # of this step: the turn may end in the next one

    def saving(self, model: Saves) -> Saves:
        """Returns what saves `model` with its weights on the device."""
        return _SavedInTurn(self, model)

    def _enter(self, turn: Turn) -> None:
        """Makes `turn` the turn. Where it fails, any turn may be entered next: every call asks for
        what is not yet so."""
        if turn == self._turn:
            return
        client, begun = self.client, time.monotonic()
        before, self._turn = self._turn, None
        if before is not None:
            self._sample(before.name)
        if before in (GENERATE, None):
            client.on_driver(_pause, client)
        self._fresh &= WEIGHTS in turn.servers
        for model in self.models:
            model.offload([p for p in PARTS if p not in turn.models])
        given_up = [p for p in GENERATE.servers if p not in turn.servers]
        # each call begins when all ranks are there, so when all have given up their part
        client.on_driver(_release, client, given_up)
        client.on_driver(_take, client, turn.servers)
        for model in self.models:
            model.onload(turn.models, behind=turn == TRAIN)
        if turn == GENERATE:
            client.on_driver(_resume, client)
        self._turn, self._since = turn, time.time()
        stats_tracker.peak(**{f"memory/{turn.name}/change_s": time.monotonic() - begun})

    def _sample(self, name: str) -> None:
        """Notes what each part holds at the end of a turn, as metrics and in the timeline."""
        held = self._held()
        if name != SYNC.name:
            _tell(name, held)
        timeline.record(MEMORY, name, self._since, time.time() - self._since, **held)

    def _held(self) -> dict[str, int]:
        """Returns the bytes that each part has on a device now."""
        servers = self.client.on_driver(_usage, self.client)
        held = {f"server_{part}": n for part, n in servers.items()}
        for part in PARTS:
            held[part] = sum(model.occupied().get(part, 0) for model in self.models)
        other = other_bytes_in_use(sum(held.values()))
        return held if other is None else {**held, "other": other}


def _tell(turn: str, held: dict[str, int]) -> None:
    """Gives the step its metrics of what each part holds in a turn."""
    gib = {f"memory/{turn}/{part}_gib": n / 2**30 for part, n in held.items()}
    stats_tracker.peak(**gib)


class _SavedInTurn:
    """Saves a trained model's weights: in the turn of the sync, where they are on the device."""

    def __init__(self, turns: AlternateTurns, model: Saves) -> None:
        self._turns, self._model = turns, model

    def save(self, meta: SaveLoadMeta) -> None:
        """Writes the weights. Collective."""
        self._turns.sync()
        self._model.save(meta)


def make_turns(cfg: GRPOConfig, client: RemoteSGLangEngine) -> Turns:
    """Returns the turns of a run whose servers are there; where they alternate, it begins with the
    trainers', and frozen models are made to rest in host memory between passes. Collective."""
    if not takes_turns(cfg):
        return Turns(client)
    for name, engine in engines(cfg).items():
        engine.offload |= name in FROZEN
    return AlternateTurns(client)


class WeightPublisher:
    """Sends the weights of `model` to the servers of `client`; every rank makes one.

    path: a directory on shared storage, for transports that write files. turns: those of servers
    and trainers on the same devices; None lets both keep their memory.
    """

    def __init__(
        self,
        model: Role | TrainEngine,
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


# on the driver


def _pause(client: RemoteSGLangEngine) -> None:
    client.pause()


def _resume(client: RemoteSGLangEngine) -> None:
    client.resume()


def _release(client: RemoteSGLangEngine, parts: Sequence[str]) -> None:
    client.pauses.memory.release(parts)


def _take(client: RemoteSGLangEngine, parts: Sequence[str]) -> None:
    client.pauses.memory.resume(parts)


def _usage(client: RemoteSGLangEngine) -> dict[str, int]:
    return client.pauses.memory.usage()


def _addresses(client: RemoteSGLangEngine) -> list[str]:
    """Returns the servers that paused; the others have been dropped."""
    return client.addresses


def _go_on_without(client: RemoteSGLangEngine, lost: dict[str, str]) -> list[str]:
    """Drops the lost servers and returns those that are left."""
    client.drop_servers(lost)
    return client.addresses
