"""Replies through the store of a link, when its HTTP answers are there first."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import torch

from megarl.weight_sync import link, servers
from megarl.weight_sync.link import Link, Members, open_store
from megarl.weight_sync.servers import Deadline

SERVER = "127.0.0.1:1"


@pytest.fixture
def speaker() -> Link:
    store, where = open_store("127.0.0.1", 30.0)
    return Link(Members(1, {SERVER: 2}, "gloo"), 0, where, torch.device("cpu"), 30.0, store)


def answer(link_: Link, replies: list[tuple[int, float]]) -> Any:
    """A server's HTTP, whose ranks' replies reach the store so many seconds after its answer."""

    def call(_method: str, _server: str, _path: str, _body: Any, **_: Any) -> dict[str, Any]:
        for rank, late in replies:
            place = f"reply/command/0/{rank}"
            value = json.dumps({"ok": True, "rank": rank}).encode()
            threading.Timer(late, link_.box.put, (place, value)).start()
        return {}

    return call


class Id:
    hex = "command"


@pytest.fixture(autouse=True)
def one_id(monkeypatch: pytest.MonkeyPatch, speaker: Link) -> None:
    monkeypatch.setattr(link.uuid, "uuid4", Id)
    # the server lives, however long its replies take
    monkeypatch.setattr(servers, "sign_of_life", lambda *_: None)


def test_a_reply_that_comes_after_the_answer_is_taken(
    monkeypatch: pytest.MonkeyPatch, speaker: Link
) -> None:
    monkeypatch.setattr(link, "call_json", answer(speaker, [(0, 0.3), (1, 0.1)]))
    replies = speaker.call("holds", Deadline(20.0))[SERVER]
    assert [reply["rank"] for reply in replies] == [0, 1]


def test_a_store_that_is_held_up_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch, speaker: Link
) -> None:
    look = speaker.box.has

    def late(what: str) -> bool:
        found = look(what)
        time.sleep(0.5)
        return found

    monkeypatch.setattr(link, "REPLY_LOOKS", 2)
    monkeypatch.setattr(speaker.box, "has", late)
    monkeypatch.setattr(link, "call_json", answer(speaker, [(0, 0.1), (1, 0.1)]))
    assert len(speaker.call("holds", Deadline(20.0))[SERVER]) == 2


def test_a_rank_that_says_nothing_is_an_error_in_bounded_time(
    monkeypatch: pytest.MonkeyPatch, speaker: Link
) -> None:
    monkeypatch.setattr(link, "REPLY_LOOKS", 20)
    monkeypatch.setattr(link, "call_json", answer(speaker, [(0, 0.0)]))
    with pytest.raises(RuntimeError, match=r"rank 1 did not reply .* MEGARL_JOB_TOKEN"):
        speaker.call("holds", Deadline(20.0))


def test_a_group_that_comes_together_after_it_was_left_is_not_kept() -> None:
    """A thread may still be joining when everybody has given up."""
    store, where = open_store("127.0.0.1", 30.0)
    alone = Link(Members(1, {}, "gloo"), 0, where, torch.device("cpu"), 30.0, store)
    alone.leave(abort=True)
    with pytest.raises(RuntimeError):
        alone.join(Deadline(30.0), 30.0, ())
    assert alone.group is None
    store, where = open_store("127.0.0.1", 30.0)
    another = Link(Members(1, {}, "gloo"), 0, where, torch.device("cpu"), 30.0, store)
    another.join(Deadline(30.0), 30.0, ())
    assert another.group is not None
    another.leave()
