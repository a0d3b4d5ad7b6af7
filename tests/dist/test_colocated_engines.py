"""Actor, reference and critic on the same four ranks, each in its own layout, in and out of memory.

Each engine computes what it computes alone, whatever the others do in between.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from megarl.api.engine import PARTS
from megarl.api.records import SaveLoadMeta
from megarl.config.engine import LoRAConfig
from megarl.engine import offload
from tests.dist.engine_jobs import batch, loss_fn, make_engine, save_model, state, weight_fn
from tests.tiny import save_tiny

OUT = dict(outputs=("logprobs", "entropy"))
ACTOR = dict(parallel=dict(tp=2, pp=2))
REF = dict(parallel={}, trained=False, offload=True)
RANDOM = dict(value_head_init="random")
CRITIC = dict(
    parallel=dict(tp=2, sequence_parallel=True),
    head="value",
    options=RANDOM,
)


LORA = LoRAConfig(r=4, alpha=8.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models"), "qwen2", True)


def value_loss(outputs: Any, b: Any) -> Any:
    mask = b["loss_mask"].float()
    return ((outputs["values"] - 0.5).square() * mask).sum(), {}


class Calls:
    """Calls engines by name and keeps the answers of each."""

    def __init__(self, path: str) -> None:
        self.path, self.engines = path, {}
        self.answers: dict[str, list[Any]] = {"actor": [], "ref": [], "critic": []}

    def start(self, name: str, spec: dict[str, Any]) -> None:
        self.engines[name] = make_engine(self.path, **spec)

    def call(self, name: str) -> None:
        engine = self.engines[name]
        if name == "ref":
            answer = engine.forward(batch())
        elif name == "actor":
            logp = engine.forward(batch())
            answer = (logp, engine.train_batch(batch(), loss_fn, weight_fn, **OUT))
        else:
            values = engine.forward(batch(), outputs=("values",))
            figures = engine.train_batch(batch(), value_loss, weight_fn, outputs=("values",))
            answer = (values, figures)
        self.answers[name].append(answer)

    def finish(self, name: str) -> None:
        engine = self.engines.pop(name)
        self.answers[name].append(state(engine) if name != "ref" else {})
        engine.destroy()


def alone(path: str) -> dict[str, list[Any]]:
    calls = Calls(path)
    for name, spec in (("actor", ACTOR), ("ref", REF | {"offload": False}), ("critic", CRITIC)):
        calls.start(name, dict(spec))
        for _ in range(2):
            calls.call(name)
        calls.finish(name)
    return calls.answers


def together(path: str) -> dict[str, list[Any]]:
    calls = Calls(path)
    for name, spec in (("critic", CRITIC), ("actor", ACTOR), ("ref", REF)):
        calls.start(name, dict(spec))
    for _ in range(2):
        calls.engines["critic"].offload()
        calls.call("actor")
        calls.call("ref")
        calls.engines["actor"].offload(("optimizer", "grads"))
        calls.engines["critic"].onload()
        calls.call("critic")
        calls.engines["actor"].onload()
    for name in ("actor", "critic", "ref"):
        calls.finish(name)
    return calls.answers


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if torch.is_tensor(a) else a == b


def test_engines_that_share_ranks_compute_what_they_compute_alone(world4, path):
    want, got = world4.run(alone, path), world4.run(together, path)
    for rank in range(4):
        for name, answers in want[rank].items():
            assert same(got[rank][name], answers), (rank, name)
    actor_weights = got[0]["actor"][-1]
    assert actor_weights and not same(got[0]["actor"][0], got[0]["actor"][1]), "it was trained"


def follow(path: str, root: str, actor_spec: dict[str, Any]) -> dict[str, Any]:
    """Copies a trained actor's weights to a reference in another layout, as ReaL's example."""
    actor = make_engine(path, **actor_spec)
    ref = make_engine(path, dict(tp=2, pp=2), trained=False, offload=True)
    for version in (1, 2):
        actor.train_batch(batch(), loss_fn, weight_fn, **OUT)
        actor.set_version(version)
        stats = ref.copy_weights(actor)
    actor.save(SaveLoadMeta(path=root, weight_format="hf"))
    fresh = make_engine(root, dict(tp=2, pp=2), trained=False)
    held = sum(p.untyped_storage().nbytes() for p in ref.state.params.values())
    result = dict(got=ref.forward(batch(), **OUT), want=fresh.forward(batch(), **OUT),
                  stats=stats, version=ref.get_version(), held=held)  # fmt: skip
    for engine in (actor, ref, fresh):
        engine.destroy()
    return result


@pytest.mark.parametrize(
    "spec", [dict(parallel=dict(pp=2)), dict(parallel=dict(tp=4), lora=LORA)], ids=["all", "lora"]
)
def test_a_reference_takes_over_the_actors_weights(world4, path, tmp_path, spec):
    for r in world4.run(follow, path, str(tmp_path / "saved"), spec):
        assert same(r["got"], r["want"]) and r["version"] == 2 and r["held"] == 0
        assert r["stats"]["sent"] + r["stats"]["kept"] > 0


def take_over(path: str, other: str) -> dict[str, Any]:
    source, target = make_engine(other, dict(pp=2)), make_engine(path, dict(tp=2), dtype="bfloat16")
    averages = moving_average(path, other, source)
    target.train_batch(batch(), loss_fn, weight_fn, **OUT)
    target.copy_weights(source)
    held, before = state(source), state(target)
    target.train_batch(batch(), loss_fn, weight_fn, **OUT)
    after = state(target)
    errors = {}
    for name, at, over in (("adapters", other, dict(lora=LORA)), ("model", other + "-3", {})):
        refusing = make_engine(at, dict(tp=2), trained="lora" in over, **over)
        errors[name] = error_of(refusing.copy_weights, source)
        refusing.destroy()
    source.offload(("params",))
    errors["away"] = error_of(target.copy_weights, source)
    for engine in (source, target):
        engine.destroy()
    return dict(held=held, before=before, after=after, errors=errors, averages=averages)


KEEP = 0.9


def moving_average(path: str, other: str, source: Any) -> dict[str, Any]:
    """Has a bf16 engine, whose weights rest in host memory, follow `source` three times; saved
    after the first, whole and again after a load."""
    spec = dict(trained=False, dtype="bfloat16", offload=True)
    follower, again = (make_engine(path, dict(tp=2), **spec) for _ in range(2))
    saved = SaveLoadMeta(path=other + "-average", weight_format="dist")
    follower.copy_weights(source, keep=KEEP)
    follower.begin_save(saved).finish()
    again.load(saved)
    for engine in (follower, again):
        for _ in range(2):
            engine.copy_weights(source, keep=KEEP)
    logp = follower.forward(batch())
    for engine in (follower, again):
        engine.onload(("params",))
    numbers = [dict(engine.state.average) for engine in (follower, again)]
    held = [state(engine) for engine in (follower, again)]
    follower.copy_weights(source)  # and then as it is
    taken = dict(whole=state(follower), average=dict(follower.state.average))
    for engine in (follower, again):
        engine.destroy()
    return dict(numbers=numbers, held=held, logp=logp, taken=taken)


def test_an_engine_that_trains_goes_on_from_the_weights_it_took_over(world4, path, tmp_path):
    other = tmp_path / "other"
    save_tiny(other, "qwen2", tie=True, seed=5)
    save_tiny(tmp_path / "other-3", "qwen2", tie=True, layers=8)
    r = world4.run(take_over, path, str(other))[0]
    for name, held in r["held"].items():
        assert torch.equal(r["before"][name], held.bfloat16()), name
        # stale main weights would be far from here
        torch.testing.assert_close(r["after"][name].float(), held, atol=0.02, rtol=0.02)
    assert not same(r["after"], r["before"])
    check_average(r["averages"], r["held"], load_file(Path(path) / "model.safetensors"))
    assert "adapters" in r["errors"]["adapters"]
    assert "num_layers=8, the other's 4" in r["errors"]["model"]
    assert "copy_weights needs ('params',)" in r["errors"]["away"]


def check_average(found: dict[str, Any], source: Any, start: Any) -> None:
    """It is the mean with the weights 0.9^3 and 1 - 0.9^3 in fp32, whatever bf16 would have made of
    the steps, and goes on from a checkpoint to the bit."""
    once, again = found["numbers"]
    assert once and all(v.dtype == torch.float32 for v in once.values()) and same(once, again)
    assert same(*found["held"]) and found["logp"].isfinite().all()
    for name, values in found["held"][0].items():
        began = start[name].bfloat16().float()
        exact = KEEP**3 * began + (1 - KEEP**3) * source[name]
        assert torch.equal(values, values.bfloat16())
        torch.testing.assert_close(values.float(), exact, rtol=2**-8, atol=1e-6)
        assert torch.equal(found["taken"]["whole"][name], source[name].bfloat16()), name
    assert found["taken"]["average"] == {}


def average_that_moves(path: str, other: str, third: str) -> dict[str, Any]:
    """An average is offloaded and saved where it rests; then whole weights are loaded into it, and
    it is blended anew."""
    source = make_engine(other, dict(pp=2))
    follower = make_engine(path, dict(tp=2), trained=False, dtype="bfloat16")
    plain = follower.occupied()["params"]
    follower.copy_weights(source, keep=KEEP)
    on, averaged = follower.occupied()["params"], state(follower)
    saved = SaveLoadMeta(path=other + "-saved", weight_format="dist")
    moved = follower.offload(("params",))["params"]
    away = follower.occupied()["params"]
    follower.save(saved)
    back = follower.onload(("params",))["params"]
    same_after = same(state(follower), averaged)
    follower.copy_weights(source, keep=KEEP)
    twice = state(follower)
    again = make_engine(path, dict(tp=2), trained=False, dtype="bfloat16")
    again.load(saved)
    again.copy_weights(source, keep=KEEP)
    follower.load(SaveLoadMeta(path=third))
    loaded = state(follower)
    follower.copy_weights(source, keep=KEEP)
    result = dict(
        plain=plain, on=on, moved=moved, away=away, back=back, same_after=same_after, twice=twice,
        again=state(again), loaded=loaded, blended=state(follower), source=state(source),
    )  # fmt: skip
    for engine in (source, follower, again):
        engine.destroy()
    return result


def test_an_average_is_moved_with_its_weights_and_ends_where_others_are_loaded(
    world4, path, tmp_path
):
    for name, seed in (("other", 5), ("third", 6)):
        save_tiny(tmp_path / name, "qwen2", tie=True, seed=seed)
    args = str(tmp_path / "other"), str(tmp_path / "third")
    answers = world4.run(average_that_moves, path, *args)
    for r in answers:
        assert r["on"] == 3 * r["plain"]  # bf16, and fp32 beside
        assert r["moved"] == r["back"] == r["on"] and r["away"] == 0
        assert r["same_after"] and same(r["twice"], r["again"])
    r, third = answers[0], load_file(tmp_path / "third" / "model.safetensors")
    for name, values in r["loaded"].items():
        began = third[name].bfloat16().float()
        assert torch.equal(values.float(), began)
        exact = KEEP * began + (1 - KEEP) * r["source"][name]
        torch.testing.assert_close(r["blended"][name].float(), exact, rtol=2**-8, atol=1e-6)


def train_and_blend(path: str, other: str) -> dict[str, Any]:
    """Blends, trains a step, and blends again, in bf16."""
    source = make_engine(other, dict(pp=2))
    target = make_engine(path, dict(tp=2), dtype="bfloat16", optimizer=dict(lr=0.1))
    target.copy_weights(source, keep=0.5)
    target.train_batch(batch(), loss_fn, weight_fn, **OUT)
    trained = state(target)
    target.copy_weights(source, keep=0.5)
    result = dict(trained=trained, blended=state(target), source=state(source))
    for engine in (source, target):
        engine.destroy()
    return result


def test_a_blend_after_training_starts_from_what_was_trained(world4, path, tmp_path):
    save_tiny(tmp_path / "other", "qwen2", tie=True, seed=5)
    r = world4.run(train_and_blend, path, str(tmp_path / "other"))[0]
    for name, values in r["trained"].items():
        exact = 0.5 * values.float() + 0.5 * r["source"][name]
        torch.testing.assert_close(r["blended"][name].float(), exact, rtol=2**-7, atol=1e-5)


def error_of(fn: Any, *args: Any, **kw: Any) -> str:
    try:
        fn(*args, **kw)
    except (RuntimeError, ValueError) as e:
        return str(e)
    return "no error"


def parts_away(path: str, over: dict[str, Any]) -> dict[str, Any]:
    """Offloads and onloads one part after the other, between steps of training."""
    engine = make_engine(path, dict(tp=2), **over)
    train = lambda: engine.train_batch(batch(), loss_fn, weight_fn, **OUT)  # noqa: E731
    figures, moved, errors = [train()], {}, {}
    for part in PARTS:
        moved[part] = (engine.offload((part,)), engine.offload((part,)))
        errors[part] = dict(train=error_of(train), forward=error_of(engine.forward, batch()))
        moved[part] += (engine.onload((part,)),)
        figures.append(train())
    layer = engine.state.models[0]
    layer._fp8_workspaces = {"weight": torch.ones(1)}  # as Transformer Engine's layers have them
    engine.offload(("grads",))
    assert not layer._fp8_workspaces
    engine.onload(("grads",))
    everything = engine.offload()
    figures.append(engine.onload(behind=True) and train())  # bytes arrive while it trains
    errors["name"] = error_of(engine.offload, ("weights",))
    weights = sum(p.numel() * p.element_size() for p in engine.state.params.values())
    result = dict(figures=figures, moved=moved, everything=everything, errors=errors,
                  weights=weights, state=state(engine))  # fmt: skip
    engine.destroy()
    return result


def steps(path: str, over: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(path, dict(tp=2), **over)
    figures = [engine.train_batch(batch(), loss_fn, weight_fn, **OUT) for _ in range(5)]
    result = dict(figures=figures, state=state(engine))
    engine.destroy()
    return result


@pytest.mark.parametrize(
    ("over", "state_per_weight"),
    [
        # bytes of optimizer state for 2 ranks' share of a weight: two moments (and main weights)
        (dict(optimizer=dict(distributed=True)), 2 * 4 / 2),
        (dict(dtype="bfloat16", optimizer=dict(distributed=False)), 3 * 4),
        (dict(optimizer=dict(overlap_grad_reduce=True, overlap_param_gather=True)), 2 * 4 / 2),
    ],
    ids=["fp32", "bf16", "overlap"],
)
def test_parts_leave_and_come_back(world4, path, over, state_per_weight):
    want, ranks = world4.run(steps, path, over)[0], world4.run(parts_away, path, over)
    r = ranks[0]
    assert same(r["figures"], want["figures"]) and same(r["state"], want["state"])
    size = 2 if "dtype" in over else 4
    for part, (first, second, back) in r["moved"].items():
        assert first[part] == back[part] > 0 and part not in second, part
        assert r["everything"][part] == first[part], part
    for rank in ranks:
        n = rank["weights"] / size
        bytes_of = {part: rank["everything"][part] for part in PARTS}
        # buffers are padded, and ranks' shares are not quite equal
        assert bytes_of["params"] == pytest.approx(n * size, rel=0.05)
        assert bytes_of["grads"] == pytest.approx(n * 4, rel=0.05)
        assert bytes_of["optimizer"] == pytest.approx(n * state_per_weight, rel=0.1)
    assert "forward needs ('params',)" in r["errors"]["params"]["forward"]
    assert "call onload(('params',))" in r["errors"]["params"]["forward"]
    for part in PARTS:
        assert f"train_batch needs ('{part}',)" in r["errors"][part]["train"]
    assert r["errors"]["optimizer"]["forward"] == r["errors"]["grads"]["forward"] == "no error"
    assert "('weights',)" in r["errors"]["name"] and "'optimizer'" in r["errors"]["name"]


class LateLane:
    """Makes a copy when somebody waits for it, and not before; until then there is NaN."""

    def __init__(self) -> None:
        self._copies: list[Any] = []

    def begin(self, copy: Any) -> Any:
        for there, _ in copy.args[0]:
            there.fill_(255)
        self._copies.append(copy)
        number = len(self._copies)

        def wait() -> None:
            for i in range(number):
                self._copies[i]()
                self._copies[i] = int

        return wait

    def is_over(self) -> bool:
        return set(self._copies) <= {int}


def broken(outputs: Any, b: Any) -> Any:
    raise ValueError("a loss that fails")


def late(path: str, root: str, parallel: dict[str, Any], over: dict[str, Any], lane: Any) -> Any:
    """Works through most verbs, before each of which all parts were away."""
    value = over.get("head") == "value"
    args = (value_loss if value else loss_fn, weight_fn)
    kw: dict[str, Any] = dict(outputs=("values",)) if value else OUT
    saved = SaveLoadMeta(path=root, weight_format="dist", with_optim=True)
    engine = make_engine(path, parallel, **over)
    train = partial(engine.train_batch, batch(), *args, **kw)
    verbs: dict[str, Any] = {
        "first step": train,
        "pass": partial(engine.forward, batch(), **kw),
        "failed step": partial(error_of, engine.train_batch, batch(), broken, weight_fn, **kw),
        "save": partial(engine.save, saved),
        "load": partial(engine.load, saved),  # what was saved, so it was all there
        "weights": partial(state, engine),
        "next step": train,
    }
    found, lanes = {}, []

    def copy_stream() -> Any:
        lanes.append(lane())
        return lanes[-1].begin

    with mock.patch.object(offload, "copy_stream", copy_stream if lane else offload.copy_stream):
        for name, verb in verbs.items():
            engine.offload()
            engine.onload(behind=lane is not None)
            found[name] = verb()
    engine.destroy()
    assert len(lanes) == (len(verbs) if lane else 0) and all(each.is_over() for each in lanes)
    return found


@pytest.mark.parametrize(
    ("kind", "parallel", "over"),
    [
        ("qwen2", dict(pp=2, vpp=2), dict(dtype="bfloat16")),
        ("deepseek_v3", dict(ep=2), dict(options=dict(moe_router_bias_update_rate=0.01))),
        pytest.param(
            "qwen2",
            dict(tp=2, pp=2),
            dict(lora=LORA, recompute_granularity="full"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            "qwen2",
            dict(pp=2),
            dict(head="value", options=RANDOM),
            marks=pytest.mark.full,
        ),
    ],
    ids=["tied-vpp", "router-bias", "lora", "values"],
)
def test_what_a_verb_reads_is_waited_for(world4, models, tmp_path, kind, parallel, over):
    path = save_model(models, kind, kind == "qwen2")
    want, got = (
        world4.run(late, path, str(tmp_path / name), parallel, over, lane)
        for name, lane in (("here", None), ("late", LateLane))
    )
    assert same(got, want)
    assert all(r["first step"]["loss"] != r["next step"]["loss"] for r in want)
    assert "a loss that fails" in want[0]["failed step"]


def resting(path: str, root: str) -> dict[str, Any]:
    """Runs a frozen model that lives in host memory, with micro-batches of several sizes, and saves
    it from there."""
    one = make_engine(path, dict(tp=2), trained=False, max_tokens=24)
    want = one.forward(batch(), **OUT)
    one.destroy()
    other = make_engine(path, dict(pp=2), trained=False, offload=True, forward_max_tokens=200)
    held = [sum(p.untyped_storage().nbytes() for p in other.state.params.values())]
    got = [other.forward(batch(), **OUT) for _ in range(2)]
    other.save(SaveLoadMeta(path=root))
    held.append(sum(p.untyped_storage().nbytes() for p in other.state.params.values()))
    other.destroy()
    saved = make_engine(root, dict(pp=2), trained=False, forward_max_tokens=200)
    got.append(saved.forward(batch(), **OUT))
    saved.destroy()
    # what changes the weights is kept where they rest
    other = make_engine(
        path,
        dict(pp=2),
        trained=False,
        offload=True,
        init_from_scratch=True,
        forward_max_tokens=200,
    )
    other.forward(batch(), **OUT)
    other.load(SaveLoadMeta(path=root))
    got.append(other.forward(batch(), **OUT))
    got.append(other.forward(batch(), **OUT))
    other.destroy()
    refused = error_of(make_engine, path, {}, offload=True)
    return dict(want=want, got=got, held=held, refused=refused)


def micro_batches(path: str, **over: Any) -> tuple[int, int]:
    """Returns the numbers of micro-batches of a pass without backward and of one with it."""
    engine = make_engine(path, dict(tp=4), max_tokens=24, **over)
    calls: list[int] = []
    engine.state.chunks[0].register_forward_hook(lambda *_: calls.append(1))
    engine.forward(batch(), **OUT)
    forward = len(calls)
    engine.train_batch(batch(), loss_fn, weight_fn, **OUT)
    engine.destroy()
    return forward, len(calls) - forward


def test_a_model_that_rests_in_host_memory_answers_the_same(world4, path, tmp_path):
    r = world4.run(resting, path, str(tmp_path / "saved"))[0]
    assert r["held"] == [0, 0]
    for name, value in r["want"].items():
        first, *others = (answers[name] for answers in r["got"])
        assert len(others) == 4 and all(torch.equal(first, other) for other in others)
        torch.testing.assert_close(first, value, atol=1e-4, rtol=1e-4)
    assert "offload=True is for frozen models" in r["refused"]


def test_passes_without_backward_have_their_own_budget(world4, path):
    forward, training = world4.run(micro_batches, path, forward_max_tokens=200)[0]
    assert forward == 1 < training
    same_budget = world4.run(micro_batches, path)[0]
    assert same_budget == (training, training)
