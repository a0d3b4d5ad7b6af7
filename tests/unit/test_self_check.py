"""SelfCheck: every fault is found, named and handled as configured; a healthy run passes."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.algos import SFT, Actor, Ref
from megarl.algos.checks import ROUNDING, nonfinite_inputs, row_gaps, same_policy
from megarl.api.batch import Batch, Tokens
from megarl.config.algo import PPOActorConfig
from megarl.config.engine import ParallelConfig, TrainEngineConfig
from megarl.config.loader import load_config
from megarl.config.recipes import GRPOConfig, PPOConfig
from megarl.config.rollout import RolloutConfig, WeightSyncConfig
from megarl.trainer import self_check
from megarl.trainer.roles import MegatronActor, MegatronRef
from megarl.trainer.self_check import SelfCheck, SelfCheckError, same_weights
from megarl.trainer.turns import WeightPublisher
from tests.full_disk import files_below
from tests.unit.bigram import BigramEngine, rollout, whole


@pytest.fixture
def said():
    """What the self check's logger says, as (level, text)."""
    lines: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda r: lines.append((r.levelname, r.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("megarl.trainer.self_check")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def decode(ids) -> str:
    return "".join(chr(ord("a") + i) for i in ids)


class Zero:
    is_zero = True

    def from_zero(self, fn, *args):
        return fn(*args)


def a_check(
    tmp_path, cfg: GRPOConfig | None = None, at: int = 12, zero: bool = True, **config: Any
) -> Any:
    cfg = cfg or GRPOConfig(self_check=dict(**config))
    tokenizer = SimpleNamespace(decode=decode)
    ctx: Any = SimpleNamespace(run_dir=tmp_path, ranks=Zero(), tokenizer=tokenizer)
    ctx.ranks.is_zero = zero
    check = SelfCheck(cfg, ctx)
    check.begin_step(at)
    return check


def watched(check: Any, engine: Any, temperature: float = 1.0, **config: Any) -> tuple[Any, dict]:
    """An actor over `engine` under the eyes of `check`, and a batch ready for its update."""
    actor: Any = Actor(PPOActorConfig(**config), engine, temperature=temperature)
    check.watch(actor, first_ratio_to="prox_logp")
    batch = rollout(BigramEngine(), temperature)
    actor.compute_prox_logp(batch)
    actor.compute_advantages(batch)
    return actor, batch


# ---- the first update ------------------------------------------------------------------------


class OtherTemperature(BigramEngine):
    """Forgets the temperature in the training pass."""

    def train_batch(self, *args, temperature=1.0, **kw):
        return super().train_batch(*args, **kw)


class Dropout(BigramEngine):
    def _outputs(self, batch, outputs, temperature):
        made = super()._outputs(batch, outputs, temperature)
        if torch.is_grad_enabled():
            made["logprobs"] = torch.nn.functional.dropout(made["logprobs"], 0.1)
        return made


def test_a_healthy_run_passes(tmp_path, said):
    for config in (dict(), dict(ppo_n_minibatches=3), dict(kl_coef=0.1)):
        check = a_check(tmp_path)
        actor, batch = watched(check, BigramEngine(), temperature=0.7, **config)
        ref: Any = Ref(TrainEngineConfig(), BigramEngine(), temperature=0.7)
        batch["ref_logp"] = ref.compute_logp(batch)
        check.actor_equals_ref(batch, actor, ref)
        stats = actor.ppo_update(batch)
        assert stats["skipped_updates"] == 0
        assert not any(key.startswith("row") for key in stats)
        actor.ppo_update(batch)  # prox_logp is of older weights: no longer the first update
    assert {level for level, _ in said} == {"INFO"}
    assert not (tmp_path / "nonfinite").exists()


@pytest.mark.parametrize("engine", [OtherTemperature, Dropout])
def test_a_training_pass_that_differs_stops_the_run(tmp_path, engine, said):
    torch.manual_seed(0)
    actor, batch = watched(a_check(tmp_path), engine(), temperature=0.7)
    with pytest.raises(SelfCheckError, match="step 12: the first update does not start") as e:
        actor.ppo_update(batch)
    text = str(e.value)
    assert "mean |log ratio| = 0." in text and "above 1e-05" in text
    assert "approx KL" in text and "of 16 sequences" in text
    assert "prox_logp" in text and "»" in text  # the worst token, in its text
    assert "dropout" in text and "temperatures" in text and "self_check.on_failure=warn" in text

    torch.manual_seed(0)
    actor, batch = watched(a_check(tmp_path, on_failure="warn"), engine(), temperature=0.7)
    actor.ppo_update(batch)
    actor.ppo_update(batch)
    assert [level for level, _ in said] == ["WARNING"]  # once, and not about later updates

    actor, batch = watched(a_check(tmp_path, on_failure="off"), engine(), temperature=0.7)
    actor.ppo_update(batch)
    assert len(said) == 1


def test_stale_prox_logp_is_noticed_after_a_restart(tmp_path):
    """A new check has its first update at any version: the engine went on training meanwhile."""
    engine = BigramEngine(lr=0.05)
    actor, batch = watched(a_check(tmp_path), engine)
    engine.set_version(7)
    actor.ppo_update(batch)
    a_check(tmp_path).watch(actor, first_ratio_to="prox_logp")
    with pytest.raises(SelfCheckError, match="a stale prox_logp"):
        actor.ppo_update(batch)


def gaps(n: int, change: Any) -> Any:
    """Finding of n sequences of 100 tokens, whose logprobs `change` alters."""
    theirs = -torch.rand(n, 100, generator=torch.Generator().manual_seed(0))
    ours, mask = theirs.clone(), torch.ones(n, 100, dtype=torch.bool)
    change(ours)
    batch = {"input_ids": torch.zeros(n, 100, dtype=torch.long), "attention_mask": mask}
    return lambda bounds: same_policy(
        row_gaps(ours, theirs, mask),
        bounds,
        Batch.from_padded(batch),
        what="x",
        sides=("a", "b"),
        causes="y",
    )


def test_each_figure_sees_what_the_others_hide():
    fp32, bf16 = ROUNDING[torch.float32], ROUNDING[torch.bfloat16]

    def noise(scale: float) -> Any:
        g = torch.Generator().manual_seed(1)
        return lambda x: x.add_(scale * torch.randn(x.shape, generator=g))

    assert gaps(64, noise(3e-6))(fp32) is None
    assert gaps(64, noise(0.02))(bf16) is None
    assert "mean |log ratio|" in str(gaps(64, noise(3e-5))(fp32))
    assert "mean |log ratio|" in str(gaps(64, noise(0.1))(bf16))

    def one_sequence(x: torch.Tensor) -> None:
        x[5] -= 2.0

    finding = str(gaps(1000, one_sequence)(bf16))
    assert "mean of the worst sequence = 2 above 1" in finding and "mean |log ratio|" not in finding
    assert "1 of 1000 sequences" in finding and "row 5 position" in finding.split("worst")[2]

    def one_token(x: torch.Tensor) -> None:
        x[7, 30] += 0.9

    finding = str(gaps(1000, one_token)(fp32))
    assert "approx KL" in finding and "mean |log ratio|" not in finding
    assert "row 7 position 30" in finding

    def lost(x: torch.Tensor) -> None:
        x[3, 3] = math.nan

    for bounds in (fp32, bf16):
        assert "row 3 position 3: a nan" in str(gaps(10, lost)(bounds))


def test_bounds_follow_the_engines_precision(tmp_path):
    class Coarse(BigramEngine):
        dtype = torch.bfloat16

        def _outputs(self, batch, outputs, temperature):
            made = super()._outputs(batch, outputs, temperature)
            if torch.is_grad_enabled():
                made["logprobs"] = made["logprobs"] + 0.005
            return made

    actor, batch = watched(a_check(tmp_path), Coarse())
    actor.ppo_update(batch)
    Coarse.dtype = torch.float32
    actor, batch = watched(a_check(tmp_path), Coarse())
    with pytest.raises(SelfCheckError):
        actor.ppo_update(batch)


# ---- actor and reference ---------------------------------------------------------------------


def test_a_reference_that_differs_at_the_start_stops_the_run(tmp_path, said):
    def run(
        change: float, row: Any = slice(None), version: int = 0, path: str = "m", **ref_config: Any
    ) -> Any:
        check = a_check(tmp_path)
        actor, batch = watched(check, BigramEngine(), path="m")
        ref: Any = Ref(TrainEngineConfig(path=path, **ref_config), BigramEngine(), temperature=1.0)
        batch["ref_logp"] = ref.compute_logp(batch)
        batch["ref_logp"][row, 5] += change
        actor.set_version(version)
        check.actor_equals_ref(batch, actor, ref)

    run(0.0)
    tp2 = ParallelConfig(tp=2)
    run(5e-4, row=3, parallel=tp2)
    with pytest.raises(SelfCheckError, match=r"largest \|log ratio\| = 5\.\d+e-04|0\.0005"):
        run(5e-4, row=3)  # the same layout agrees to rounding
    with pytest.raises(SelfCheckError, match="actor and reference disagree") as e:
        run(0.01, row=3, parallel=tp2)
    text = str(e.value)
    assert "row 3 position 5: actor" in text and text.count("position") == 1
    for other in (dict(version=1), dict(path="other"), dict(init_from_scratch=True)):
        run(0.01, **other)  # nobody said that these are equal
    assert all(level == "INFO" for level, _ in said)


def test_same_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "link").symlink_to("m")

    def same(a: dict, b: dict) -> bool:
        return same_weights(TrainEngineConfig(**a), TrainEngineConfig(**b))

    assert same(dict(path="m"), dict(path=str(tmp_path / "link")))
    assert same(dict(path="Qwen/Qwen3-0.6B"), dict(path="Qwen/Qwen3-0.6B"))  # of the hub
    assert not same(dict(path="m"), dict(path="n"))
    random = dict(path="m", init_from_scratch=True)
    assert same(random, random)  # a run has one seed
    assert not same(random, dict(path="m"))


# ---- NaN and Inf -------------------------------------------------------------------------------


class Sick(BigramEngine):
    """Logprobs of token 3 are NaN in every pass but compute_logp's."""

    def _outputs(self, batch, outputs, temperature):
        made = super()._outputs(batch, outputs, temperature)
        if "loss_mask" in batch:
            ids = batch["input_ids"]
            made["logprobs"] = torch.where(ids == 3, math.nan, made["logprobs"])
        return made


def rows_with_3(batch: dict) -> list[int]:
    return ((batch["input_ids"] == 3) & batch["loss_mask"]).any(1).nonzero().flatten().tolist()


def test_a_loss_that_is_not_finite_is_skipped_saved_and_traced_to_its_rows(tmp_path, said):
    actor, batch = watched(a_check(tmp_path), Sick())
    before = actor.engine.table.detach().clone()
    stats = actor.ppo_update(batch)
    assert stats["skipped_updates"] == 1 and stats["update_successful"] == 0
    assert torch.equal(actor.engine.table, before)
    ((level, text),) = said
    rows = rows_with_3(batch)
    assert 0 < len(rows) < 16
    assert level == "WARNING" and text.startswith("step 12, mini-batch 0: the update is not finite")
    # the NaN is a constant, so the gradient is finite: the loss has to be looked at as well
    assert "loss = nan, grad_norm = 0.0" in text and "the update is skipped" in text
    assert f"in {len(rows)} of 16 sequences, rows {', '.join(map(str, rows[:8]))}" in text
    assert decode(batch["input_ids"][rows[0]].tolist()) in text
    file = tmp_path / "nonfinite" / "step_000012_mb0.pt"
    assert f"torch.load({str(file)!r})" in text
    record = torch.load(file)
    assert torch.equal(record["batch"]["input_ids"], batch["input_ids"])
    assert record["step"] == 12 and math.isnan(record["stats"]["loss"])
    assert record["config"]["recipe"] == "grpo" and "rows" in record["finding"]


def test_a_refused_update_that_would_have_told_prox_logp_itself_is_traced_too(tmp_path, said):
    actor: Any = Actor(PPOActorConfig(), Sick(), temperature=1.0)
    a_check(tmp_path).watch(actor, first_ratio_to="prox_logp")
    batch = rollout(BigramEngine(), 1.0)
    actor.compute_advantages(batch)
    assert actor.ppo_update(batch)["skipped_updates"] == 1
    assert f"the loss is not finite in {len(rows_with_3(batch))} of 16" in said[0][1]


def test_a_disk_that_is_full_costs_the_saved_mini_batch_alone(tmp_path, said):
    actor, batch = watched(a_check(tmp_path), Sick())
    with files_below(100):
        assert actor.ppo_update(batch)["skipped_updates"] == 1
    assert "is not saved: saving" in said[0][1] and "not saved: no room for" in said[1][1], said
    assert not list((tmp_path / "nonfinite").iterdir())


def test_a_saved_mini_batch_holds_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-0123456789")
    overrides = ["actor.path=x", "train_dataset.type=gsm8k"]
    key = "+train_dataset.options.api_key=${oc.env:MY_KEY}"
    cfg = load_config(None, [*overrides, key, "self_check.on_nonfinite=skip"])
    actor, batch = watched(a_check(tmp_path, cfg), Sick())
    actor.ppo_update(batch)
    (file,) = (tmp_path / "nonfinite").iterdir()
    options = torch.load(file)["config"]["train_dataset"]["options"]
    assert options == {"api_key": "${oc.env:MY_KEY}"}
    assert cfg.train_dataset.options == {"api_key": "sk-0123456789"}


def test_the_first_healthy_update_is_checked_even_after_a_skip(tmp_path):
    class LateStart(OtherTemperature):
        def train_batch(self, batch, loss_fn, *args, **kw):
            nan = (lambda o, b: (math.nan * o["logprobs"].sum(), {})) if not self.calls else loss_fn
            return super().train_batch(batch, nan, *args, **kw)

    actor, batch = watched(a_check(tmp_path), LateStart(), temperature=0.7, ppo_n_minibatches=2)
    with pytest.raises(SelfCheckError, match="does not start from ratio 1"):
        actor.ppo_update(batch)


def test_on_nonfinite_stop(tmp_path):
    actor, batch = watched(a_check(tmp_path, on_nonfinite="stop"), Sick())
    with pytest.raises(SelfCheckError, match="mini-batch 0: the update is not finite") as e:
        actor.ppo_update(batch)
    assert "step_000012_mb0.pt" in str(e.value) and "self_check.on_nonfinite=skip" in str(e.value)


def test_inputs_that_are_not_finite_cost_no_pass(tmp_path, said):
    actor, batch = watched(a_check(tmp_path), BigramEngine(), ppo_n_minibatches=4)
    bad = [0, 5, 10, 15]
    batch["advantages"][bad, 4] = math.inf
    batch["logprobs"][bad, 0] = math.nan  # nothing reads it: the token is not trained
    actor.ppo_update(batch)
    assert 0 < len(actor.engine.calls) < 4
    texts = [text for level, text in said if level == "WARNING"]
    assert len(texts) == 4 - len(actor.engine.calls)
    assert "advantages: 1 numbers in rows" in texts[0] and ": inf" in texts[0]
    assert "logprobs" not in texts[0]


def test_inputs_by_hand():
    mask = torch.tensor([[False, True], [False, True]])
    advantages = torch.zeros(2, 2)
    assert nonfinite_inputs(whole(loss_mask=mask, advantages=advantages)) is None
    advantages[0, 0] = math.nan
    batch = whole(loss_mask=mask, advantages=advantages)
    assert nonfinite_inputs(batch) is None
    batch["ref_logp"] = Tokens(torch.tensor([0.0, 1.0, math.nan, -math.inf]), batch.lengths)
    batch["rewards"] = torch.tensor([0.0, math.nan])
    text = str(nonfinite_inputs(batch))
    assert "ref_logp: 1 numbers in rows 1, the first at [1, 1]: -inf" in text
    assert "rewards: 1 numbers in rows 1, the first at [1]: nan" in text


def test_overflow_of_the_sum_alone_is_told_from_a_bad_sequence(tmp_path, said):
    actor, batch = watched(a_check(tmp_path), BigramEngine())
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    batch["advantages"][:, 4] = 3e38
    actor.ppo_update(batch)
    assert "finite by itself: it overflowed in the sum or in the backward pass" in said[0][1]


def test_skips_in_a_row_end_the_run(tmp_path, said):
    actor, batch = watched(a_check(tmp_path, max_skips=2), BigramEngine())
    good, bad = batch["advantages"], batch["advantages"].where(~batch["loss_mask"], math.nan)
    for advantages in (bad, good, bad):  # not in a row
        actor.ppo_update(batch | {"advantages": advantages})
    with pytest.raises(SelfCheckError, match="max_skips"):
        actor.ppo_update(batch | {"advantages": bad})
    files = sorted(p.name for p in (tmp_path / "nonfinite").iterdir())
    assert files == [f"step_000012_mb{i}.pt" for i in (0, 2, 3)]


def test_skips_are_counted_by_role(tmp_path, said):
    """Updates of a critic that succeed do not hide that none of the actor's does."""
    check = a_check(tmp_path, max_skips=2)
    actor, batch = watched(check, BigramEngine())
    other, good = watched(check, BigramEngine())
    bad = batch | {"advantages": batch["advantages"].where(~batch["loss_mask"], math.nan)}
    actor.ppo_update(bad)
    assert other.ppo_update(good)["n_updates"] == 1
    with pytest.raises(SelfCheckError, match="max_skips"):
        actor.ppo_update(bad)


def test_a_gradient_of_exactly_zero_is_warned_of_once_in_a_row(tmp_path, said):
    actor, batch = watched(a_check(tmp_path), BigramEngine())
    nothing = batch | {"advantages": torch.zeros_like(batch["advantages"])}
    for fields, warnings in ((nothing, 1), (nothing, 1), (batch, 1), (nothing, 2)):
        stats = actor.ppo_update(fields)
        assert (stats["grad_norm"] == 0) == (fields is nothing) and stats["n_updates"] == 1
        assert sum(level == "WARNING" for level, _ in said) == warnings


def test_a_run_that_skipped_every_update_of_a_role_does_not_end_well(tmp_path, said):
    for first_step, refused in ((1, True), (7, False)):  # earlier starts have made updates
        check = a_check(tmp_path, at=first_step)
        actor, batch = watched(check, BigramEngine())
        other, good = watched(check, BigramEngine())
        other.ppo_update(good)
        check.end()
        actor.ppo_update(
            batch | {"advantages": batch["advantages"].where(~batch["loss_mask"], math.nan)}
        )
        check.begin_step(first_step + 1)
        if refused:
            with pytest.raises(SelfCheckError):
                check.end()
        check.begin_step(first_step + 2)
        actor.ppo_update(batch)
        check.end()


def test_weights_that_are_not_finite_stop_the_run_by_name(tmp_path):
    actor, batch = watched(a_check(tmp_path), BigramEngine())
    with torch.no_grad():
        actor.engine.table[4, 4] = math.nan
    with pytest.raises(SelfCheckError, match="the weights themselves are not finite: table") as e:
        actor.ppo_update(batch)
    assert "checkpoint" in str(e.value)
    actor.compute_prox_logp(batch)  # now they show before the pass
    with pytest.raises(SelfCheckError, match=r"(?s)prox_logp: .* not finite: table"):
        actor.ppo_update(batch)


def test_saved_files_are_bounded(tmp_path, said, monkeypatch):
    monkeypatch.setattr(self_check, "MAX_FILES", 1)
    actor, batch = watched(a_check(tmp_path), Sick(), ppo_n_minibatches=4)
    actor.ppo_update(batch)
    assert len(list((tmp_path / "nonfinite").iterdir())) == 1
    assert "not saved" in said[1][1]


def test_other_ranks_raise_alike_but_short(tmp_path):
    check = a_check(tmp_path, zero=False, on_nonfinite="stop")
    actor, batch = watched(check, Sick())
    with pytest.raises(SelfCheckError) as e:
        actor.ppo_update(batch)
    text = str(e.value)
    assert text.startswith("step 12, mini-batch 0: the update is not finite: loss = nan")
    assert "\n" not in text


def test_sft_has_the_same_protection(tmp_path, said):
    model: Any = SFT(TrainEngineConfig(), Sick())
    a_check(tmp_path).watch(model)
    batch = {k: v for k, v in rollout(BigramEngine()).items() if k.endswith(("ids", "mask"))}
    assert rows_with_3(batch)
    assert model.train(batch) == {
        "update_successful": 0.0, "skipped_updates": 1.0,
        "skipped_sequences": len(batch["input_ids"]), "skipped_tokens": batch["loss_mask"].sum(),
    }  # fmt: skip
    batch["loss_mask"] &= batch["input_ids"] != 3
    stats = model.train(batch)
    assert stats["skipped_updates"] == 0 and stats["ppl"] > 1
    assert len(said) == 1 and "mini-batch 0" in said[0][1]


# ---- weight sync -------------------------------------------------------------------------------


def test_the_first_sync_of_every_start_is_verified(tmp_path):
    """What a verification finds: test_a_corrupted_tensor_is_named_on_every_rank."""

    def verified(verify: str, version: int, kv: str = "flush") -> list[bool]:
        """Of a process that starts at `version` and takes two steps."""
        metas: list[Any] = []
        arrival = SimpleNamespace(result=lambda timeout: None)
        client: Any = SimpleNamespace(
            pause=lambda: None, resume=lambda: None, addresses=["a:1"],
            update_weights=lambda meta: arrival, on_driver=lambda fn, *args: fn(*args),
            config=RolloutConfig(kv_after_sync=kv),
        )  # fmt: skip
        actor: Any = SimpleNamespace(
            upload_weights=lambda meta: metas.append(meta) or {}, set_version=lambda v: None
        )
        config = WeightSyncConfig(verify=verify)
        publisher = WeightPublisher(actor, client, config, path=tmp_path)
        for v in range(version, version + 3):
            stats = publisher.publish(v)
            assert stats["weight_sync/pause_s"] >= 0 and stats["weight_sync/resume_s"] >= 0
        assert [m.version for m in metas] == [version, version + 1, version + 2]
        assert {m.flush_cache for m in metas} == {kv == "flush"}
        return [m.compares_all for m in metas]

    assert verified("sample", 0) == verified("sample", 7) == [True, False, False]
    assert verified("full", 7, "keep") == [True] * 3
    assert verified("off", 0) == [False] * 3


# ---- batches that teach nothing --------------------------------------------------------------


def figures(mean: float, *, tied: float = 1.0, std: float = 0.0) -> dict[str, float]:
    return {"reward/mean": mean, "reward/std": std, "reward/groups_all_equal": tied}


ZERO, TIED, MIXED = figures(0.0), figures(0.5, std=0.5), figures(0.5, std=0.5, tied=0.9)


@pytest.mark.parametrize(
    "steps, warnings",
    [
        ([ZERO, ZERO], []),
        ([ZERO, ZERO, ZERO], [(2, "every reward was 0")]),
        ([ZERO] * 8, [(2, "every reward was 0")]),
        ([ZERO, ZERO, MIXED, ZERO, ZERO], []),
        ([ZERO] * 3 + [MIXED] + [ZERO] * 3, [(2, "every reward"), (6, "every reward")]),
        ([TIED] * 5, [(2, "in all groups all rewards were equal")]),
        ([TIED, ZERO, TIED], [(2, "in all groups")]),
        ([figures(1.0)] * 4, [(2, "in all groups")]),
        ([figures(0.0, std=1.0, tied=0.0)] * 4, []),  # rewards around 0
    ],
)
def test_rewards_that_teach_nothing_warn_once_per_streak(tmp_path, said, steps, warnings):
    check, found = a_check(tmp_path), []
    for step, row in enumerate(steps):
        check.begin_step(step)
        check.rewards_differ(row)
        found += [(step, text) for _, text in said]
        said.clear()
    assert [step for step, _ in found] == [step for step, _ in warnings]
    for (step, text), (_, words) in zip(found, warnings):
        assert f"step {step}: {words}" in text and "3 steps in a row" in text


def test_ties_mean_nothing_where_no_groups_are_compared(tmp_path, said):
    cfg = PPOConfig()  # one sample per prompt: every group is equal
    ctx: Any = SimpleNamespace(
        run_dir=tmp_path, ranks=Zero(), tokenizer=SimpleNamespace(decode=decode)
    )
    check = SelfCheck(cfg, ctx)
    for _ in range(5):
        check.rewards_differ(TIED)
    assert said == []
    for _ in range(3):
        check.rewards_differ(ZERO)
    assert len(said) == 1


def test_a_batch_without_trained_tokens_stops_and_single_rows_warn_once(tmp_path, said):
    check, batch = a_check(tmp_path), rollout(BigramEngine())
    check.has_trained_tokens(batch)
    assert said == []
    batch["loss_mask"] = batch["loss_mask"].clone()
    batch["loss_mask"][3] = batch["loss_mask"][5] = False
    for _ in range(3):
        check.has_trained_tokens(batch)
    assert [text for _, text in said] == [
        "step 12: rollout batch: loss_mask marks no token in 2 of 16 rows (3, 5): nothing is "
        "learned from them"
    ]
    batch["loss_mask"][:] = False
    words = r"step 12: rollout batch: .* in 16 of 16 rows \(0, 1, .*\)\n  there is nothing to train"
    with pytest.raises(SelfCheckError, match=words):
        check.has_trained_tokens(batch)


def test_the_trainer_s_roles_must_be_told_the_temperature():
    for role in (MegatronActor, MegatronRef):
        with pytest.raises(TypeError, match="temperature"):
            role(PPOActorConfig())
