"""Roles over a Batch: the same numbers for every layout and origin of the samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.algos import LOSS_WEIGHTS, Actor, Critic, sequence_weight, token_weight
from megarl.algos.estimators import gdpo_advantages
from megarl.api.batch import Batch
from megarl.config.algo import PPOActorConfig, PPOCriticConfig
from megarl.config.base import SeamConfig
from tests.dist.algorithms import gradients, near_logps, presets_in_turn
from tests.dist.engine_jobs import Tensors, make_engine, save_model, state
from tests.dist.invariance import FIGURES, GRADIENTS, UPDATES, worst
from tests.tiny import random_batch, save_tiny
from tests.unit.presets import preset

N, EPISODES = 11, 4  # samples, and episodes they belong to
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp1": (1, {}),
    "dp2": (2, {}),
    "cp2": (2, dict(cp=2)),
    "pp2": (2, dict(pp=2)),
    "dp4": (4, {}),
}
ORIGINS = ("one driver", "all drive", "everywhere")
FIELDS = ("advantages", "returns", "earned", "whitened")


def samples() -> Tensors:
    """Returns a batch with the fields of a rollout and of the roles before the update."""
    b = dict(random_batch(n=N, seed=3))
    g = torch.Generator().manual_seed(7)
    shape, mask = b["input_ids"].shape, b["loss_mask"]
    for name in ("prox_logp", "ref_logp", "values"):
        b[name] = torch.randn(shape, generator=g) * b["attention_mask"]
    b["logprobs"] = b["prox_logp"] + 0.01 * torch.randn(shape, generator=g) * mask
    b["versions"] = torch.where(mask, 0, -1).int()
    b["last_value"] = torch.randn(N, generator=g)
    b["rewards"] = b["reward_part/whole"] = torch.randn(N, generator=g)
    b["truncated"] = torch.arange(N) % 3 == 0
    b["reward_part/right"] = torch.randn(N, generator=g)
    b["reward_part/short"] = torch.where(
        torch.arange(N) % 4 > 0, torch.randn(N, generator=g), torch.nan
    )
    b["episode_ids"] = torch.arange(N) * EPISODES // N
    b["group_ids"] = b["episode_ids"].clone()
    return b


def episodes(b: Tensors) -> list[Tensors]:
    """Splits samples by episode, each padded to its own length."""
    from megarl.api.tokens import select

    return [select(b, (b["episode_ids"] == k).nonzero().flatten()) for k in range(EPISODES)]


def bring(b: Tensors, origin: str) -> Batch:
    parts, rank, size = episodes(b), dist.get_rank(), dist.get_world_size()
    if origin == "everywhere":
        return Batch.from_padded(b)
    if origin == "one driver":
        return Batch.from_local(parts if rank == 0 else None)
    return Batch.from_local(parts[rank::size])


def whole(batch: Batch, name: str) -> torch.Tensor:
    return batch.fetch(range(len(batch)), [name])[name]


def make_actor(path: str, parallel: dict[str, Any], **config: Any) -> Any:
    replay = {k: v for k, v in config.items() if k == "router_replay"}
    engine = make_engine(path, parallel, **replay)
    return Actor(PPOActorConfig(**config), engine, temperature=1.0)


def estimates(path: str, parallel: dict[str, Any]) -> dict[str, Tensors]:
    """Returns by origin the advantages, returns and weights W of the same samples."""
    actor, out = make_actor(path, parallel, ppo_n_minibatches=3), {}
    white = Actor(PPOActorConfig(adv_norm="batch"), actor.engine, temperature=1.0)
    gdpo = Actor(preset("gdpo"), actor.engine, temperature=1.0)
    one = SeamConfig(type="gdpo", options={"parts": {"whole": 1.0}})
    alone = Actor(PPOActorConfig(advantages=one), actor.engine, temperature=1.0)
    for origin in ORIGINS:
        batch = bring(samples(), origin)
        actor.place(batch)
        assert len(batch.rows) < N or actor.engine.layout.dp == 1
        kw = dict(discount=0.9, gae_lambda=0.95, kl_ctl=0.1, bootstrap=True)
        both = white.compute_advantages_and_returns(batch, **kw)
        assert all(both[name] is batch[name] for name in ("advantages", "returns"))
        made = {name: whole(batch, name) for name in FIELDS[:3]}
        actor.compute_advantages(batch)
        made["whitened"], made["grouped"] = made["advantages"], whole(batch, "advantages")
        gdpo.compute_advantages(batch)
        made["gdpo"] = whole(batch, "advantages")
        alone.compute_advantages(batch)
        made["gdpo of one part"] = whole(batch, "advantages")
        made["W"] = torch.stack([batch.row_sums(w) for w in (token_weight, sequence_weight)])
        out[origin] = made
    actor.destroy()
    return out


@pytest.fixture(scope="module")
def model(models):
    return str(save_tiny(models / "of-two-layers", "qwen3", tie=True, layers=2))


def test_estimates_are_the_same_bits_for_every_layout_and_origin(worlds, model):
    first = None
    for ranks, parallel in LAYOUTS.values():
        for by_origin in worlds(ranks).run(estimates, model, parallel):
            for made in by_origin.values():
                first = first or made
                assert made.keys() == first.keys()
                for name, value in made.items():
                    assert torch.equal(value, first[name]), name
    b = samples()
    parts = torch.stack([b["reward_part/right"], b["reward_part/short"]])
    alone = gdpo_advantages(parts, [1.0, 0.25], b["group_ids"], batch=True)
    mask = b["loss_mask"][:, : first["gdpo"].shape[1]]
    assert torch.equal(first["gdpo"], alone[:, None] * mask) and alone.all()
    assert torch.equal(first["gdpo of one part"], first["grouped"])
    assert first["W"].sum() > N and first["whitened"].std() > 0.1


def updates(
    path: str, parallel: dict[str, Any], n: int, origin: str, *, spoil: str = ""
) -> dict[str, Any]:
    """Runs PPO's step without a critic; returns metrics and the weights after it. spoil: some
    samples fail in the "workflow", or in a reward model's "score" after the batch was placed."""
    from megarl.rollout.episode import without_failed

    actor = make_actor(path, parallel, ppo_n_minibatches=n, logp_gap_warn=100.0)
    b = samples()
    if spoil == "score":
        parts = [{k: v.repeat_interleave(2, 0) for k, v in part.items()} for part in episodes(b)]
        batch = Batch.from_local(parts if dist.get_rank() == 0 else None)
        actor.place(batch)
        batch = batch.keep(torch.arange(2 * N) % 2 == 1)
    elif spoil:
        parts = [without_failed(spoilt(part))[0] for part in episodes(b)]
        batch = Batch.from_local(parts if dist.get_rank() == 0 else None)
    else:
        batch = bring(b, origin)
    actor.compute_prox_logp(batch)
    actor.compute_advantages(batch)
    stats = actor.ppo_update(batch)
    after = {"stats": stats, "weights": state(actor.engine), "rows": batch.rows.tolist()}
    actor.destroy()
    return after


def spoilt(part: Tensors) -> Tensors:
    """Adds failed samples to the episode: NaN, ids outside of the vocabulary, no tokens."""
    n = len(part["input_ids"])
    rows = torch.arange(n).repeat_interleave(2)
    out = {k: v[rows].clone() for k, v in part.items()}
    out["valid"] = torch.arange(2 * n) % 2 == 1
    for v in out.values():
        if v.is_floating_point():
            v[::2] = torch.nan
    out["input_ids"][::2] = 10**6
    out["attention_mask"][::2] = out["loss_mask"][::2] = False
    return out


def test_weights_after_a_step_do_not_depend_on_origin_or_failed_samples(worlds, model):
    for parallel in ({}, dict(pp=2)):
        runs = [worlds(2).run(updates, model, parallel, 3, origin) for origin in ORIGINS]
        for by in ("workflow", "score"):
            runs.append(worlds(2).run(updates, model, parallel, 3, "one driver", spoil=by))
        (first, _), *others = runs
        for got, _ in others:
            assert got["stats"] == first["stats"]
            for name, value in first["weights"].items():
                assert torch.equal(got["weights"][name], value), name
        assert {tuple(b["rows"]) for _, b in runs} == {tuple(runs[0][1]["rows"])}


def test_no_preset_sees_failed_samples(worlds, model):
    """With two data-parallel ranks, to the bit: metrics of each step and the weights after all."""
    parts = episodes(samples() | {"baseline": torch.zeros(N)})
    (clean, _), (got, _) = (
        worlds(2).run(presets_in_turn, model, some)
        for some in (parts, [spoilt(part) for part in parts])
    )
    assert got["stats"] == clean["stats"]
    for name, value in clean["weights"].items():
        assert torch.equal(got["weights"][name], value), name


@pytest.mark.parametrize(
    "layouts", [("dp2", "cp2"), pytest.param(("tp2", "pp2"), marks=pytest.mark.full)]
)
def test_every_surrogate_and_mean_in_layouts(worlds, model, layouts):
    """Value and gradient of small packed micro-batches on two ranks against one on one rank."""
    b = worlds(1).run(near_logps, model, samples())[0]
    want = worlds(1).run(gradients, model, {}, b, 10**6)[0]
    assert len(want) == 7 * len(LOSS_WEIGHTS) + 2
    for layout in layouts:
        parallel = LAYOUTS[layout][1] if layout in LAYOUTS else dict(tp=2)
        got = worlds(2).run(gradients, model, parallel, b, 40)[0]
        for name, one in want.items():
            assert got[name]["loss"] == pytest.approx(one["loss"], rel=FIGURES, abs=FIGURES), name
            assert worst(got[name]["grads"], one["grads"]) < (GRADIENTS,), name


@pytest.mark.parametrize("n", [1, 4])
def test_any_number_of_minibatches_in_any_layout(worlds, model, n):
    alone = worlds(1).run(updates, model, {}, n, "one driver")[0]
    assert alone["stats"]["n_updates"] == n
    start = worlds(1).run(untrained, model)[0]
    for ranks, parallel in list(LAYOUTS.values())[1:]:
        got = worlds(ranks).run(updates, model, parallel, n, "all drive")[0]
        assert worst(got["weights"], alone["weights"], start) < (n * UPDATES,)
        for key in ("loss", "advantage", "pg_loss"):
            assert got["stats"][key] == pytest.approx(alone["stats"][key], rel=1e-4, abs=1e-5)


def with_and_without_pass(path: str, parallel: dict[str, Any], **config: Any) -> dict[str, Any]:
    """Makes three steps with a pass before the update, and from the same start three without."""
    out = {}
    for way in ("true", "auto"):
        how = dict(recompute_logprob=way, logp_gap_warn=100.0, **config)
        actor, stats = make_actor(path, parallel, **how), []
        actor.also = ("entropy",)
        for _ in range(3):
            b = samples()
            del b["prox_logp"]
            if "router_replay" in config:  # a server chose other experts, and does not tell all
                names = ("input_ids", "attention_mask")
                asked = ("logprobs", "routed_experts")
                found = actor.engine.forward({k: b[k] for k in names}, outputs=asked)
                b["routed_experts"] = (found["routed_experts"].int() + 1) % 4
                b["routed_experts"][:, ::3] = -1
            batch = bring(b, "one driver")
            if way == "true":
                actor.compute_prox_logp(batch)
            actor.compute_advantages(batch)
            stats.append(dict(actor.ppo_update(batch)))
        fields = {name: whole(batch, name) for name in ("prox_logp", "entropy")}
        out[way] = {"stats": stats, "tokens": fields, "weights": state(actor.engine)}
        actor.destroy()
    return out


@pytest.mark.parametrize("name", ["dp2", "tp2", "pp2", "cp2", "ep2"])
def test_an_update_that_takes_prox_logp_from_its_own_pass_is_the_same_step(worlds, models, name):
    layouts = {"tp2": dict(tp=2, sequence_parallel=True), "ep2": dict(ep=2)}
    parallel = layouts.get(name) or LAYOUTS[name][1]
    config: dict[str, Any] = {"router_replay": "rollout"} if name == "ep2" else {}
    model = save_model(models, "qwen3_moe" if config else "qwen3", not config)
    for got in worlds(2).run(with_and_without_pass, model, parallel, entropy_coef=0.01, **config):
        with_pass, without = got["true"], got["auto"]
        flips = [s.pop("moe/replay_flips", 1) for s in with_pass["stats"] + without["stats"]]
        assert without["stats"] == with_pass["stats"]
        assert min(flips) > 0.1  # of what is replayed, which a pass before fills up with its own
        for key in ("tokens", "weights"):
            for field, value in with_pass[key].items():
                assert torch.equal(without[key][field], value), field


def untrained(path: str) -> Tensors:
    engine = make_engine(path, {})
    weights = state(engine)
    engine.destroy()
    return weights


FORKED = [0, 0, 1, 2, 2, 2, 3, 4, 5, 6, 6]  # the rollouts of the samples


def branched() -> Tensors:
    """Returns samples of which some are branches of one rollout."""
    b = samples()
    b["rollout_ids"] = torch.tensor(FORKED)
    b["rewards"], b["episode_ids"] = b["rewards"][FORKED], b["rollout_ids"] // 2
    for name in ("reward_part/right", "reward_part/short"):
        b[name] = b[name][FORKED]
    return b | {"group_ids": b["episode_ids"].clone()}


def branched_updates(path: str, n: int) -> dict[str, Any]:
    """Makes GRPO's update by rollout-mean; returns metrics, placement and mini-batches."""
    actor = make_actor(path, {}, ppo_n_minibatches=n, loss_agg="rollout-mean", logp_gap_warn=100.0)
    batch = bring(branched(), "all drive")
    actor.compute_prox_logp(batch)
    actor.compute_advantages(batch)
    made = {"advantages": whole(batch, "advantages")[:, 1:], "mask": whole(batch, "loss_mask")}
    made |= {"rows": batch.rows.tolist(), "parts": batch.minibatches}
    gdpo, parts = (
        Actor(preset("gdpo"), actor.engine, temperature=1.0),
        bring(branched(), "all drive"),
    )
    gdpo.compute_advantages(parts)
    made["gdpo"] = whole(parts, "advantages")
    made["stats"] = actor.ppo_update(batch)
    actor.destroy()
    return made


def test_a_rollout_with_branches_counts_once_and_stays_together(worlds, model):
    """The update of two ranks against the same model in transformers, with plain autograd."""
    from transformers import AutoModelForCausalLM

    both, b = worlds(2).run(branched_updates, model, 1), branched()
    first, mask = both[0], b["loss_mask"]
    by_row = first["advantages"].amax(1) + first["advantages"].amin(1)
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    logits = hf(b["input_ids"], attention_mask=b["attention_mask"].long()).logits.log_softmax(-1)
    logp = logits[:, :-1].gather(-1, b["input_ids"][:, 1:, None])[..., 0]
    means = []
    for r in range(len(set(FORKED))):
        rows = [i for i, rollout in enumerate(FORKED) if rollout == r]
        assert len({round(float(by_row[i]), 5) for i in rows if mask[i].any()}) <= 1
        ratio = (logp[rows] - logp[rows].detach()).exp()  # 1: it is the first update
        picked = (-ratio * by_row[rows][:, None])[mask[rows][:, 1:]]
        means += [picked.mean()] if len(picked) else []
    loss = torch.stack(means).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in hf.parameters() if p.grad is not None]).norm()
    assert by_row.abs().sum() > 1 and any(by_row[i] for i in (0, 3))
    assert first["stats"]["loss"] == pytest.approx(float(loss), abs=1e-5)
    assert first["stats"]["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    rows = [FORKED.index(r) for r in sorted(set(FORKED))]  # a rollout's first row
    parts = torch.stack([b["reward_part/right"], b["reward_part/short"]])[:, rows]
    by_rollout = gdpo_advantages(parts, [1.0, 0.25], b["group_ids"][rows], batch=True)
    assert torch.equal(first["gdpo"], by_rollout[FORKED][:, None] * mask) and by_rollout.any()
    for made in [*both, *worlds(2).run(branched_updates, model, 3)]:
        for rows in [made["rows"], *made["parts"]]:
            inside = {FORKED[row] for row in rows}
            assert rows == [i for i, r in enumerate(FORKED) if r in inside]


def critic_elsewhere(path: str, critic_path: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """Runs an actor with dp=2 and a critic in `parallel` that borrows the actor's batch."""
    actor = make_actor(path, {}, ppo_n_minibatches=2, logp_gap_warn=100.0)
    engine = make_engine(critic_path, parallel, head="value")
    critic = Critic(PPOCriticConfig(ppo_n_minibatches=3), engine)
    batch = bring(samples(), "one driver")
    actor.compute_prox_logp(batch)
    rows = batch.rows
    critic.compute_values(batch)
    assert torch.equal(batch.rows, rows)
    out = {name: whole(batch, name) for name in ("values", "prox_logp")}
    out["last_value"] = batch["last_value"]
    actor.compute_gae(batch, discount=1.0, gae_lambda=0.95, kl_ctl=0.0, bootstrap=True)
    stats = critic.ppo_update(batch)
    assert stats["n_updates"] == 3 and actor.ppo_update(batch)["n_updates"] == 2
    out |= {"critic": state(engine), "stats": stats}
    plain = samples()
    critic.compute_values(plain)
    assert plain["values"].shape == plain["input_ids"].shape
    engine.destroy()
    actor.destroy()
    return out


def test_a_critic_in_another_layout_borrows_and_gives_back(worlds, models, model):
    from tests.dist.reference import hf_model

    path = models / "scorer"
    hf_model("qwen3", tie=True, head="value").save_pretrained(path)
    same = worlds(2).run(critic_elsewhere, model, str(path), {})[0]
    for parallel in (dict(pp=2), dict(cp=2)):
        got = worlds(2).run(critic_elsewhere, model, str(path), parallel)[0]
        assert torch.equal(got["prox_logp"], same["prox_logp"])
        for name in ("values", "last_value"):
            torch.testing.assert_close(got[name], same[name], rtol=0, atol=1e-5)
        assert got["stats"]["loss"] == pytest.approx(same["stats"]["loss"], rel=1e-4)
    lengths = samples()["attention_mask"].sum(1)
    assert (same["values"][:, 1] != 0).all() and (same["last_value"] != 0).all()
    assert not same["values"][torch.arange(same["values"].shape[1]) >= lengths[:, None]].any()


def replayed(path: str, parallel: dict[str, Any]) -> dict[str, Any]:
    actor = make_actor(
        path, parallel, ppo_n_minibatches=3, router_replay="trainer", logp_gap_warn=100.0
    )
    batch = bring(samples(), "one driver")
    actor.compute_prox_logp(batch)
    routed = whole(batch, "routed_experts")
    actor.compute_advantages(batch)
    stats = actor.ppo_update(batch)
    actor.destroy()
    return {"stats": stats, "routed": routed}


def test_routes_are_replayed_where_the_batch_lies(worlds, models):
    path = save_model(models, "qwen3_moe", False)
    alone = worlds(1).run(replayed, path, {})[0]
    assert alone["routed"].dtype == torch.uint8
    got = worlds(2).run(replayed, path, dict(ep=2))[0]
    assert torch.equal(got["routed"], alone["routed"])
    assert got["stats"]["loss"] == pytest.approx(alone["stats"]["loss"], rel=1e-4, abs=1e-5)
    assert got["stats"]["first_ratio_abs_dev"] < 1e-5
