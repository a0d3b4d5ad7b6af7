"""Worlds of a part of the ranks, as far as one process shows it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from megarl.parallel.groups import ProcessGroups, model_scope
from megarl.parallel.layout import Layout
from megarl.parallel.worlds import (
    PerWorld,
    World,
    everyone,
    inside,
    this_rank,
    thread_inside,
    waiting_for,
)


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    before = dist.is_initialized()
    if not before:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if not before:
        dist.destroy_process_group()


@pytest.fixture
def meshes(one_process: None) -> Iterator[tuple[World, World]]:
    pair = World([0]), World([0])
    yield pair
    for world in pair:
        world.destroy()


def test_scopes_nest_and_their_groups_never_share_a_name(meshes: tuple[World, World]) -> None:
    a, b = meshes
    everybody, names = dist.group.WORLD, set()

    def name_one() -> None:
        names.add(dist.new_group([0]).group_name)

    name_one()
    with a.scope():
        assert dist.group.WORLD is a.group and everyone() is everybody
        name_one()
        with b.scope():
            name_one()
            with a.scope():  # again, further inside
                name_one()
            with inside(everybody):
                assert dist.group.WORLD is everybody
                name_one()
            assert dist.group.WORLD is b.group
        name_one()
    name_one()
    assert dist.group.WORLD is everybody and len(names) == 7


class Kept(list[str]):
    """A list that can be referred to weakly."""


def test_what_is_kept_belongs_to_a_world_and_ends_with_it(meshes: tuple[World, World]) -> None:
    kept = PerWorld(Kept)
    kept.get().append("all")
    for world in meshes:
        with world.scope():
            assert kept.get() == []
            kept.get().append("mesh")
            assert kept.get() == ["mesh"]
    assert kept.get() == ["all"]
    mesh = World([0])
    mesh.destroy()
    mesh.destroy()  # which does nothing
    assert not mesh.member
    another = World([0])
    with another.scope():
        assert kept.get() == []
        things = [weakref.ref(kept.get())]
    another.destroy()
    last = World([0])
    with last.scope():
        things.append(weakref.ref(kept.get()))
        assert [thing() for thing in things] == [None, []]  # that of the ended world is gone
    last.destroy()


def test_destroying_a_world_ends_the_groups_that_were_made_in_it() -> None:
    from torch.distributed import distributed_c10d as c10d

    before = dict(c10d._world.pg_names)
    world = World([0])
    with world.scope():
        groups = ProcessGroups(Layout())
        dist.new_group([0])
    groups.release()
    ended = world.group
    world.destroy()
    with pytest.raises(RuntimeError, match="this world has ended"), inside(ended):
        pass
    assert dict(c10d._world.pg_names) == before


def test_a_model_is_in_its_world_wherever_it_is_called(meshes: tuple[World, World]) -> None:
    a, b = meshes
    with a.scope():
        groups = ProcessGroups(Layout())
    same = ProcessGroups(Layout())  # another world's groups are others
    assert groups.dp is not same.dp
    with b.scope(), model_scope(groups):
        assert dist.group.WORLD is a.group
        with b.scope(), model_scope(groups):
            assert dist.group.WORLD is a.group
    groups.release()
    same.release()


def test_a_thread_stays_in_the_world_it_began_in(meshes: tuple[World, World]) -> None:
    a, b = meshes
    entered, looked = threading.Event(), threading.Event()
    seen = []

    def work() -> None:
        with thread_inside(a.group):
            assert entered.wait(10)
            seen.append(dist.group.WORLD)
            looked.set()

    thread = threading.Thread(target=work)
    thread.start()
    with b.scope():
        entered.set()
        assert looked.wait(10)
        assert dist.group.WORLD is b.group
    thread.join(10)
    assert seen == [a.group]


def test_errors_name_the_rank_among_all_and_the_mesh(meshes: tuple[World, World]) -> None:
    where = r"rank 0 \(rank 0 of the mesh of ranks \[0\]\)"
    with (
        pytest.raises(
            RuntimeError, match=where + " gave up waiting for other ranks in a pass"
        ) as e,
        meshes[0].scope(),
        waiting_for(None, "a pass"),
    ):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Timed out waiting")
    assert "whose ranks the error names" in e.value.__notes__[-1]
    assert this_rank() == "0"


def test_wrong_ranks_and_places_are_refused(meshes: tuple[World, World]) -> None:
    with pytest.raises(ValueError, match=r"world of ranks \[0, 1\]: .* 0 to 0; there is no rank 1"):
        World([0, 1])
    for ranks in ([], [0, 0]):
        with pytest.raises(ValueError, match="they have to ascend"):
            World(ranks)
    with meshes[0].scope(), pytest.raises(ValueError, match="make worlds outside of every scope"):
        World([0])
