"""megarl from-areal: what each of AReaL's keys becomes, and what is refused."""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_model import make_model
from megarl.cli import main
from megarl.cli.convert import keys_of
from megarl.config.loader import load_config
from megarl.launcher import command as local_command
from megarl.launcher import local

# the 97 keys of examples/arealite/configs/gsm8k_grpo.yaml of inclusionAI/AReaL at 21bd032eb987,
# whose values these are, but for paths and sizes
NAMES = "experiment_name: '${experiment_name}', trial_name: '${trial_name}'"
PLACE = f"{NAMES}, fileroot: '${{cluster.fileroot}}'"
AREAL = f"""
experiment_name: gsm8k-grpo
trial_name: trial0
allocation_mode: sglang.d4p1t1+d4p1t1
cluster: {{n_nodes: 1, n_gpus_per_node: 8, fileroot: out,
  name_resolve: {{type: nfs, nfs_record_root: /tmp/areal/name_resolve}}}}
seed: 1
total_train_epochs: 10
tokenizer_path: ${{actor.path}}
async_training: true
rollout: {{{NAMES}, max_concurrent_rollouts: 16, queue_size: null,
  consumer_batch_size: '${{train_dataset.batch_size}}', max_head_offpolicyness: 4,
  enable_rollout_tracing: false}}
gconfig: {{n_samples: 4, min_new_tokens: 0, max_new_tokens: 64, greedy: false, temperature: 1.0}}
actor: {{{NAMES}, path: model, init_from_scratch: false, disable_dropout: true,
  gradient_checkpointing: false, dtype: float32, mb_spec: {{max_tokens_per_mb: 10240}},
  optimizer: {{type: adam, lr: 1e-5, weight_decay: 0.01, beta1: 0.9, beta2: 0.999, eps: 1e-8,
    lr_scheduler_type: constant, gradient_clipping: 1.0, warmup_steps_proportion: 0.001}},
  backend: fsdp, group_size: '${{gconfig.n_samples}}', group_adv_norm: false, eps_clip: 0.4,
  temperature: '${{gconfig.temperature}}', reward_scaling: 10.0, reward_bias: -0.5, kl_ctl: 0.0,
  ppo_n_minibatches: 1, recompute_logprob: true, use_decoupled_loss: true,
  behav_imp_weight_cap: 5.0}}
ref: {{{NAMES}, path: '${{actor.path}}', init_from_scratch: false, dtype: '${{actor.dtype}}',
  mb_spec: {{max_tokens_per_mb: 10240}}, optimizer: null, backend: fsdp}}
server_only: false
sglang: {{model_path: '${{actor.path}}', random_seed: '${{seed}}', skip_tokenizer_init: true,
  dtype: '${{actor.dtype}}', max_running_requests: null, context_length: 128,
  mem_fraction_static: 0.9}}
train_dataset: {{batch_size: 16, shuffle: true, pin_memory: true}}
valid_dataset: {{batch_size: 16, shuffle: true, pin_memory: true}}
saver: {{{PLACE}, freq_epochs: 1, freq_steps: null, freq_secs: null}}
checkpointer: {{{PLACE}, freq_epochs: 1, freq_steps: null, freq_secs: 3600}}
evaluator: {{{PLACE}, freq_epochs: 1, freq_steps: null, freq_secs: null}}
stats_logger: {{{PLACE}, wandb: {{mode: disabled}}}}
"""
DATA = "train_dataset.path=gsm8k"
SHORT = "actor: {path: model}"


def convert(tmp_path: Path, *words: str, text: str = SHORT) -> int:
    (tmp_path / "theirs.yaml").write_text(text)
    return main(["from-areal", str(tmp_path / "theirs.yaml"), *words])


def converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str, text: str = SHORT
) -> Any:
    assert convert(tmp_path, DATA, *words, text=text) == 0
    (tmp_path / "ours.yaml").write_text(capsys.readouterr().out)
    return load_config(tmp_path / "ours.yaml")


def test_gsm8k_grpo_passes_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGARL_DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model", hidden=64, layers=1)
    (tmp_path / "gsm8k").mkdir()
    for split, first in (("train", 0), ("test", 64)):
        rows = [{"question": f"{a}+1", "answer": f"#### {a + 1}"} for a in range(first, first + 64)]
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cfg = converted(tmp_path, capsys, text=AREAL)
    # the interpreter of these tests has no SGLang
    monkeypatch.setattr(local_command, "check_sglang", lambda plan: None)
    assert local.main(["--config", "ours.yaml", "--check"]) == 0
    text = (tmp_path / "ours.yaml").read_text()
    names = keys_of(tmp_path / "theirs.yaml")
    assert len(names) == 97
    together = {"actor.use_decoupled_loss", "actor.behav_imp_weight_cap", "allocation_mode"}
    *lines, needless = text.splitlines()
    comments = "\n".join(line.partition("  # ")[2] for line in lines)
    for name in names.keys() - together:
        assert name in needless or name.rpartition(".")[2] in comments, name
    values = {
        "actor.adv_norm": "batch",  # AReaL's default, with neither norm of a group
        "actor.correction": {"weight": "token", "mask": "token", "mask_high": 5.0},
        "actor.recompute_logprob": "auto",
        "actor.eps_clip": 0.4,
        "actor.reward_clip": 20.0,
        "actor.reward_scaling": 10.0,
        "actor.reward_bias": -0.5,
        "actor.optimizer.beta2": 0.999,
        "actor.recompute_granularity": "none",
        "ref": None,
        "kl_ctl": 0.0,
        "rollout.max_head_offpolicyness": 4,
        "eval_gconfig.greedy": False,
        "eval_gconfig.n_samples": 4,
        "server.type": "sglang",
        "server.count": 4,
        "server.options": {"mem_fraction_static": 0.9, "random_seed": 1},
        "server.context_length": 128,
        "fileroot": "out",
        "tokenizer_path": "model",
        "recover.freq_secs": 3600,
        "recover.freq_epochs": 1,
        "train_dataset.type": "gsm8k",
        "valid_dataset.path": "gsm8k",
        "valid_dataset.split": "test",
    }
    assert {name: attrgetter(name)(cfg) for name in values} == values


@pytest.mark.parametrize(
    ("words", "ours", "value"),
    [
        # where AReaL's default is not ours
        ("", "actor.ppo_n_minibatches", 4),
        ("", "actor.recompute_granularity", "full"),
        ("", "actor.recompute_logprob", "false"),
        ("", "actor.correction", None),
        ("actor.optimizer=null", "actor.optimizer", None),
        ("", "gconfig.max_new_tokens", 16384),
        ("", "server.context_length", 32768),
        ("", "evaluator.at_start", False),
        ("", "kl_ctl", 0.1),
        ("", "actor.optimizer.eps", 1e-5),
        ("actor.optimizer.beta1=0.8", "actor.optimizer.lr", 2e-5),
        ("actor.kl_ctl=0", "ref", None),
        ("actor.kl_ctl=0.2 ref.path=other", "ref.path", "other"),
        ("async_training=false rollout.max_head_offpolicyness=4", "rollout.max_head_offpolicyness",
         0),
        ("actor.group_reward_norm=true actor.adv_norm=false", "actor.adv_norm", "group"),
        ("actor.adv_norm=false", "actor.adv_norm", "none"),
        ("actor.use_decoupled_loss=true", "actor.correction", {"weight": "token"}),
        ("gconfig.top_k=100000000", "gconfig.top_k", -1),
        ("allocation_mode=sglang:d4+fsdp:d2t2", "allocation_mode", "sglang:d4+megatron:d2t2"),
        ("allocation_mode=sglang.d4|d4", "weight_sync.type", "colocated"),
        ("n_nodes=2", "cluster.n_nodes", 2),
        ("sglang.attention_backend=triton", "server.options",
         {"mem_fraction_static": 0.9, "attention_backend": "triton"}),
        ("checkpointer.freq_secs=null", "recover.freq_secs", None),
        ("stats_logger.wandb.project=p", "stats_logger.wandb", {"options": {"project": "p"}}),
        ("recover.mode=off", "recover.mode", "disabled"),
        ("actor.dtype=float16 sglang.dtype=float16", "actor.dtype", "float16"),
        ("actor.dtype=float16 sglang.dtype=float16", "server.dtype", "auto"),
    ],
)  # fmt: skip
def test_a_key_becomes_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, ours: str, value: Any
) -> None:
    assert attrgetter(ours)(converted(tmp_path, capsys, *words.split())) == value


@pytest.mark.parametrize(
    "word",
    [
        "actor.group_adv_norm=true",
        "actor.group_reward_norm=true",  # beside adv_norm, which is true by default
        "actor.gae_lambda=0.9",
        "actor.optimizer.warmup_steps_proportion=1",
        "actor.mask_no_eos_with_zero=true",
        "actor.reward_norm.mean_level=group",
        "critic.path=model",
        "total_train_n_seqs=100",
        "train_dataset.path=hiyouga/geometry3k",
        "actor.unheard_of=1",
        "actor.unheard_of=0",
        "actor.use_decoupled_loss='false'",
        "actor.recompute_logprob='false'",
        "async_training=2",
        "async_training=null",
        "actor.group_reward_norm=[1]",
        "actor.optimizer.warmup_steps_proportion='1'",
        "rollout.max_head_offpolicyness=null",
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    assert convert(tmp_path, DATA, word) == 2
    printed = capsys.readouterr()
    assert word.replace("'", "") in printed.err and not printed.out


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (SHORT, "train_dataset.path"),  # without DATA
        ("model: {path: model}", "theirs.yaml"),
        ("actor: {path: '${tokenizer_path}'}\ntokenizer_path: ${actor.path}", "actor.path"),
        ("actor: [", "theirs.yaml"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, named: str
) -> None:
    assert convert(tmp_path, text=text) == 2
    printed = capsys.readouterr()
    assert named in printed.err and printed.err.count("\n") == 1
