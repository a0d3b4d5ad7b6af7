"""megarl from-verl: what each of verl's keys becomes, what is refused, and the page beside it."""

from __future__ import annotations

import json
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_model import make_model
from megarl.cli import main
from megarl.config.aliases import aliased
from megarl.config.loader import load_config
from megarl.config.recipes import PPOConfig
from megarl.config.schema import key_table
from megarl.launcher import local

ROOT = Path(__file__).parents[2]
PAGE, TOOLS_RECIPE = ROOT / "docs" / "from_others.md", ROOT / "configs" / "gsm8k_tools_grpo.yaml"
TOOLS = "examples/sglang_multiturn/config/tool_config/gsm8k_tool_config.yaml"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
VALIDATION, CHAT = f"{ROLLOUT}.val_kwargs", "data.apply_chat_template_kwargs"
GRPO = "algorithm.adv_estimator=grpo"
# the recipe in the design document on verl's multi-turn rollouts: its file, and what its script
# sets besides (here with values)
DOCUMENT = """
hydra: {searchpath: ["file://verl/trainer/config"]}
defaults: [ppo_trainer, _self_]
data: {max_prompt_length: 1024, max_response_length: 1024, train_batch_size: 256,
  return_raw_chat: True}
actor_rollout_ref: {hybrid_engine: True, rollout: {name: sglang, multi_turn: {enable: True,
  max_turns: 5}}}
"""
SCRIPT = """#!/bin/bash
set -x
PROJECT_DIR="$(pwd)"
python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_trainer.yaml' \\
    algorithm.adv_estimator=grpo data.train_files=$HOME/train.jsonl \\
    data.val_files=$HOME/test.jsonl data.train_batch_size=64 data.max_prompt_length=64 \\
    data.max_response_length=192 data.truncation='error' data.filter_overlong_prompts=True \\
    actor_rollout_ref.model.path=MODEL actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.optim.lr=2e-6 actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.002 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=False \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.rollout.n=5 algorithm.use_kl_in_reward=False trainer.critic_warmup=0 \\
    trainer.logger='["console","wandb"]' trainer.project_name='sums' \\
    trainer.experiment_name='first' trainer.n_gpus_per_node=8 trainer.nnodes=1 \\
    trainer.save_freq=-1 trainer.test_freq=5 trainer.total_epochs=15 $@
"""


def convert(tmp_path: Path, text: str, name: str = "run.sh") -> int:
    (tmp_path / name).write_text(text)
    return main(["from-verl", str(tmp_path / name)])


def converted(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert convert(tmp_path, " ".join((GRPO, *words))) == 0
    (tmp_path / "ours.yaml").write_text(capsys.readouterr().out)
    return load_config(tmp_path / "ours.yaml")


@pytest.mark.parametrize(
    ("word", "ours", "value"),
    [
        ("data.train_batch_size=512", "train_dataset.batch_size", 512),
        ("data.train_files=a.parquet", "train_dataset.files", ["a.parquet"]),
        ("data.val_files=[a.parquet,b.parquet]", "valid_dataset.files", ["a.parquet", "b.parquet"]),
        ("data.max_prompt_length=700", "train_dataset.max_length", 700),
        ("data.max_response_length=700", "gconfig.max_new_tokens", 700),
        ("data.max_response_length=700", "eval_gconfig.max_new_tokens", 700),
        ("data.max_response_length=700", "server.context_length", 512 + 700),
        ("actor_rollout_ref.model.path=org/m", "actor.path", "org/m"),
        ("actor_rollout_ref.model.lora_rank=32", "actor.lora.r", 32),
        (f"{ACTOR}.optim.lr=3e-6", "actor.optimizer.lr", 3e-6),
        (f"{ACTOR}.optim.weight_decay=0.1", "actor.optimizer.weight_decay", 0.1),
        (f"{ACTOR}.optim.lr_warmup_steps_ratio=.1", "actor.optimizer.warmup_steps", 0.1),
        (f"{ACTOR}.optim.lr_warmup_steps=10", "actor.optimizer.warmup_steps", 10),
        # verl's default, -1, leaves it to the ratio
        (f"{ACTOR}.optim.lr_warmup_steps=-1", "actor.optimizer.warmup_steps", 0),
        (f"{ACTOR}.optim.lr_scheduler_type=cosine", "actor.optimizer.lr_scheduler_type", "cosine"),
        (f"{ACTOR}.grad_clip=0.5", "actor.optimizer.gradient_clipping", 0.5),
        (f"{ACTOR}.clip_ratio_low=0.1", "actor.eps_clip", 0.1),
        (f"{ACTOR}.clip_ratio_high=0.28", "actor.eps_clip_higher", 0.28),
        (f"{ACTOR}.clip_ratio_c=10.0", "actor.c_clip", 10.0),
        (f"{ACTOR}.entropy_coeff=0.01", "actor.entropy_coef", 0.01),
        (f"{ACTOR}.loss_agg_mode=token-mean", "actor.loss_agg", "token-mean"),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", "actor.loss_agg", "sequence-mean"),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum", "actor.loss_agg", "sequence-sum"),
        (f"{ACTOR}.kl_loss_type=low_var_kl", "actor.kl_estimator", "k3"),
        (f"{ACTOR}.kl_loss_type=kl", "actor.kl_estimator", "k1"),
        (f"{ACTOR}.kl_loss_type=mse", "actor.kl_estimator", "k2"),
        (f"{ACTOR}.use_kl_loss=True", "actor.kl_coef", 0.001),  # verl's default
        (f"{ACTOR}.kl_loss_coef=0.5", "actor.kl_coef", 0.0),  # which use_kl_loss=False leaves out
        # prompts in both: four updates of a batch, whatever n is
        (f"{ACTOR}.ppo_mini_batch_size=256 {ROLLOUT}.n=5", "actor.ppo_n_minibatches", 4),
        # verl counts sequences of at most 512 + 512 tokens
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=8", "actor.mb_spec.max_tokens_per_mb", 8 * 1024),
        (f"{ACTOR}.ppo_max_token_len_per_gpu=9000", "actor.mb_spec.max_tokens_per_mb", 9000),
        (f"{ACTOR}.megatron.tensor_model_parallel_size=4", "actor.parallel.tp", 4),
        (f"{ACTOR}.megatron.pipeline_model_parallel_size=2", "actor.parallel.pp", 2),
        (f"{ACTOR}.megatron.context_parallel_size=2", "actor.parallel.cp", 2),
        (f"{ACTOR}.megatron.expert_model_parallel_size=2", "actor.parallel.ep", 2),
        (f"{ACTOR}.ulysses_sequence_parallel_size=2", "actor.parallel.cp", 2),
        (f"{ROLLOUT}.n=5", "gconfig.n_samples", 5),
        (f"{ROLLOUT}.temperature=0.7", "gconfig.temperature", 0.7),
        (f"{ROLLOUT}.top_p=0.9", "gconfig.top_p", 0.9),
        (f"{ROLLOUT}.top_k=-1", "gconfig.top_k", -1),
        (f"{ROLLOUT}.name=vllm", "server.type", "sglang"),
        (f"{ROLLOUT}.val_kwargs.n=4", "eval_gconfig.n_samples", 4),
        (f"{ROLLOUT}.val_kwargs.top_p=0.7", "eval_gconfig.top_p", 0.7),
        (f"{VALIDATION}.do_sample=True {VALIDATION}.temperature=0.6", "eval_gconfig.greedy", False),
        (f"{ACTOR}.fsdp_config.dtype=float16", "actor.dtype", "float16"),
        (f"{ACTOR}.use_kl_loss=True ++{REF}.model.path=/teacher", "ref.path", "/teacher"),
        (f"++{REF}.model.path=/teacher", "ref", None),
        ("actor_rollout_ref.model.lora_alpha=16", "actor.lora", None),
        ("actor_rollout_ref.model.lora_rank=0 actor_rollout_ref.model.lora_alpha=16",
         "actor.lora", None),
        (f"{CHAT}.enable_thinking=False", "train_dataset.options",
         {"columns": {"messages": "prompt", "answer": "reward_model.ground_truth"},
          "chat_template_kwargs": {"enable_thinking": False}}),
        ("trainer.logger=null", "stats_logger.tensorboard", False),
        ("trainer.logger=['console','wandb']", "stats_logger.wandb", {"mode": "online"}),
        ("algorithm.norm_adv_by_std_in_grpo=False", "actor.adv_norm", "group_mean"),
        ("algorithm.norm_adv_by_std_in_grpo=True", "actor.adv_norm", "group"),
        (f"{ACTOR}.ppo_epochs=1 {ACTOR}.policy_loss.loss_mode=vanilla", "actor.ratio", "token"),
        ("trainer.logger=tensorboard", "stats_logger.tensorboard", True),
        (f"{ACTOR}.use_kl_loss=True {REF}.fsdp_config.param_offload=True", "ref.offload", True),
        (f"{REF}.fsdp_config.param_offload=True", "ref", None),  # which only the KL needs
        ("actor_rollout_ref.model.enable_gradient_checkpointing=False",
         "actor.recompute_granularity", "none"),
        (f"{ROLLOUT}.tensor_model_parallel_size=4", "server.tp", 4),
        (f"{ROLLOUT}.tensor_model_parallel_size=4 trainer.nnodes=2", "server.count", 4),
        (f"{ROLLOUT}.gpu_memory_utilization=0.6", "server.options", {"mem_fraction_static": 0.6}),
        (f"{ROLLOUT}.max_num_seqs=99", "server.max_running_requests", 99),
        ("trainer.project_name=p", "experiment_name", "p"),
        ("trainer.experiment_name=e", "trial_name", "e"),
        ("trainer.default_local_dir=d", "fileroot", "d"),
        ("trainer.total_epochs=7", "total_train_epochs", 7),
        ("trainer.total_training_steps=70", "total_train_steps", 70),
        ("trainer.save_freq=20", "saver.freq_steps", 20),
        ("trainer.test_freq=-1", "evaluator.freq_steps", None),
        ("trainer.val_before_train=False", "evaluator.at_start", False),
        ("trainer.resume_mode=disable", "recover.mode", "disabled"),
        ("trainer.n_gpus_per_node=4", "cluster.n_gpus_per_node", 4),
        # what verl has where a recipe says nothing
        ("", "actor.optimizer.beta2", 0.999),
        ("", "actor.c_clip", 3.0),
        ("", "total_train_epochs", 30),
        ("", "weight_sync.type", "colocated"),
        ("", "ref", None),
    ],
)  # fmt: skip
def test_a_key_becomes_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, ours: str, value: Any
) -> None:
    assert attrgetter(ours)(converted(tmp_path, capsys, word)) == value


def test_a_reference_is_there_for_the_kl_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = f"{ACTOR}.megatron.tensor_model_parallel_size=4 {ACTOR}.use_kl_loss=True"
    cfg = converted(tmp_path, capsys, layout, f"{ACTOR}.kl_loss_coef=0.01")
    assert cfg.ref.parallel.tp == 4 and cfg.actor.kl_coef == 0.01


@pytest.mark.parametrize(
    "word",
    [
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        f"{ACTOR}.ppo_mini_batch_size=300",
        f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.ppo_micro_batch_size=64",
        f"{ACTOR}.optim.lr_warmup_steps=10 {ACTOR}.optim.lr_warmup_steps_ratio=0.1",
        f"{ACTOR}.optim.lr_warmup_steps_ratio=1.0",
        f"{ACTOR}.policy_loss.loss_mode=gspo",
        f"{ROLLOUT}.multi_turn.enable=True",
        f"{ROLLOUT}.tensor_model_parallel_size=3",
        "custom_reward_function.path=reward.py",
        "reward_model.enable=True",
        "trainer.total_epochs=$EPOCHS",
        "data.unheard_of=1",
        "data.unheard_of=0",
        "actor_rollout_ref.model.override_config.tie_word_embeddings=False",
        f"{ACTOR}.clip_ratio=0.1 {ACTOR}.clip_ratio_low=null {ACTOR}.clip_ratio_high=null",
        f"{ACTOR}.use_kl_loss='\"False\"'",
        f"{ACTOR}.optim.lr_warmup_steps_ratio='\"1\"'",
        f"{ACTOR}.optim.lr_warmup_steps_ratio=5",
        f"{ROLLOUT}.dtype=float16",
        "algorithm.adv_estimator=[grpo]",
        "trainer.logger=5",
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    assert convert(tmp_path, f"{GRPO} {word}") == 2
    printed = capsys.readouterr()
    assert word.partition("=")[0].rpartition(".")[2] in printed.err and not printed.out


def test_a_value_that_ours_cannot_have_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(tmp_path, f"{GRPO} {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm") == 2
    assert "actor.loss_agg=seq-mean-token-sum-norm" in capsys.readouterr().err


def test_the_design_documents_run_becomes_the_recipe_with_tools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """verl's run_qwen2.5-3b_gsm8k_multiturn.sh at 0719d1f2, as far as it matters here."""
    folder = tmp_path / "examples" / "sglang_multiturn"
    (folder / "config").mkdir(parents=True)
    (folder / "config" / "gsm8k_multiturn_grpo.yaml").write_text(DOCUMENT)
    (folder / "run.sh").write_text(
        'PROJECT_DIR="$(pwd)"\nCONFIG_PATH="$PROJECT_DIR/examples/sglang_multiturn/config"\n'
        'python3 -m verl.trainer.main_ppo --config-path="$CONFIG_PATH" '
        f"--config-name='gsm8k_multiturn_grpo' {GRPO} {ROLLOUT}.n=16 {ROLLOUT}.name=sglang_async "
        f'{ROLLOUT}.multi_turn.tool_config_path="${{PROJECT_DIR}}/{TOOLS}" $@'
    )
    assert main(["from-verl", str(folder / "run.sh")]) == 0
    text = capsys.readouterr().out
    (tmp_path / "ours.yaml").write_text(text)
    cfg, shipped = load_config(tmp_path / "ours.yaml"), load_config(TOOLS_RECIPE)
    workflow = cfg.rollout.workflow
    assert workflow.type == shipped.rollout.workflow.type
    for name in ("tools", "max_turns"):
        assert workflow.options[name] == shipped.rollout.workflow.options[name]
    assert workflow.options["max_length"] == cfg.server.context_length == 2048
    assert (cfg.gconfig.n_samples, cfg.gconfig.max_new_tokens, cfg.server.type) == (
        16, 1024, "sglang",
    )  # fmt: skip
    *lines, needless = text.splitlines()
    for name in ("max_prompt_length", "max_response_length", "train_batch_size", "rollout.name"):
        assert any(name in line.partition("#")[2] for line in lines), name
    for name in ("hydra.searchpath", "defaults", "return_raw_chat", "hybrid_engine"):
        assert name in needless, name


def test_several_turns_need_tools_that_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = f"{ROLLOUT}.multi_turn"
    for given in (f"{turns}.tool_config_path=mine.yaml", f"{turns}.enable=True"):
        assert convert(tmp_path, f"{GRPO} {turns}.enable=True {given}") == 2
        assert given in capsys.readouterr().err
    cfg = converted(tmp_path, capsys, f"{turns}.tool_config_path=mine.yaml {turns}.max_turns=5")
    assert cfg.rollout.workflow.type.endswith(":RLVRWorkflow")  # enable is False
    cfg = converted(tmp_path, capsys, f"{turns}.enable=True {turns}.tool_config_path={TOOLS}")
    assert cfg.rollout.workflow.options["max_turns"] == 1024  # verl's has no bound


@pytest.mark.parametrize(
    ("words", "named", "absent"),
    [
        ("algorithm.adv_estimator=rloo", ("adv_estimator=rloo", "algorithm: rloo"), "batch_size"),
        ("algorithm.adv_estimator=gae", ("adv_estimator=gae", "recipe: ppo"), "batch_size"),
        ("trainer.nnodes=1", ("adv_estimator=gae", "recipe: ppo"), "batch_size"),
        (f"{GRPO} data.train_batch_size=1000", ("ppo_mini_batch_size=256", "1000"), "estimator"),
        (f"{GRPO} trainer.n_gpus_per_node=9", ("model_parallel_size=2", "9 GPUs"), "batch_size"),
        (f"{GRPO} trainer.logger=swanlab", ("trainer.logger=swanlab",), "batch_size"),
        ("python train.py --lr 1", ("run.sh",), "estimator"),
        ("python train.py trainer_of.mine=3", ("run.sh",), "estimator"),
    ],
)
def test_a_cause_has_a_line_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, named: Any, absent: str
) -> None:
    assert convert(tmp_path, words) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and not printed.out
    assert all(word in printed.err for word in named) and absent not in printed.err


def test_values_that_refer_to_others_are_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"""{{algorithm: {{adv_estimator: grpo}}, trainer: {{project_name: sums, nnodes: 1,
      experiment_name: 'a-${{trainer.project_name}}', default_local_dir: '${{oc.env:HOME}}/x'}},
      data: {{train_batch_size: '${{{ACTOR}.ppo_mini_batch_size}}'}},
      actor_rollout_ref: {{actor: {{ppo_mini_batch_size: 64}}}}}}"""
    assert convert(tmp_path, text, "mine.yaml") == 0
    printed = capsys.readouterr().out
    (tmp_path / "ours.yaml").write_text(printed)
    cfg = load_config(tmp_path / "ours.yaml")
    assert (cfg.trial_name, cfg.train_dataset.batch_size) == ("a-sums", 64)
    assert "${oc.env:HOME}/x" in printed
    script = f'SIZE=48\nDIR="${{OUT:-out}}/$SIZE"\nrun {GRPO} data.train_batch_size=$SIZE '
    words = f"{ACTOR}.ppo_mini_batch_size=$SIZE trainer.default_local_dir=$DIR"
    assert convert(tmp_path, script + words) == 0
    (tmp_path / "ours.yaml").write_text(capsys.readouterr().out)
    cfg = load_config(tmp_path / "ours.yaml")
    assert (cfg.fileroot, cfg.train_dataset.batch_size) == ("out/48", 48)


def test_a_script_passes_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MEGARL_DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model", hidden=64, layers=1)
    for name, first in (("train", 0), ("test", 64)):
        rows = [
            {"prompt": [{"role": "user", "content": f"{a}+1"}], "data_source": "sums",
             "reward_model": {"style": "rule", "ground_truth": str(a + 1)}}
            for a in range(first, first + 64)
        ]  # fmt: skip
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert convert(tmp_path, SCRIPT.replace("MODEL", "model")) == 0
    text = capsys.readouterr().out
    (tmp_path / "ours.yaml").write_text(text)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.5.23\n")  # has SGLang
    python.chmod(0o755)
    line = ["--config", "ours.yaml", "--nproc", "8", f"server.python={python}"]
    assert local.main([*line, "--check"]) == 0
    names = re.findall(r"([\w.]+\.\w+)=", SCRIPT.partition("--config-name")[2])
    assert len(names) > 25
    off = ("use_kl_in_reward", "critic_warmup", "adv_estimator")
    for name in names:
        last = name.rpartition(".")[2]
        assert last in text or last in off, name


def test_slimes_flags_of_the_page_are_known() -> None:
    section = PAGE.read_text().partition("## slime")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `--([\w-]+)` \| `([\w.]+)(?:=\w+)?`", section, re.MULTILINE)
    keys = key_table(PPOConfig)
    assert len(rows) >= 20
    for flag, ours in rows:
        known = aliased(keys, flag.replace("-", "_"))
        own = ours.rpartition(".")[2] == flag.replace("-", "_")
        assert ours in keys or ours.startswith("server.options."), ours
        assert own or (known or "").partition("=")[0] == ours, (flag, known)


@pytest.mark.parametrize(
    ("word", "named"),
    [
        (f"{ACTOR}.ppo_mini_batch_size=0", "ppo_mini_batch_size=0: write a whole number"),
        ("data.max_prompt_length=long", "data.max_prompt_length=long: write a whole number"),
        ("trainer.logger='console", "run.sh: No closing quotation"),
    ],
)
def test_what_is_no_number_or_no_word_of_a_shell_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, named: str
) -> None:
    assert convert(tmp_path, f"{GRPO} {word}") == 2
    assert named in capsys.readouterr().err


RUN = f"python3 -m verl.trainer.main_ppo {GRPO} "


@pytest.mark.parametrize(
    ("script", "ours", "value"),
    [
        (f"{RUN}data.train_batch_size=512 \\\n `# the rest` \\\n {ROLLOUT}.n=16",
         "gconfig.n_samples", 16),
        (f"{RUN}trainer.experiment_name=run#2 \\\n {ROLLOUT}.n=16", "gconfig.n_samples", 16),
        (f"{RUN}trainer.experiment_name=run#2", "trial_name", "run#2"),
        (f"{RUN}trainer.experiment_name='a #b' # c", "trial_name", "a #b"),
        (f"# N='2 \\\nN=8\n{RUN}{ROLLOUT}.n=${{N:-5}}", "gconfig.n_samples", 8),
        (f"N=8; M=2\n{RUN}{ROLLOUT}.n=$N", "gconfig.n_samples", 8),
        (f"DATA=(data.train_batch_size=512\n data.shuffle=False)\n{RUN} ${{DATA[@]}}",
         "train_dataset.batch_size", 512),
        (f"cat > x <<EOF\ndata.train_batch_size=64\nEOF\n{RUN}", "train_dataset.batch_size", 1024),
        (f"if a; then M=1; fi\nN=8\n{RUN}{ROLLOUT}.n=$N", "gconfig.n_samples", 8),
        (f"cd verl && export N=8 && {RUN}{ROLLOUT}.n=$N 2>&1 | tee log", "gconfig.n_samples", 8),
        (f"pkill -f main_ppo\nset -x\nN=a; echo for all; N=8\n{RUN}{ROLLOUT}.n=$N $@",
         "gconfig.n_samples", 8),
        (f'{RUN}trainer.logger=[\\"console\\"] "$@"\n# data.train_batch_size=256 is "enough"',
         "train_dataset.batch_size", 1024),
        (f"echo don\\'t stop  # it's the batch\n{RUN}{ROLLOUT}.n=8 # doesn't",
         "gconfig.n_samples", 8),
        (f"# {RUN} \\\n#  {ROLLOUT}.n=4\n{RUN}{ROLLOUT}.n=8 \\\n # end", "gconfig.n_samples", 8),
        (f'W="trainer.project_name=p {ROLLOUT}.n=8"\n{RUN}$W', "gconfig.n_samples", 8),
        (f'B=({ROLLOUT}.n=2)\nA=({ROLLOUT}.n=8 trainer.project_name="$(pwd)/a")\n{RUN}"${{A[@]}}"',
         "gconfig.n_samples", 8),
        (f'{RUN}"" {ROLLOUT}.n=8', "gconfig.n_samples", 8),
        (f'W="trainer.project_name=p"\nW+=" {ROLLOUT}.n=8"\n{RUN}$W', "experiment_name", "p"),
        (f"A=({ROLLOUT}.n=2)\nA+=({ROLLOUT}.n=8)\n{RUN}${{A[@]}}", "gconfig.n_samples", 8),
    ],
)  # fmt: skip
def test_a_script_is_read_as_a_shell_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str, ours: str, value: Any
) -> None:
    assert convert(tmp_path, script) == 0
    (tmp_path / "ours.yaml").write_text(capsys.readouterr().out)
    assert attrgetter(ours)(load_config(tmp_path / "ours.yaml")) == value


@pytest.mark.parametrize(
    ("script", "named"),
    [
        (f"{RUN}data.train_batch_size=512 \\\n # the rest \\\n {ROLLOUT}.n=16", "comment"),
        (f"N=8\nif [ $DEBUG = 1 ]\nthen\nN=2\nfi\n{RUN}{ROLLOUT}.n=$N", "$N"),
        (f"{RUN}{ROLLOUT}.n=2\n{RUN}{ROLLOUT}.n=8", "main_ppo"),
        (f"if a; then N=8; fi; {RUN}{ROLLOUT}.n=${{N:-5}}", "$N"),
        (f"case $1 in a) N=8 ;; esac\n{RUN}{ROLLOUT}.n=${{N:-5}}", "$N"),
        (f"}}\nif a; then N=8; fi\n{RUN}{ROLLOUT}.n=${{N:-5}}", "$N"),
        (f"N=2; [ a ] && N=8; {RUN}{ROLLOUT}.n=$N", "$N"),
        (f"[[ a ]] && {{ N=8; }} || {{ N=2; }}\n{RUN}{ROLLOUT}.n=$N", "$N"),
        (f"if a; then A=({ROLLOUT}.n=2); else A=({ROLLOUT}.n=8); fi\n{RUN}${{A[@]}}", "$A"),
        (f"run() {{\n{RUN}$@\n}}\nrun {ROLLOUT}.n=2", "function"),
        (f"if a; then {RUN}{ROLLOUT}.n=2; fi", "branch"),
        (f"read -d '' KEYS <<'EOF'\n{ROLLOUT}.n=2\nEOF\n{RUN}$KEYS", "$KEYS"),
        (f"{RUN}$(cat keys)", "$(cat"),
    ],
)
def test_a_script_that_could_mean_two_things_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str, named: str
) -> None:
    assert convert(tmp_path, script) == 2
    printed = capsys.readouterr()
    assert named in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_the_file_that_a_script_names_is_read_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config").mkdir()
    file = tmp_path / "config" / "mine.yaml"
    file.write_text(
        "hydra: {searchpath: [x]}\ndefaults: [ppo_trainer, _self_]\n"
        "data: {max_prompt_length: 300, max_response_length: 77}\n"
    )
    words = ("--config-path=config", "--config-name='mine'")
    for given in (words, ("-cp config", "-cn mine.yaml"), ("--config-dir config", words[1])):
        cfg = converted(tmp_path, capsys, *given, "data.max_prompt_length=400")
        assert cfg.gconfig.max_new_tokens == 77 and cfg.train_dataset.max_length == 400
    cfg = converted(tmp_path, capsys, "# --config-name=other\n")
    assert cfg.gconfig.max_new_tokens == 512
    assert converted(tmp_path, capsys, "--config-name=ppo_megatron_trainer")
    for given in ("--config-name other", "--config-path $PWD/config", "--config-path elsewhere"):
        assert convert(tmp_path, f"{GRPO} {given}") == 2
        printed = capsys.readouterr()
        assert given.rpartition(" ")[2] in printed.err and not printed.out
    for text, named in (
        ("actor_rollout_ref: {rollout: {multi_turn: {enable: true}}}", "multi_turn.enable"),
        ("defaults: [ppo_trainer, base]", "base"),
    ):
        file.write_text(text)
        assert convert(tmp_path, " ".join((GRPO, *words))) == 2
        assert named in capsys.readouterr().err
