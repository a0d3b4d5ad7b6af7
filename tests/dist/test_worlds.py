"""Engines that span a part of the ranks: disjoint meshes run side by side, others take turns."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.api.batch import Batch
from megarl.api.records import FinetuneSpec, SaveLoadMeta
from megarl.ckpt import dist as ckpt
from megarl.ckpt.background import PendingSave
from megarl.config.algo import PPOActorConfig
from megarl.config.engine import LoRAConfig, MicroBatchSpec, OptimizerConfig
from megarl.parallel.worlds import World
from megarl.trainer.roles import MegatronActor
from tests.dist.engine_jobs import (
    OPTIMIZER,
    Tensors,
    batch,
    loss_fn,
    make_engine,
    save_model,
    state,
    weight_fn,
)
from tests.dist.test_roles import bring, samples

OUT: dict[str, Any] = dict(outputs=("logprobs", "entropy"))
PAIR: dict[str, Any] = dict(tp=2, sequence_parallel=True)
STAGES: dict[str, Any] = dict(pp=2)
Mesh = tuple[list[int], dict[str, Any]]


@pytest.fixture(scope="module")
def path(models: Path) -> str:
    return save_model(models, "qwen2", True)


def step(engine: Any) -> dict[str, float]:
    stats: dict[str, float] = engine.train_batch(batch(), loss_fn, weight_fn, **OUT)
    return stats


def assert_same(a: Any, b: Any) -> None:
    """Compares nested answers to the bit."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert_same(value, b[name])
    elif torch.is_tensor(a):
        assert torch.equal(a, b)
    else:
        assert a == b


# ---- training ------------------------------------------------------------------------------------


def trained(engine: Any) -> dict[str, Any]:
    """Makes two steps, each verb called outside of every scope."""
    answers = {f"step {i}": step(engine) for i in range(2)}
    result = dict(answers, logp=engine.forward(batch()), weights=state(engine))
    engine.destroy()
    return result


def run_meshes(path: str, meshes: list[Mesh]) -> list[Any]:
    """Trains an engine on each mesh; returns what each gave on this rank, None where it is not."""
    worlds = [World(ranks) for ranks, _ in meshes]
    engines = [make_engine(path, p, world=w) for w, (_, p) in zip(worlds, meshes, strict=True)]
    found = [trained(e) if e.is_member else e.destroy() for e in engines]
    for world in reversed(worlds):
        world.destroy()
    assert dist.get_world_size() == 4
    return found


def run_whole(path: str, specs: list[dict[str, Any]]) -> list[Any]:
    return [trained(make_engine(path, spec)) for spec in specs]


def test_meshes_train_to_the_bits_of_whole_worlds(world2: Any, world4: Any, path: str) -> None:
    """Two disjoint meshes, then one that holds both, then one that overlaps them."""
    pair, stages = zip(*world2.run(run_whole, path, [PAIR, STAGES]), strict=True)
    meshes: list[Mesh] = [([2, 3], PAIR), ([0, 1], STAGES), ([0, 1, 2, 3], PAIR), ([1, 2], PAIR)]
    found = world4.run(run_meshes, path, meshes)
    (whole,) = zip(*world4.run(run_whole, path, [PAIR]), strict=True)
    for i, ((ranks, _), want) in enumerate(zip(meshes, (pair, stages, whole, pair), strict=True)):
        for rank in range(4):
            got = found[rank][i]
            assert (got is not None) == (rank in ranks)
            if got is not None:
                assert_same(got, want[ranks.index(rank)])
    assert pair[0]["weights"]  # rank 0 has them whole


# ---- an actor ------------------------------------------------------------------------------------


def updated(path: str, world: World | None, origin: str) -> Any:
    """Returns metrics and weights after an update; the verbs are called outside of the scope."""
    config = PPOActorConfig(
        path=path,
        ppo_n_minibatches=2,
        logp_gap_warn=100.0,
        optimizer=OptimizerConfig(**OPTIMIZER),
        mb_spec=MicroBatchSpec(max_tokens_per_mb=40),
    )
    actor = MegatronActor(config, temperature=1.0, world=world)
    actor.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=8, train_batch_size=1))
    if not actor.engine.is_member:
        with pytest.raises(RuntimeError, match=r"is not of the mesh of ranks \[2, 3\]"):
            actor.compute_advantages(samples())
        actor.destroy()
        return None
    data: Any = samples()
    if origin != "a dict":
        with world.scope() if world else nullcontext():
            data = bring(data, origin)
    actor.compute_prox_logp(data)
    actor.compute_advantages(data)
    assert origin == "a dict" or len(data.rows) < len(data)  # they went to where they are worked on
    result = dict(stats=actor.ppo_update(data), weights=state(actor.engine))
    actor.destroy()
    return result


def run_updates(path: str, ranks: list[int] | None) -> Any:
    world = World(ranks) if ranks else None
    return [updated(path, world, origin) for origin in ("one driver", "all drive", "a dict")]


def test_an_actor_on_a_mesh_updates_as_on_a_whole_world(
    world2: Any, world4: Any, path: str
) -> None:
    want = world2.run(run_updates, path, None)
    found = world4.run(run_updates, path, [2, 3])
    assert found[:2] == [[None] * 3] * 2
    for got, expected in zip(found[2:], want, strict=True):
        for a, b in zip(got, expected, strict=True):
            assert_same(a, b)


# ---- weights from mesh to mesh -------------------------------------------------------------------


def meta(path: str, kind: str, **kw: Any) -> SaveLoadMeta:
    return SaveLoadMeta(path=path, weight_format=kind, **kw)


def run_copies(path: str, root: str) -> dict[str, Any]:
    """Passes weights on from mesh to mesh, and returns the names that arrived wrong, by target."""
    wrong: dict[str, Any] = {}
    a, b, c, d = (World(ranks) for ranks in ([0, 1], [2, 3], [1, 2], [2]))
    lora = LoRAConfig(r=4, alpha=8.0)
    actor = make_engine(path, PAIR, world=a, lora=lora)  # its adapters arrive merged
    if actor.is_member:
        step(actor)
        actor.set_version(7)
        actor.save(meta(f"{root}/actor", "hf"))
    dist.barrier()
    saved = load_file(f"{root}/actor/model.safetensors")

    def check(name: str, engine: Any, want: Tensors) -> None:
        assert engine.get_version() == 7 or not engine.is_member
        held = state(engine) if engine.is_member else {}
        wrong[name] = [n for n, t in held.items() if not torch.equal(t, want[n])]

    trainer = make_engine(path, STAGES, world=b)
    stats = trainer.copy_weights(actor)  # disjoint
    assert trainer.get_version() == 7 and (stats["sent"] > 0) == a.member
    check("disjoint", trainer, saved)
    fresh = make_engine(f"{root}/actor", STAGES, world=b)
    if fresh.is_member:  # the optimizer goes on from what came
        assert step(trainer) == step(fresh)
        assert_same(state(trainer), state(fresh))
        trainer.save(meta(f"{root}/trainer", "hf"))
    dist.barrier()
    newer = load_file(f"{root}/trainer/model.safetensors")

    follower = make_engine(path, {}, trained=False, world=c)
    quiet = follower.copy_weights(trainer)  # overlapping; rank 0 is of neither
    assert dist.get_rank() != 0 or quiet == {"sent": 0, "kept": 0, "peak": 0}
    check("overlapping", follower, newer)
    mean = {n: torch.lerp(t, saved[n], 0.25) for n, t in newer.items()}
    follower.copy_weights(actor, keep=0.75)
    check("mean", follower, mean)
    one = make_engine(path, {}, trained=False, world=d)
    one.copy_weights(follower)  # a part of the source's
    check("subset", one, mean)
    everywhere = make_engine(path, dict(tp=2, pp=2), trained=False)
    everywhere.copy_weights(one)
    check("superset", everywhere, mean)
    again = make_engine(path, PAIR, trained=False, world=b)
    with b.scope() if b.member else nullcontext():  # the same ranks, and a scope is entered
        again.copy_weights(trainer)
    check("equal", again, newer)
    with b.scope() if b.member else nullcontext():
        again.copy_weights(everywhere)
    check("part", again, mean)
    if actor.is_member:
        actor.offload(("params",))
    refused = "needs ('params',)" in error_of(again.copy_weights, actor)  # heard of everywhere
    wrong["offloaded"] = [] if refused else ["not refused"]
    for engine in (actor, trainer, fresh, follower, one, everywhere, again):
        engine.destroy()
    for world in (d, c, b, a):
        world.destroy()
    return wrong


def test_weights_pass_from_mesh_to_mesh(world4: Any, path: str, tmp_path: Path) -> None:
    for wrong in world4.run(run_copies, path, str(tmp_path)):
        assert len(wrong) == 8 and not any(wrong.values()), wrong


# ---- checkpoints ---------------------------------------------------------------------------------


def run_saves(path: str, root: str) -> tuple[Any, Any]:
    """Saves an engine of one mesh in a thread, which writes while another mesh's scope is entered;
    returns the metrics of the engine's next step, and of one that another mesh loaded."""
    a, b, c = World([1, 2]), World([2, 3]), World([0, 3])
    saver, other = make_engine(path, PAIR, world=a), make_engine(path, PAIR, world=b)
    go = threading.Event()

    def late(what: str, staging: Path, write: Any, complete: Any) -> PendingSave[Any]:
        return PendingSave(what, staging, lambda: go.wait(60) and write(), complete)

    next_step = None
    if saver.is_member:
        step(saver)
        with mock.patch.object(ckpt, "PendingSave", late):
            pending = saver.begin_save(meta(f"{root}/state", "dist", with_optim=True))
    if other.is_member:
        step(other)
        with b.scope():  # the thread of rank 2 writes here, that of rank 1 outside of every scope
            go.set()
            if saver.is_member:
                (writer,) = (t for t in threading.enumerate() if t.name.startswith("megarl saving"))
                writer.join(60)
                assert not writer.is_alive()
    go.set()
    if saver.is_member:
        next_step = step(saver)
        pending.finish()
        saver.save(meta(f"{root}/later", "hf"))
    dist.barrier()
    loader = make_engine(path, PAIR, world=c)
    if loader.is_member:
        loader.load(meta(f"{root}/later", "hf"))
        held, later = state(loader), load_file(f"{root}/later/model.safetensors")
        assert not held or all(torch.equal(held[name], later[name]) for name in later)
        loader.load(meta(f"{root}/state", "dist", with_optim=True))
        next_step = step(loader)
    for engine in (saver, other, loader):
        engine.destroy()
    for world in (c, b, a):
        world.destroy()
    return next_step


def test_a_mesh_saves_in_a_thread_whichever_scope_is_entered(
    world4: Any, path: str, tmp_path: Path
) -> None:
    loaded, saved, also_saved, also_loaded = world4.run(run_saves, path, str(tmp_path))
    assert saved["loss"] > 0 and saved == also_saved == loaded == also_loaded


# ---- errors --------------------------------------------------------------------------------------


def error_of(fn: Any, *args: Any) -> str:
    with pytest.raises((ValueError, RuntimeError)) as e:
        fn(*args)
    return str(e.value)


def run_errors(path: str) -> dict[str, str]:
    world, everywhere = World([1, 2]), Batch.from_padded(batch())
    engine, said = make_engine(path, PAIR, world=world), {}
    said["rank"] = error_of(World, [1, 4])
    if engine.is_member:
        with world.scope():
            said["nested"] = error_of(World, [1])
        said["batch"] = error_of(engine.forward, everywhere)
    else:
        verbs = dict(forward=(batch(),), save=(meta(path, "hf"),), offload=(), onload=())
        for verb, args in (verbs | dict(train_batch=(batch(), loss_fn, weight_fn))).items():
            said[verb] = error_of(getattr(engine, verb), *args)
        with pytest.raises(RuntimeError, match="is not of the mesh"), world.scope():
            pass
    engine.destroy()
    world.destroy()
    return said


def test_errors_of_meshes_name_their_ranks(world4: Any, path: str) -> None:
    found = world4.run(run_errors, path)
    for rank, said in enumerate(found):
        assert "there is no rank 4" in said.pop("rank")
        if rank in (1, 2):
            mesh = f"rank {rank} (rank {rank - 1} of the mesh of ranks [1, 2])"
            assert said["nested"].startswith(mesh)
            assert "ranks [0, 1, 2, 3], the engine of ranks [1, 2]" in said["batch"]
        else:
            assert len(said) == 5
            for text in said.values():
                assert f"on the mesh of ranks [1, 2], not on rank {rank}" in text
