"""Models are found, or refused by name, before anything is started."""

from __future__ import annotations

import dataclasses
import errno
import fnmatch
import json
import os
import shutil
from functools import partial

import huggingface_hub
import pytest

from examples.tiny_model import make_model
from megarl.config.algo import PPOActorConfig
from megarl.config.dataset import DatasetConfig, PartConfig
from megarl.config.errors import ConfigError
from megarl.config.recipes import DistillConfig, GRPOConfig, SFTConfig
from megarl.config.rollout import ServerConfig
from megarl.config.script import fetch_hub_models
from megarl.data.tokenizer import load_hf_tokenizer
from megarl.launcher import local
from megarl.models.hf_config import read_hf_config
from megarl.trainer.preflight import (
    check_data,
    check_models,
    check_place,
    check_weights,
    check_writable,
    largest_token,
)
from tests.tiny import VOCAB, save_tiny
from tests.tiny_tokenizer import save_tokenizer


def sft(path: str) -> SFTConfig:
    cfg = SFTConfig()
    cfg.model.path = path
    return cfg


def test_a_hub_name_becomes_its_snapshot(tmp_path, monkeypatch):
    asked = []

    def download(name, **kw):
        asked.append(name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    cfg = sft("Qwen/Qwen3-0.6B")
    fetch_hub_models(cfg)
    assert cfg.model.path == str(tmp_path)
    fetch_hub_models(cfg)  # now a directory
    assert asked == ["Qwen/Qwen3-0.6B"]


def test_a_hub_that_cannot_be_reached_is_an_error_with_the_fix(monkeypatch):
    def download(name, **kw):
        raise FileNotFoundError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ConfigError, match=r"model.path=Qwen/Qwen3-0.6B.*hf download"):
        fetch_hub_models(sft("Qwen/Qwen3-0.6B"))


@pytest.mark.parametrize("switch", ("--check", "--dry-run", None))
def test_a_check_fetches_no_weights_of_the_hub_and_a_start_needs_them(
    switch, tmp_path, monkeypatch, capsys
):
    make_model(tmp_path / "m", hidden=64, layers=1)
    asked = []

    def download(name, *, allow_patterns):
        asked.append(name)
        for file in (tmp_path / "m").iterdir():
            if any(fnmatch.fnmatch(file.name, p) for p in allow_patterns):
                shutil.copy(file, folder)
        return str(folder)

    folder = tmp_path / "snapshot"
    folder.mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    words = ["recipe=sft", "model.path=org/model", "model.optimizer.lr=1", f"fileroot={tmp_path}/r"]
    data = ["train_dataset.type=arithmetic", "train_dataset.size=8", "train_dataset.batch_size=8"]
    line = [*words, *data, "--nproc", "1"]
    if switch is not None:
        assert local.main([*line, switch]) == 0
        there = {file.name for file in folder.iterdir()}
        assert {"config.json", "tokenizer.json"} <= there
        assert not any(name.endswith(".safetensors") for name in there)
        return
    monkeypatch.setattr(local, "launch", None)  # nothing starts
    (tmp_path / "m" / "model.safetensors").unlink()
    assert local.main(line) == 2
    assert asked == ["org/model"]
    assert f"model.path={folder}: has no *.safetensors" in capsys.readouterr().err


def test_weights_of_trained_models_and_servers_are_needed_by_a_start(tmp_path):
    make_model(tmp_path / "m", hidden=64, layers=1)
    make_model(tmp_path / "bare", hidden=64, layers=1)
    (tmp_path / "bare" / "model.safetensors").unlink()
    path, bare = str(tmp_path / "m"), str(tmp_path / "bare")
    check_weights(GRPOConfig(actor=PPOActorConfig(path=path)))
    cfg = GRPOConfig(actor=PPOActorConfig(path=bare))
    refused(partial(check_weights, cfg), "actor.path", bare, "init_from_scratch=true")
    cfg.actor.init_from_scratch = True
    check_weights(cfg)
    cfg.judge = ServerConfig(path=bare)
    refused(partial(check_weights, cfg), "judge.path", bare)
    cfg.judge, cfg.server.path = None, bare
    refused(partial(check_weights, cfg), "server.path", bare)


@pytest.mark.parametrize("root", ("/proc/nowhere", "file/below", "new"))
def test_a_run_directory_that_cannot_be_created_is_refused(tmp_path, root):
    (tmp_path / "file").touch()
    cfg = SFTConfig(fileroot=root if root.startswith("/") else str(tmp_path / root))
    if root == "new":
        check_place(cfg)
    else:
        refused(partial(check_place, cfg), cfg.fileroot, "fileroot")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_tp_that_does_not_divide_the_heads_is_refused(tmp_path):
    cfg = sft(str(save_tiny(tmp_path / "m", "qwen3")))  # 4 heads
    cfg.model.parallel.tp = 3
    with pytest.raises(ConfigError, match=r"model: .*tp=3"):
        check_models(cfg)


@pytest.mark.parametrize("how", ("a token too many", "a vocabulary too small", "slow files"))
def test_a_tokenizer_larger_than_a_model_is_refused(tmp_path, how):
    path, kw = tmp_path / "m", {}
    if how == "a vocabulary too small":
        kw = {"vocab_size": VOCAB - 1}
    save_tiny(path, "qwen3", layers=1, **kw)
    tokenizer = save_tokenizer(path)
    if how == "a token too many":
        check_models(sft(str(path)))  # as it comes: its largest id is VOCAB - 1
        tokenizer.add_tokens(["<tool>"])
        tokenizer.save_pretrained(path)
    elif how == "slow files":
        (path / "tokenizer.json").unlink()
        (path / "vocab.json").write_text(json.dumps({"a": 0, "z": VOCAB}))
    largest = VOCAB - 1 if kw else VOCAB
    with pytest.raises(
        ConfigError, match=rf"model\.path=.*/m has the token .* with id {largest}, .*vocab_size is"
    ):
        check_models(sft(str(path)))
    cfg = sft(str(path))
    cfg.tokenizer_path = str(tmp_path / "elsewhere")
    save_tokenizer(tmp_path / "elsewhere")
    if not kw:
        check_models(cfg)


def test_the_largest_token_of_unigrams_and_of_tokens_added_later(tmp_path):
    assert largest_token(tmp_path) == ("", -1)
    whole = {"model": {"vocab": [["a", -1.5], ["b", -2.5]]}, "added_tokens": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    assert largest_token(tmp_path) == ("b", 1)
    added = {"added_tokens_decoder": {"7": {"content": "<x>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(added))
    assert largest_token(tmp_path) == ("<x>", 7)


def test_routes_of_a_dense_model_are_refused(tmp_path):
    cfg = GRPOConfig(actor=PPOActorConfig(path=str(save_tiny(tmp_path / "m", "qwen3"))))
    cfg.tokenizer_path, cfg.server.context_length = str(tmp_path / "m"), 64
    check_models(cfg)
    cfg.actor.router_replay = "rollout"
    with pytest.raises(ConfigError, match=r"router_replay=rollout: the model .* has no experts"):
        check_models(cfg)


def test_switches_of_attention_that_megatron_core_refuses_are_named(tmp_path, monkeypatch):
    cfg = sft(str(save_tiny(tmp_path / "m", "qwen3")))
    monkeypatch.setenv("NVTE_FUSED_ATTN", "1")  # as megatron-core leaves it
    check_models(cfg)
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    with pytest.raises(ConfigError, match=r"^NVTE_FLASH_ATTN=0: .*attention=sdpa"):
        check_models(cfg)


def test_a_run_directory_that_takes_no_file_is_an_error(tmp_path, monkeypatch):
    cfg = SFTConfig(fileroot=str(tmp_path))
    check_writable(cfg)
    assert not list((tmp_path / "megarl" / "trial0").iterdir())

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"megarl/trial0 cannot be written to: .*No space left"):
        check_writable(cfg)
    cfg.fileroot = str(tmp_path / "file")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/megarl/trial0 cannot be written to"):
        check_writable(cfg)


def test_a_teacher_speaks_of_the_students_tokens_or_is_refused(tmp_path):
    for name in ("student", "teacher"):
        save_tiny(tmp_path / name, "qwen3", layers=1)
        save_tokenizer(tmp_path / name)
    cfg = DistillConfig()
    cfg.actor.path, cfg.teacher.path = str(tmp_path / "student"), str(tmp_path / "teacher")
    cfg.teacher.lm_head_topk, cfg.server.context_length = VOCAB, 32
    check_models(cfg)
    cfg.teacher.lm_head_topk = VOCAB + 1
    with pytest.raises(ConfigError, match=rf"lm_head_topk={VOCAB + 1}.*vocabulary of {VOCAB}"):
        check_models(cfg)
    cfg.teacher.lm_head_topk = 1
    file = tmp_path / "teacher" / "tokenizer.json"
    whole = json.loads(file.read_text())
    vocab = whole["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(whole))
    with pytest.raises(ConfigError, match=r"teacher.path=.*its tokenizer is not the student's"):
        check_models(cfg)


@pytest.mark.parametrize(
    ("context", "problem"),
    [
        ("{{ question }} is {{ answer }}", None),
        ("{{ question }} is {{ solution }}", "teacher.context: row .*'solution' is undefined"),
        ("{% if %}", "teacher.context=.*no Jinja template"),
    ],
)
def test_a_teachers_template_that_asks_for_what_no_row_has_is_refused(tmp_path, context, problem):
    make_model(tmp_path / "m", hidden=64, layers=1)
    cfg = DistillConfig()
    cfg.actor.path, cfg.teacher.context = str(tmp_path / "m"), context
    cfg.train_dataset.type, cfg.train_dataset.size = "arithmetic", 40
    cfg.train_dataset.batch_size, cfg.gconfig.max_new_tokens = 8, 64
    if problem is None:
        check_data(cfg, renders=True)
        cfg.gconfig.max_new_tokens = read_hf_config(tmp_path / "m").max_position_embeddings
        problem = "teacher.context: row .* exceed the teacher's max_position_embeddings"
    with pytest.raises(ConfigError, match=problem):
        check_data(cfg, renders=True)


def grpo_of_texts(tmp_path, *texts, held=()):
    """A configuration of RL on rows with these prompts, and a model with its tokenizer."""
    make_model(tmp_path / "m", hidden=64, layers=1)
    cfg = GRPOConfig(actor=PPOActorConfig(path=str(tmp_path / "m")))
    for name, rows in (("rows", texts), ("held", held)):
        lines = (json.dumps({"messages": t, "answer": "2"}) + "\n" for t in rows)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    cfg.train_dataset.type, cfg.train_dataset.path = "chat", str(tmp_path / "rows.jsonl")
    cfg.train_dataset.reward.type, cfg.train_dataset.batch_size = "exact", 1
    if held:
        path = str(tmp_path / "held.jsonl")
        cfg.valid_dataset = dataclasses.replace(cfg.train_dataset, path=path)
    cfg.gconfig.max_new_tokens = cfg.eval_gconfig.max_new_tokens = 8
    return cfg


def num_prompt_tokens(cfg, text):
    tokenizer = load_hf_tokenizer(cfg.actor.path)
    chat = [{"role": "user", "content": text}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def refused(check, *words):
    """The one problem that `check` raises, which holds the words."""
    with pytest.raises(ConfigError) as error:
        check()
    (problem,) = error.value.problems
    assert all(str(word) in problem for word in words), problem


@pytest.mark.parametrize("in_child", (False, True))
def test_a_prompt_that_exceeds_the_context_is_refused_before_a_start(tmp_path, in_child):
    cfg = grpo_of_texts(tmp_path, "1+1", "2" * 60, *["3+3"] * 40, held=("9" * 70,))
    check = partial(check_data, cfg, renders=True, in_child=in_child)
    row, held = (num_prompt_tokens(cfg, digit * n) for digit, n in (("2", 60), ("9", 70)))
    cfg.server.context_length = held + 8
    check()
    cfg.eval_gconfig.max_new_tokens = 9
    refused(check, "valid_dataset", held, "max_new_tokens=9", held + 8)
    cfg.valid_dataset = None
    cfg.server.context_length = row + 7
    refused(check, "train_dataset", "row 1", row, "max_new_tokens=8", row + 7)
    cfg.train_dataset.max_length = row - 1  # leaves the long row out
    check()


def test_the_longest_row_that_max_length_leaves_is_found(tmp_path):
    texts = [str(i) * 90 for i in range(1, 10)] * 4  # all are left out
    cfg = grpo_of_texts(tmp_path, *texts, "2" * 60, "1+1")
    row = num_prompt_tokens(cfg, "2" * 60)
    cfg.train_dataset.max_length, cfg.server.context_length = row, row + 7
    check = partial(check_data, cfg, renders=True)
    refused(check, f"row {len(texts)}:", row, "max_new_tokens=8", row + 7)
    cfg.server.context_length += 1
    check()


@pytest.mark.parametrize("recipe", ("grpo", "sft", "parts"))
def test_a_max_length_that_leaves_no_row_is_refused_before_a_start(tmp_path, recipe):
    cfg = grpo_of_texts(tmp_path, "1+1=", "22+22=")
    key, data = "train_dataset", cfg.train_dataset
    shortest = num_prompt_tokens(cfg, "1+1=")
    if recipe == "sft":
        cfg = sft(cfg.actor.path)
        file = tmp_path / "sft.jsonl"
        answer = {"role": "assistant", "content": "4"}
        rows = [[{"role": "user", "content": t}, answer] for t in ("1+1=", "22+22=")]
        file.write_text("".join(json.dumps({"messages": r}) + "\n" for r in rows))
        data = cfg.train_dataset
        data.type, data.path, data.batch_size = "chat", str(file), 1
        shortest += 2  # the answer and its end
    elif recipe == "parts":
        part = PartConfig(type="chat", path=data.path, reward=data.reward)
        cfg.train_dataset = DatasetConfig(type="mix", batch_size=1, parts={"a": part})
        key, data = "train_dataset.parts.a", part
    check = partial(check_data, cfg, renders=True)
    data.max_length = shortest
    check()
    data.max_length = shortest - 1
    refused(check, key, f"max_length={shortest - 1}", "2 rows", f"has {shortest}")
