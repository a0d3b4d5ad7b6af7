"""Cross-field checks: each problem is found, named with its value, and shown with the others."""

from __future__ import annotations

import math
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megarl.config.base import TIMEOUT, SeamConfig
from megarl.config.check import check_config
from megarl.config.check_parts import check_parallel, rollout_problems
from megarl.config.dataset import PartConfig
from megarl.config.engine import ParallelConfig
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.recipe_engines import (
    engines,
    model_override,
    model_path,
    ref_is_below_adapters,
    saved_engines,
    smallest_world_size,
    trained_engines,
)
from megarl.config.recipes import RECIPES
from megarl.config.schema import Key, all_keys, key_table, value_problems
from megarl.parallel.layout import Layout
from megarl.trainer.preflight import check_models
from tests.hf_stub import write_stub


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stub(tmp_path_factory.mktemp("model"))


def grpo(model: Path, *overrides: str):
    base = [f"actor.path={model}", "actor.optimizer.lr=1e-5", "gconfig.n_samples=4"]
    return load_config(None, [*base, *overrides])


def sft(model: Path, *overrides: str):
    base = ["recipe=sft", f"model.path={model}", "model.optimizer.lr=1e-3"]
    return load_config(None, [*base, *overrides])


def problems(cfg, world_size: int | None = 1) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_config(cfg, world_size)
    return list(caught.value.problems)


def ppo(model: Path, *overrides: str):
    base = ["recipe=ppo", f"actor.path={model}", "actor.optimizer.lr=1e-5"]
    return load_config(None, [*base, "critic.optimizer.lr=1e-5", *overrides])


def test_a_sound_ppo_passes(model: Path) -> None:
    cfg = ppo(model, "ref={}", "kl_ctl=0.1", f"reward_model.path={model}")
    assert (cfg.actor.adv_norm, cfg.critic.head, cfg.reward_model.head) == (
        "batch", "value", "value"
    )  # fmt: skip
    check_config(cfg, 1)
    assert list(engines(cfg)) == ["actor", "ref", "critic", "reward_model"]
    assert trained_engines(cfg) == ("actor", "critic")
    assert model_path(cfg, "critic") == model_path(cfg, "ref") == str(model)
    cfg.actor.override_config, cfg.critic.override_config = {"a": 1, "b": 2}, {"b": 3}
    assert model_override(cfg, "critic") == {"a": 1, "b": 3}
    cfg.critic.path = str(model)  # its own, now
    assert model_override(cfg, "critic") == {"b": 3}
    with pytest.raises(
        ConfigError, match=r"reward_model\.path=.*: a language model without a score"
    ):
        check_models(cfg)


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("critic.optimizer=null", ["critic.optimizer=null", "set critic.optimizer.lr"]),
        ("critic.parallel.tp=2", ["critic.parallel", "world size 1"]),
        ("critic.ppo_n_minibatches=300", ["critic.ppo_n_minibatches=300", "sequences of a step"]),
        ("critic.value_clip=0", ["critic.value_clip=0", "or null"]),
        ("discount=1.1", ["discount=1.1", "0 to 1"]),
        ("gae_lambda=-1", ["gae_lambda=-1", "0 to 1"]),
        ("kl_ctl=-1", ["kl_ctl=-1"]),
        ("kl_ctl=0.1", ["kl_ctl=0.1", "needs ref"]),
        ("actor.adv_norm=group", ["adv_norm=group", "take batch or none"]),
        ("actor.surrogate=gmpo", ["actor.surrogate=gmpo", "rows of one advantage"]),
        ("actor.surrogate=topr", ["actor.surrogate=topr", "rows of one advantage"]),
        ("actor.head=value", ["actor.head=value", "leave it lm"]),
        ("critic.router_replay=true", ["critic.router_replay", "only the actor's"]),
        (
            "critic.optimizer={weight_decay: -1}",
            ["critic.optimizer.weight_decay=-1", "turns it off"],
        ),
        ("actor.lm_head_topk=0", ["actor.lm_head_topk=0"]),
        ("reward_model.parallel.pp=1", ["reward_model.path is empty"]),
    ],
)
def test_problems_of_ppo(model: Path, override: str, names: list[str]) -> None:
    more = ["gconfig.n_samples=2"] if "group" in override else []
    (problem,) = problems(ppo(model, override, *more))
    for name in names:
        assert name in problem


def test_routes_are_replayed_from_what_there_is(model: Path) -> None:
    def given(replay: str) -> Any:
        return ppo(model, "actor.recompute_logprob=false", f"actor.router_replay={replay}")

    (problem,) = problems(given("true"))
    assert "actor.router_replay=trainer: needs actor.recompute_logprob=true" in problem
    check_config(given("rollout"), 1)


def test_a_reward_model_is_frozen_and_leaves_no_groups_to_pick(model: Path) -> None:
    cfg = ppo(
        model, f"reward_model.path={model}", "reward_model.optimizer.lr=1",
        "actor.dynamic_sampling=true", "gconfig.n_samples=2",
    )  # fmt: skip
    frozen, dynamic = problems(cfg)
    assert frozen.startswith("reward_model.optimizer: ") and "frozen" in frozen
    assert "dynamic_sampling" in dynamic and "reward_model" in dynamic


def test_every_part_of_a_mixture_brings_remax_its_baseline(model: Path) -> None:
    ours, key = "megarl.rollout.workflows.rlvr:RLVRWorkflow", "train_dataset.parts.b.workflow"
    cfg = grpo(model, "algorithm=remax")
    cfg.train_dataset.type = "mix"
    cfg.train_dataset.parts = {"a": PartConfig(size=99), "b": PartConfig(size=99)}
    check_config(cfg, 1)  # both take rollout.workflow
    cfg.train_dataset.parts["b"].workflow = own = SeamConfig(type=ours)
    (problem,) = problems(cfg)
    assert f"set {key}.options.greedy_baseline=true" in problem
    own.options = {"greedy_baseline": True}
    check_config(cfg, 1)


def test_sound_configs_pass(model: Path) -> None:
    check_config(grpo(model), 1)
    check_config(grpo(model, "actor.parallel.tp=2", "actor.parallel.pp=2"), 8)
    check_config(grpo(model, "actor.kl_coef=0.01", "ref={}"), 1)
    check_config(grpo(model, "gconfig.n_samples=1", "actor.adv_norm=none"), 1)
    check_config(grpo(model, "gconfig.n_samples=1", "algorithm=reinforce_pp"), 1)
    check_config(grpo(model, "gconfig.n_samples=5", "algorithm=pass_at_k"), 1)
    check_config(grpo(model, "algorithm=remax"), 1)
    check_config(grpo(model, "actor.advantages=remax", "rollout.workflow=mine.py:Mine"), 1)
    check_config(grpo(model, "server.count=0", 'rollout.addresses=["[::1]:3000",host:80]'), 1)
    check_config(grpo(model, "valid_dataset.size=4"), 1)  # less than a batch: not batched
    check_config(sft(model), 1)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["actor.optimizer.lr=0"], ["actor.optimizer.lr=0"]),
        (["actor.optimizer.lr=nan"], ["actor.optimizer.lr=nan"]),
        (["actor.optimizer.beta2=1"], ["actor.optimizer.beta2=1"]),
        (["actor.optimizer.warmup_steps=-1"], ["warmup_steps=-1", ">= 0"]),
        (["actor.optimizer.warmup_steps=2.5"], ["actor.optimizer.warmup_steps=2.5"]),
        (["actor.optimizer=null"], ["actor.optimizer=null", "set actor.optimizer.lr"]),
        (["actor.mb_spec.max_tokens_per_mb=0"], ["actor.mb_spec.max_tokens_per_mb=0"]),
        (["ref.mb_spec.forward_max_tokens_per_mb=0"], ["forward_max_tokens_per_mb=0"]),
        (
            ["actor.optimizer.overlap_param_gather=true"],
            ["actor.optimizer.overlap_param_gather", "overlap_grad_reduce=true"],
        ),
        (
            [
                "actor.optimizer.options.use_precision_aware_optimizer=true",
                "actor.optimizer.distributed=false",
            ],
            ["use_precision_aware_optimizer", "actor.optimizer.distributed=true"],
        ),
        (
            ["+actor.optimizer.options.exp_avg_dtype=bfloat16"],
            ["exp_avg_dtype=bfloat16", "use_precision_aware_optimizer=true"],
        ),
        (
            ["actor.optimizer.options.optimizer_cpu_offload=true", "actor.dtype=float32"],
            [
                "actor.optimizer.options.optimizer_cpu_offload",
                "actor.dtype=auto or bfloat16 (it is float32)",
            ],
        ),
        (
            ["actor.options.offload_activations=true"],
            ["actor.options.offload_activations", "actor.recompute_granularity=full"],
        ),
        (
            ["actor.options.recompute_modules=[moe]", "actor.recompute_granularity=full"],
            ["actor.options.recompute_modules", "needs actor.recompute_granularity=selective"],
        ),
        (
            [
                "actor.options.offload_activations=true",
                "actor.options.moe_shared_expert_overlap=true",
                "actor.recompute_granularity=full",
                "actor.options.recompute_method=block",
            ],
            ["actor.options.offload_activations", "recompute_method", "block"],
        ),
        (["+actor.optimizer.options.adam_eps=1e-6"], ["options.adam_eps=1e-06", "leave it out"]),
        (
            ["weight_sync.type=disk", "weight_sync.options.sharded='on'"],
            ["weight_sync.options.sharded", "needs type=distributed"],
        ),
        (
            ["weight_sync.type=colocated", "weight_sync.options.sharded=false"],
            ["weight_sync.options.sharded=False", "needs type=distributed"],
        ),
        (
            ["actor.fp8=delayed", "actor.dtype=float16"],
            ["actor.fp8=delayed", "dtype=auto or bfloat16"],
        ),
        (["ref.fp8=mxfp8", "ref.attention=sdpa"], ["ref.fp8=mxfp8", "ref.attention=auto or te"]),
        (["ref.mb_spec.share_prefixes=true", "ref.fp8=mxfp8"], ["needs ref.fp8=none"]),
        (
            ["actor.options.moe_token_dispatcher_type=flex"],
            ["dispatcher_type=flex", "take alltoall"],
        ),
        (["actor.offload=true"], ["actor.offload=true", "ref, reward_model", "cpu_offload"]),
        (["actor.path="], ["actor.path is empty"]),
        (["actor.path=Qwen/Qwen3-0.6B"], ["hf download Qwen/Qwen3-0.6B"]),
        (["actor.path=/"], ["actor.path=/", "config.json"]),
        (["tokenizer_path=./nowhere"], ["tokenizer_path=./nowhere"]),
        (["ref.optimizer.lr=1"], ["ref.optimizer", "frozen"]),
        (["ref.ema=1"], ["ref.ema=1"]),
        (["ref.refresh_every=0"], ["ref.refresh_every=0"]),
        (["ref.parallel.tp=3"], ["ref.parallel", "3*1*1 = 3", "world size 1"]),
        (["gconfig.n_samples=1"], ["gconfig.n_samples=1", "actor.adv_norm=group"]),
        (
            ["gconfig.n_samples=1", "actor.adv_norm=group_batch"],
            ["gconfig.n_samples=1: actor.adv_norm=group_batch compares", "or actor.adv_norm=none"],
        ),
        (["gconfig.n_samples=1", "algorithm=rloo"], ["gconfig.n_samples=1: actor.advantages=rloo"]),
        (["gconfig.n_samples=1", "algorithm=opo"], ["actor.advantages=opo compares", "2 or more"]),
        (["gconfig.n_samples=1", "algorithm=gpg"], ["actor.advantages=gpg compares"]),
        (["gconfig.n_samples=1", "algorithm=max_at_k"], ["actor.advantages=max_at_k compares"]),
        (
            ["gconfig.n_samples=1", "algorithm=reinforce_pp_baseline"],
            ["actor.advantages=reinforce_pp compares"],
        ),
        (["algorithm=pass_at_k"], ["gconfig.n_samples=4", "k=4", "take 5 or more"]),
        (["algorithm=pass_at_k", "gconfig.n_samples=1"], ["gconfig.n_samples=1", "k=4"]),
        (
            ["algorithm=pass_at_k", "gconfig.n_samples=8", "rollout.min_rollouts=3"],
            ["rollout.min_rollouts=3", "k=4"],
        ),
        (
            ["algorithm=pass_at_k", "gconfig.n_samples=8", "actor.advantages.options.k=6"],
            ["rollout.min_rollouts=4", "k=6"],
        ),
        (
            ["actor.advantages=remax"],
            ["remax", "rollout.workflow.options.greedy_baseline=true"],
        ),
        (
            [
                "actor.advantages=remax",
                "rollout.workflow=megarl.rollout.workflows.tool:ToolWorkflow",
            ],
            ["rollout.workflow=megarl.rollout.workflows.tool:ToolWorkflow", "'baseline'"],
        ),
        (["actor.ppo_n_minibatches=33"], ["actor.ppo_n_minibatches=33", "8*4 = 32"]),
        (["actor.eps_clip=1.5"], ["actor.eps_clip=1.5"]),
        (["actor.eps_clip_higher=0"], ["actor.eps_clip_higher=0"]),
        (["actor.c_clip=3", "actor.surrogate=cispo"], ["actor.c_clip=3", "cispo"]),
        (
            ["actor.advantages.options.kind=population", "actor.adv_norm=batch"],
            ["actor.advantages.options.kind=population", "actor.adv_norm=group or group_batch"],
        ),
        (
            ["actor.advantages={type: levels, options: {kind: population, std: none}}"],
            ["actor.advantages.options.kind=population", "options.std=none"],
        ),
        (["actor.c_clip=0.9"], ["actor.c_clip=0.9", "> 1"]),
        (["actor.kl_coef=0.1"], ["actor.kl_coef=0.1", "ref.path"]),
        (["actor.kl_controller.target=0.1"], ["actor.kl_controller", "kl_ctl, which are 0"]),
        (["actor.kl_coef=-1"], ["actor.kl_coef=-1"]),
        (
            ["actor.use_decoupled_loss=true", "actor.recompute_logprob=false"],
            ["actor.correction: needs actor.recompute_logprob"],
        ),
        (
            ["episodes.entropy=true", "actor.recompute_logprob=false"],
            ["episodes.entropy=true", "actor.recompute_logprob=true"],
        ),
        (
            [
                "gconfig.greedy=true",
                "gconfig.n_samples=1",
                "gconfig.temperature=0",
                "actor.adv_norm=none",
            ],
            ["gconfig.temperature=0", "sampled tokens"],
        ),
        (["kl_ctl=0.1"], ["kl_ctl=0.1", "ref.path"]),
        (["train_dataset.type=m:rows"], ["train_dataset.reward is empty", "or none where"]),
        (["valid_dataset.split=dev"], ["valid_dataset.split=dev", "train and test"]),
        (["gconfig.temperature=0"], ["gconfig.temperature=0", "gconfig.greedy=true"]),
        (["gconfig.top_p=0"], ["gconfig.top_p=0"]),
        (["gconfig.top_k=0"], ["gconfig.top_k=0", "-1"]),
        (["gconfig.min_new_tokens=600"], ["gconfig.min_new_tokens=600", "512"]),
        (
            ["actor.loss_agg_length=4"],
            ["actor.loss_agg_length=4", "needs actor.loss_agg=sequence-sum or token-sum"],
        ),
        (["gconfig.greedy=true"], ["gconfig.greedy=true", "gconfig.n_samples=1 (it is 4)"]),
        (["rollout.addresses=[host]"], ["'host' is not host:port"]),
        (["rollout.addresses=[host:99999]"], ["'host:99999'"]),
        (["rollout.max_head_offpolicyness=-1"], ["rollout.max_head_offpolicyness=-1"]),
        (["rollout.request_timeout=0"], ["rollout.request_timeout=0"]),
        (["rollout.request_timeout=inf"], ["rollout.request_timeout=inf", "at most 30 days"]),
        (["seed=1" + 400 * "0"], ["seed=1000000", "from 0 to 4294967295"]),
        (["weight_sync.timeout=1e12"], ["weight_sync.timeout=1", "at most 30 days"]),
        (
            ["rollout.setup_timeout=nan"],
            ["rollout.setup_timeout=nan", "must be a finite number > 0"],
        ),
        (["collective_timeout=inf"], ["collective_timeout=inf", "at most 30 days"]),
        (["server.count=0"], ["server.count=0", "rollout.addresses"]),
        (["server.tp=2"], ["server.tp=2", "server.type=sglang"]),
        (["server.dp=2", "weight_sync.type=disk"], ["server.dp=2", "server.type=sglang"]),
        (
            ["server.dp=2", "server.type=sglang"],
            ["weight_sync.type=distributed", "server.dp=2", "disk", "server.count=2 with"],
        ),
        (
            ["server.dp=2", "server.type=sglang", "server.nnodes=2", "weight_sync.type=disk"],
            ["server.nnodes=2", "server.dp=2"],
        ),
        (
            [
                *("server.dp=2", "server.type=sglang", "weight_sync.type=disk"),
                "+server.options.enable_dp_attention=true",
            ],
            ["server.dp=2", "server.options.enable_dp_attention", "options.dp_size"],
        ),
        (["+server.options.dp_size=2"], ["server.options.dp_size=2", "set dp"]),
        (
            ["server.options.context_length=9"],
            ["server.options.context_length=9", "set server.context_length"],
        ),
        (["server.options={max-running-requests: 4}"], ["set server.max_running_requests"]),
        (["server.options.tensor_parallel_size=2"], ["set server.tp"]),
        (["server.options.dtype=float16"], ["server.options.dtype=float16", "set server.dtype"]),
        (["server.options.dp=2"], ["server.options.dp=2", "set dp"]),
        (["+server.options.api_key=k"], ["server.options.api_key", "MEGARL_JOB_TOKEN"]),
        (["server.restarts=1"], ["server.restarts=1", "server.count > 1 (it is 1)"]),
        (["server.python=/no/python"], ["server.python=/no/python"]),
        (["server.context_length=512"], ["server.context_length=512", "max_new_tokens=512"]),
        (["train_dataset.max_length=2000"], ["server.context_length=2048", "2000+512"]),
        (["weight_sync.bucket_mb=0"], ["weight_sync.bucket_mb=0"]),
        (["saver.freq_steps=0"], ["saver.freq_steps=0", "null"]),
        (["train_dataset.batch_size=0"], ["train_dataset.batch_size=0"]),
        (["train_dataset.size=4"], ["train_dataset.size=4", "train_dataset.batch_size", "8"]),
        (["train_dataset.type=gsm8k"], ["train_dataset.path is empty", "openai/gsm8k"]),
        (
            ["train_dataset.type=gsm8k", "train_dataset.path=./no.parquet"],
            ["train_dataset.path=./no.parquet"],
        ),
        (["experiment_name=a/b"], ["experiment_name='a/b'"]),
        (["total_train_steps=-1"], ["total_train_steps=-1"]),
        (["trainer.workers=2"], ["trainer.workers=2", "trainer.mode=controller"]),
        (["trainer.mode=controller", "replay.run=r"], ["replay", "trainer.mode=spmd"]),
    ],
)
def test_problem_is_named(model: Path, overrides: list[str], names: list[str]) -> None:
    (problem,) = problems(grpo(model, *overrides))
    for name in names:
        assert name in problem


def test_a_shared_expert_s_overlap_gathers_the_tokens_itself(model: Path) -> None:
    on = "actor.options.moe_shared_expert_overlap=true"
    (problem,) = problems(grpo(model, on, "actor.lora.r=4", "actor.parallel.tp=2"), 2)
    assert problem.startswith("actor.options.moe_shared_expert_overlap") and "actor.lora" in problem


def test_a_lora_actor_is_its_own_reference(model: Path) -> None:
    """So settings of an engine that is not built are refused, but where the actor has the same."""
    lora = ("actor.lora.r=4", "actor.kl_coef=0.1", "actor.parallel.tp=2")
    for ref in (["ref={}"], [f"ref.path={model}"], ["ref.parallel=${actor.parallel}"]):
        cfg = grpo(model, *lora, *ref)
        check_config(cfg, 2)
        assert ref_is_below_adapters(cfg)
    follows = grpo(model, *lora, "ref.ema=0.9")  # not the actor's engine without adapters, then
    assert not ref_is_below_adapters(follows) and saved_engines(follows) == ("actor", "ref")
    check_config(follows, 2)
    (problem,) = problems(grpo(model, "actor.lora.r=4", "ref.offload=true"))
    assert problem.startswith("ref.offload: with actor.lora on the same model")
    other = ["actor.lora.r=4", "ref.init_from_scratch=true", "ref.offload=true"]
    for overrides in (["ref={}"], ["actor.lora.r=4"], other):
        assert not ref_is_below_adapters(grpo(model, *overrides))
    check_config(grpo(model, *other), 1)


def test_hub_names_of_datasets_are_left_to_the_hub(model: Path) -> None:
    check_config(grpo(model, "train_dataset.type=gsm8k", "train_dataset.path=openai/gsm8k"), 1)


def test_greedy_evaluation_may_say_temperature_zero(model: Path) -> None:
    check_config(grpo(model, "eval_gconfig.temperature=0"), 1)


def test_sft_problems(model: Path) -> None:
    (problem,) = problems(sft(model, "stop_at_exact_match=0.5"))
    assert "valid_dataset" in problem
    (problem,) = problems(sft(model, "stop_at_exact_match=2", "valid_dataset.split=test"))
    assert "stop_at_exact_match=2" in problem


def test_the_options_of_sfts_sync_are_those_of_its_transport(model: Path) -> None:
    reward = "valid_dataset.reward=gsm8k"
    base = ["valid_dataset.type=arithmetic", reward, "generation.weight_sync.options.delta=true"]
    (problem,) = problems(sft(model, *base))
    assert problem.startswith("generation.weight_sync.options.delta=True")
    base += ["generation.weight_sync.type=distributed"]
    check_config(sft(model, *base), 1)


def test_an_evaluation_is_sent_adapters_where_there_are_some(model: Path) -> None:
    key = "generation.weight_sync.type=adapter"
    base = ["valid_dataset.type=arithmetic", "valid_dataset.reward=gsm8k", key]
    (problem,) = problems(sft(model, *base))
    assert key in problem and "set model.lora.r" in problem
    base.append("model.lora.r=4")
    check_config(sft(model, *base), 1)
    (problem,) = problems(sft(model, *base, "generation.server.type=sglang"))
    assert key in problem and "generation.server.options.enable_lora" in problem


def test_a_check_needs_no_weights(model: Path, tmp_path: Path) -> None:
    """A start does (test_preflight.py)."""
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    check_config(grpo(model, f"actor.path={tmp_path}"), 1)


def test_an_adapter_given_as_a_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").touch()
    (problem,) = problems(sft(tmp_path))
    assert problem.startswith(f"model.path={tmp_path}: holds a PEFT adapter, not a model; ")
    assert problem.endswith("model.lora.adapter_path")


def test_all_problems_come_together(model: Path) -> None:
    cfg = grpo(model, "actor.eps_clip=0", "gconfig.top_p=2", "saver.freq_steps=-1", "seed=3")
    cfg.weight_sync.type = "rdma"  # set in code, so the loader never saw it
    found = problems(cfg)
    assert len(found) == 4
    assert any(p.startswith("weight_sync.type=rdma: not one of distributed, disk") for p in found)


@pytest.mark.parametrize(
    ("degrees", "world", "names"),
    [
        ({"tp": 2, "pp": 2}, 6, ["tp*pp*cp = 2*2*1 = 4", "world size 6", "multiple of 4"]),
        ({"ep": 4}, 2, ["etp*ep*pp = 1*4*1 = 4", "world size 2"]),
        ({"tp": 0}, 1, ["parallel.tp=0"]),
        ({"vpp": 2}, 1, ["parallel.vpp=2", "parallel.pp > 1"]),
        ({"pipeline_split": [4]}, 1, ["pipeline_split=[4]", "needs", "pp > 1 (it is 1)"]),
        ({"pp": 2, "pipeline_split": [3]}, 2, ["pipeline_split=[3]", "pp*vpp = 2*1", "per chunk"]),
        ({"pp": 2, "pipeline_split": [4, 0]}, 2, ["pipeline_split=[4, 0]", "each must be > 0"]),
        ({"sequence_parallel": True}, 1, ["parallel.sequence_parallel=true", "parallel.tp > 1"]),
    ],
)
def test_degrees_that_do_not_fit(degrees: dict, world: int, names: list[str]) -> None:
    for check in (check_parallel, Layout.from_config):
        with pytest.raises(ValueError) as caught:
            check(ParallelConfig(**degrees), world)
        for name in names:
            assert name in str(caught.value)


def test_smallest_world_size_fits_every_engine(model: Path) -> None:
    assert smallest_world_size(grpo(model)) == 1
    assert smallest_world_size(grpo(model, "actor.parallel.tp=2", "actor.parallel.pp=2")) == 4
    assert smallest_world_size(grpo(model, "actor.parallel.ep=4", "actor.parallel.tp=2")) == 4
    assert smallest_world_size(grpo(model, "actor.parallel.tp=2", "ref.parallel.pp=3")) == 6


def test_models_are_checked_without_torch(model: Path) -> None:
    check_models(grpo(model, "actor.parallel.tp=2"))
    with pytest.raises(ConfigError) as caught:
        check_models(grpo(model, "actor.parallel.tp=3", "ref.parallel.pp=3"))
    by_engine = caught.value.problems
    assert by_engine[0].startswith("actor: ") and "num_attention_heads=4" in by_engine[0]
    assert by_engine[1].startswith("ref: ") and "num_hidden_layers=4" in by_engine[1]
    check_models(grpo(model, "actor.parallel.pp=3", "actor.parallel.pipeline_split=[1,2,1]"))
    with pytest.raises(ConfigError, match=r"pipeline_split=\[1, 2\] adds up to 3 layers"):
        check_models(grpo(model, "actor.parallel.pp=2", "actor.parallel.pipeline_split=[1,2]"))
    other = ["+ref.override_config.num_hidden_layers=8", "ref.refresh_every=2"]
    with pytest.raises(ConfigError, match=r"ref\.ema: the reference's model has num_layers=8"):
        check_models(grpo(model, *other))
    check_models(grpo(model, other[0]))  # frozen, it may be another
    with pytest.raises(ConfigError, match="max_position_embeddings is 4096"):
        check_models(grpo(model, "server.context_length=8192"))
    compacts = "rollout.workflow.options.compact_at"
    check_models(grpo(model, "server.context_length=4096", f"{compacts}=4096"))
    with pytest.raises(ConfigError, match=rf"{compacts}=4097: above server.context_length=4096"):
        check_models(grpo(model, "server.context_length=4096", f"{compacts}=4097"))


def test_adapters_alone_need_adapters_and_a_server_that_takes_them(model: Path) -> None:
    (found,) = problems(grpo(model, "weight_sync.type=adapter"))
    assert "set actor.lora" in found
    lora = ("weight_sync.type=adapter", "actor.lora.r=4")
    check_config(grpo(model, *lora), 1)
    (found,) = problems(grpo(model, *lora, "weight_sync.pause_mode=retract"))
    assert "use pause_mode=abort" in found
    (found,) = problems(grpo(model, *lora, "server.type=sglang"))
    assert "server.options.enable_lora" in found and "max_lora_rank" in found
    check_config(grpo(model, *lora, "server.type=sglang", "+server.options.enable_lora=true"), 1)


KV = {  # what goes with each pause mode: on SGLang, on the embedded server
    "flush": ({"abort", "retract", "drain"}, {"abort", "retract", "drain"}),
    "keep": ({"abort", "in_place", "drain"}, {"in_place"}),
}


@pytest.mark.parametrize("kv", KV)
def test_kv_caches_and_pauses_that_do_not_go_together_are_named(model: Path, kv: str) -> None:
    for server, sound in zip(("sglang", "embedded"), KV[kv], strict=True):
        for mode in ("abort", "retract", "in_place", "drain"):
            cfg = grpo(model, f"rollout.kv_after_sync={kv}", f"server.type={server}")
            cfg.weight_sync.pause_mode = mode
            found = list(rollout_problems(cfg))
            if mode in sound:
                assert found == []
            else:
                (problem,) = found
                assert problem.startswith(f"rollout.kv_after_sync={kv} with ")
                assert f"pause_mode={mode}" in problem and "; use " in problem
    (found,) = problems(
        grpo(
            model,
            "rollout.kv_after_sync=keep",
            "weight_sync.type=adapter",
            "actor.lora.r=4",
            "server.type=sglang",
            "+server.options.enable_lora=true",
        )
    )
    assert "weight_sync.type=adapter" in found and "kv_after_sync=flush" in found


def put(cfg, name: str, value) -> None:
    *sections, last = name.split(".")
    setattr(reduce(getattr, sections, cfg), last, value)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_number_is_finite_and_within_its_bounds(recipe: str) -> None:
    """Of every key: infinite, not a number, huge, and just outside of what is declared."""
    table = key_table(RECIPES[recipe])
    real = [f"{k.name}={{}}" for k in table.values() if k.section and k.default is None]
    cfg = load_config(None, [f"recipe={recipe}", *real])
    assert not list(value_problems(cfg))
    keys = [k for k in all_keys(type(cfg), parent=cfg) if k.base_type in (int, float)]

    def low(key: Key) -> float:
        if key.bounds is None:
            return -1e30 if key.base_type is float else -(10**30)
        least = key.bounds.ge if key.bounds.ge is not None else key.bounds.gt
        return least - 1 if key.base_type is int else least - 0.5

    huge = {k: 10**30 if k.base_type is int else 1e30 for k in keys}
    floats = [k for k in keys if k.base_type is float]
    bad = [huge, {k: low(k) for k in keys}]
    bad += [dict.fromkeys(floats, value) for value in (math.nan, math.inf, -math.inf)]
    for values in bad:
        for key, value in values.items():
            put(cfg, key.name, value)
        found = list(value_problems(cfg))
        assert [p.partition("=")[0] for p in found] == [k.name for k in values]
        assert all(": must be " in p for p in found)
        for key in values:
            put(cfg, key.name, key.default)
    timeouts = [k for k in keys if k.name.endswith("timeout")]
    assert timeouts and all(k.bounds is TIMEOUT for k in timeouts)


def test_messages_about_numbers_name_value_and_range(model: Path) -> None:
    for override, message in {
        "actor.optimizer.lr=1e30": "actor.optimizer.lr=1e+30: must be > 0 and <= 1",
        "actor.reward_bias=.nan": "actor.reward_bias=nan: must be a finite number from -1000000 to "
        "1000000",
        "gconfig.temperature=.inf": "gconfig.temperature=inf: must be a finite number from 0 to "
        "100",
        "gconfig.n_samples=0": "gconfig.n_samples=0: must be > 0 and <= 65536",
        "gconfig.max_new_tokens=-1": "gconfig.max_new_tokens=-1: must be > 0",
        "saver.freq_steps=0": "saver.freq_steps=0: must be > 0, or null",
        "rollout.request_timeout=1e7": "rollout.request_timeout=10000000.0: must be > 0 and <= "
        "2592000 (seconds, at most 30 days)",
    }.items():
        assert problems(grpo(model, override)) == [message]


def test_ways_to_the_servers_that_do_not_go_together_are_named(model: Path) -> None:
    (found,) = problems(grpo(model, "rollout.gateway.port=65534", "rollout.workers=2"))
    assert "the rollout.workers=2 workers take the ports behind it" in found
    (found,) = problems(grpo(model, "rollout.workers=-1"))
    assert found.startswith("rollout.workers=-1: must be from 0 to 256")
    many = ("rollout.workers=1000", "rollout.max_concurrent_rollouts=1000")
    (found,) = problems(grpo(model, *many))
    assert found.startswith("rollout.workers=1000: must be from 0 to 256")
    (found,) = problems(grpo(model, "rollout.workers=9", "train_dataset.batch_size=8"))
    assert found.startswith("rollout.workers=9: at most 8 episodes are in flight")


def test_a_recipe_that_does_not_ask_its_teacher_is_refused():
    words = ["recipe=distill", "actor.path=nowhere", "algorithm=grpo"]
    problem = "actor.loss=policy with actor.advantages=group: neither asks the teacher"
    with pytest.raises(ConfigError, match=problem):
        check_config(load_config(None, words))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["recipe=grpo", "actor.loss=distill"], "actor.loss=distill: needs a teacher"),
        (["recipe=ppo", "actor.advantages=teacher"], "actor.advantages=teacher: needs a teacher"),
        (
            ["recipe=distill", "teacher.addresses=[here]"],
            "teacher.addresses: 'here' is not host:port",
        ),
        (
            ["recipe=distill", "teacher.addresses=[a:1]", "teacher.path=b"],
            "teacher.path=b: needs no teacher.addresses",
        ),
        (
            ["recipe=distill", "teacher.addresses=[a:1]", "gconfig.temperature=0.7"],
            "gconfig.temperature=0.7 with teacher.addresses=['a:1']: servers of",
        ),
        (["recipe=distill", "teacher.optimizer.lr=1"], "teacher.optimizer: a frozen model"),
    ],
)
def test_a_teacher_that_cannot_be_asked_is_refused(words, problem):
    with pytest.raises(ConfigError) as e:
        check_config(load_config(None, [*words, "actor.path=nowhere"]))
    assert problem in str(e.value)


@pytest.mark.skipif(find_spec("megatron") is None, reason="compares with megatron-core's source")
def test_an_option_that_the_optimizer_lacks_is_named(model: Path) -> None:
    (problem,) = problems(grpo(model, "+actor.optimizer.options.initial_los_scale=2"))
    assert "actor.optimizer.options.initial_los_scale=2: " in problem
    assert "did you mean initial_loss_scale?" in problem
    (problem,) = problems(grpo(model, "+actor.optimizer.options.initial_loss_scale=big"))
    assert problem == "actor.optimizer.options.initial_loss_scale=big: not of type float"
    check_config(grpo(model, "+actor.optimizer.options.initial_loss_scale=1024"), 1)
    for option, type_name in {
        "optimizer_cpu_offload=2": "bool",
        "optimizer_offload_fraction=true": "float",
    }.items():
        (problem,) = problems(grpo(model, f"actor.optimizer.options.{option}"))
        assert problem == f"actor.optimizer.options.{option}: not of type {type_name}"


@pytest.mark.parametrize(
    ("override", "needs"),
    [
        ("ref={options: {cp_comm_type: p2p}}", "ref.parallel.cp > 1"),
        ("trainer.scheduler=ray", "trainer.mode=controller"),
    ],
)
def test_a_key_that_the_run_does_not_read_is_a_warning(
    model: Path, warnings: list[str], override: str, needs: str
) -> None:
    check_config(grpo(model), 1)
    assert not warnings
    check_config(grpo(model, override), 1)
    (line,) = warnings
    assert needs in line and "no effect" in line
