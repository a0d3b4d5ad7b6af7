"""Servers and trainers on the same devices: who holds what, in which order it changes hands, and
what an error on the way leaves behind."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.api.engine import PARTS
from megarl.api.records import SaveLoadMeta, ServersLost
from megarl.config.rollout import WeightSyncConfig
from megarl.observability import stats_tracker
from megarl.trainer.turns import AlternateTurns, Turns, WeightPublisher


class FakeMemory:
    """Does what servers do: an error for what is released already, or held."""

    def __init__(self, said: list[str]) -> None:
        self.said, self.held, self.fails = said, {"weights", "kv_cache"}, ""

    def _may_fail(self, verb: str) -> None:
        if self.fails == verb:
            self.fails = ""
            raise RuntimeError(f"{verb} failed")

    def release(self, parts: Any) -> None:
        for part in [p for p in parts if p in self.held]:
            self._may_fail(f"release {part}")
            self.held.remove(part)
            self.said.append(f"servers release {part}")

    def resume(self, parts: Any) -> None:
        for part in [p for p in parts if p not in self.held]:
            self._may_fail(f"resume {part}")
            self.held.add(part)
            self.said.append(f"servers resume {part}")

    def usage(self) -> dict[str, int]:
        return {part: (1 << 30) * (part in self.held) for part in ("weights", "kv_cache")}


class FakeClient:
    """What turns and the publisher need of a client."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.memory = FakeMemory(self.said)
        self.pauses = self
        self.addresses = ["a:1", "b:1"]
        self.config = type("Config", (), {"kv_after_sync": "flush"})()

    def on_driver(self, fn: Any, *args: Any) -> Any:
        return fn(*args)

    def pause(self) -> None:
        self.said.append("pause")

    def resume(self) -> None:
        self.said.append("resume")

    def drop_servers(self, lost: dict[str, str]) -> None:
        self.addresses = [a for a in self.addresses if a not in lost]

    def update_weights(self, meta: Any) -> Any:
        return type("Arrival", (), {"result": lambda self, timeout: None})()


class FakeModel:
    """An engine whose parts are on the device or away."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said, self.held = name, said, list(PARTS)
        self.version, self.lost = 0, {}

    def offload(self, parts: Any) -> dict[str, int]:
        for part in [p for p in parts if p in self.held]:
            self.held.remove(part)
            self.said.append(f"{self.name} offloads {part}")
        return {}

    def onload(self, parts: Any, *, behind: bool = False) -> dict[str, int]:
        for part in [p for p in parts if p not in self.held]:
            self.held.append(part)
            self.said.append(f"{self.name} onloads {part}")
        return {}

    def occupied(self) -> dict[str, int]:
        return {part: (1 << 30) * (part in self.held) for part in PARTS}

    def save(self, meta: SaveLoadMeta) -> None:
        assert "params" in self.held
        self.said.append(f"{self.name} is saved")

    def upload_weights(self, meta: Any) -> dict[str, float]:
        assert self.held == ["params"]
        if self.lost:
            lost, self.lost = self.lost, {}
            raise ServersLost("lost", lost)
        self.said.append(f"sync of {meta.version} to {len(meta.addresses)}")
        return {}

    def get_version(self) -> int:
        return self.version

    def set_version(self, version: int) -> None:
        self.version = version


@pytest.fixture
def client() -> FakeClient:
    stats_tracker.export(over_ranks=False)
    return FakeClient()


def made(client: Any) -> tuple[AlternateTurns, FakeModel, FakeModel, WeightPublisher]:
    """The turns of a run with two trained models, and what publishes the first."""
    turns = AlternateTurns(client)
    actor, critic = FakeModel("actor", client.said), FakeModel("critic", client.said)
    turns.models += [actor, critic]
    config = WeightSyncConfig(type="disk")
    return turns, actor, critic, WeightPublisher(actor, client, config, path="/p", turns=turns)


def taken(client: FakeClient) -> list[str]:
    said = list(client.said)
    client.said.clear()
    return said


def test_a_step_goes_through_all_turns_in_order(client: FakeClient) -> None:
    turns, actor, _, publisher = made(client)
    # before any model is there: the trainers are made on devices that are free
    start = ["pause", "servers release weights", "servers release kv_cache"]
    assert taken(client) == start
    publisher.publish(0)
    to_sync = [
        *(
            f"{m} offloads {part}"
            for m in ("actor", "critic")
            for part in PARTS
            if part != "params"
        ),
        "servers resume weights",
    ]
    assert taken(client) == [*to_sync, "sync of 0 to 2"]
    turns.saving(actor).save(SaveLoadMeta(path="p"))
    assert taken(client) == ["actor is saved"]
    for step in (1, 2):
        turns.generate()
        to_generate = ["actor offloads params", "critic offloads params", "servers resume kv_cache"]
        assert taken(client) == [*to_generate, "resume"]
        turns.generate()  # an evaluation before the rollouts
        turns.train()
        back = [f"{m} onloads {part}" for m in ("actor", "critic") for part in PARTS]
        assert taken(client) == [*start, *back]
        publisher.publish(step)
        assert taken(client) == [*to_sync, f"sync of {step} to 2"]
    assert actor.version == 2


def test_every_turn_tells_what_was_held(client: FakeClient) -> None:
    turns, _, _, publisher = made(client)
    publisher.publish(0)
    turns.generate()
    turns.train()
    found = {k: v for k, v in stats_tracker.export(over_ranks=False).items() if "_gib" in k}
    held = {name.removesuffix("_gib") for name, gib in found.items() if gib}
    assert held == {
        *(f"memory/train/{part}" for part in PARTS),
        *("memory/sync/params", "memory/sync/server_weights"),
        *("memory/generate/server_weights", "memory/generate/server_kv_cache"),
    }
    assert found["memory/train/params_gib"] == 2.0 and len(found) == 15
    publisher.publish(1)  # the last of a step, whose metrics have it
    found = stats_tracker.export(over_ranks=False)
    assert found["memory/sync/server_weights_gib"] == 1.0


def test_a_model_is_saved_after_an_evaluation(client: FakeClient) -> None:
    """The servers keep their weights; they give up the cache for those of the trained models."""
    turns, actor, _, publisher = made(client)
    publisher.publish(0)
    turns.generate()
    taken(client)
    turns.saving(actor).save(SaveLoadMeta(path="p"))
    onload = ["actor onloads params", "critic onloads params"]
    assert taken(client) == ["pause", "servers release kv_cache", *onload, "actor is saved"]
    turns.generate()  # with the weights that they hold
    assert taken(client)[-2:] == ["servers resume kv_cache", "resume"]


def test_nothing_is_generated_before_the_weights_are_back(client: FakeClient) -> None:
    turns, _, _, publisher = made(client)
    with pytest.raises(RuntimeError, match=r"call publisher\.publish at the end of a step"):
        turns.generate()
    publisher.publish(0)
    turns.generate()
    turns.train()
    turns.sync()  # and a sync that fails then
    with pytest.raises(RuntimeError, match=r"call publisher\.publish"):
        turns.generate()
    assert "resume" not in taken(client)[-3:]


@pytest.mark.parametrize("what", ["release weights", "release kv_cache"])
def test_a_turn_that_failed_is_entered_again(client: FakeClient, what: str) -> None:
    turns, actor, _, publisher = made(client)
    publisher.publish(0)
    turns.generate()
    client.memory.fails = what
    with pytest.raises(RuntimeError, match=what):
        turns.train()
    assert actor.held == []  # it did not come back beside servers that hold memory
    turns.train()
    assert client.memory.held == set() and actor.held == list(PARTS)


@pytest.mark.parametrize("what", ["resume weights", "resume kv_cache"])
def test_servers_that_cannot_wake_leave_a_state_to_go_on_from(
    client: FakeClient, what: str
) -> None:
    turns, actor, _, publisher = made(client)
    client.memory.fails = what
    with pytest.raises(RuntimeError, match=what):
        publisher.publish(0)
        turns.generate()
    taken(client)
    publisher.publish(1)
    turns.generate()
    assert client.memory.held == {"weights", "kv_cache"} and actor.held == []
    assert taken(client).count("resume") == 1


def test_a_server_that_is_lost_in_the_sync_is_left_out(client: FakeClient) -> None:
    turns, actor, _, publisher = made(client)
    actor.lost = {"a:1": "gone"}
    publisher.publish(0)
    assert taken(client)[-1] == "sync of 0 to 1"
    turns.generate()
    assert client.addresses == ["b:1"]


def test_without_turns_a_sync_pauses_and_resumes(client: FakeClient) -> None:
    turns: Any = Turns(client)  # type: ignore[arg-type]
    turns.generate()
    turns.train()
    assert taken(client) == []
    turns.sync()
    turns.synced()
    assert taken(client) == ["pause", "resume"]
