"""The pages in docs/ say what is so: their keys, commands, examples are the code's."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import importlib.util
import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import yaml

from examples.close_reward import close_reward
from examples.tiny_model import make_tokenizer
from examples.two_turn import TwoTurnWorkflow
from megarl.config.aliases import aliased
from megarl.config.dataset import DatasetConfig
from megarl.config.loader import load_config
from megarl.config.recipes import RECIPES, GRPOConfig
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig, ServerConfig
from megarl.config.schema import Key, all_keys, key_table
from megarl.data.dataset import build_dataset
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.rewards import RewardPool, get_reward_fn
from megarl.rollout.server_process import server_command
from megarl.rollout.trajectory import Trajectory
from megarl.weight_sync.receiver import RECEIVER
from tests.sglang import servers as sglang
from tests.unit.rollout_fakes import FakeServer

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "AGENTS.md"]
# what stands in the sources where the figure "group/name" is made
FIGURES = {
    "timing": 'record_timing("{phase}")',
    "rollout": '"{name}"',
    "weight_sync": '"{phase}"',
    "eval": '"{name}"',
    "reward": '"reward/{name}"',
    "response_len": '"response_len/{name}"',
    "staleness": '"staleness/{name}"',
    "train_rollout_logprob_abs_diff": '"train_rollout_logprob_abs_diff/{name}"',
    "tokens": '"tokens/{name}"',
    "forks": '"forks/{name}"',
    "perf": '"perf/{name}"',
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [body for lang, body in FENCE.findall(page.read_text()) if lang == language]


def spans(page: Path) -> list[str]:
    """`code` outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text()))


def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# configuration


def test_reference_has_every_key_of_every_recipe() -> None:
    page = (ROOT / "docs" / "keys.md").read_text()
    for name, cls in RECIPES.items():
        for key in all_keys(cls):
            assert f"### {key.name}\n" in page or f"| `{key.name}` |" in page, (name, key.name)
    line = next(x for x in page.splitlines() if x.startswith("| `actor.kl_estimator`"))
    words = ", ".join(f"`{k}`" for k in ("k1", "k2", "k3", "k1+", "k3+", "k3-weighted"))
    meaning = "KL estimator of the loss; k1+ and k3+ report k1 or k3, and differentiate k2"
    assert line == f"| `actor.kl_estimator` | str | `k3` | {meaning}<br>One of {words} |"
    assert "| `eval_gconfig.greedy` | bool | `true` |" in page
    assert "| `rollout.max_concurrent_rollouts` | int &#124; None | `null` |" in page


def test_what_is_generated_is_committed() -> None:
    """The pages can be read without the site, on which no hook runs."""
    readme, names = (ROOT / "README.md").read_text(), (ROOT / "docs" / "api.md").read_text()
    assert hooks().with_step(readme) == readme
    assert hooks().with_names(names) == names
    assert (ROOT / "docs" / "keys.md").read_text() == hooks().KEYS + hooks().reference() + "\n"
    assert "self.actor.ppo_update(batch)" in readme


@pytest.mark.parametrize("page", TEXTS, ids=lambda p: p.name)
def test_yaml_blocks_load(page: Path, tmp_path: Path) -> None:
    for text in blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(text), dict), text
        path = tmp_path / "x.yaml"
        path.write_text(text)
        load_config(path)


@pytest.mark.parametrize("page", TEXTS, ids=lambda p: p.name)
def test_commands_are_accepted(page: Path) -> None:
    """Targets, scripts, configurations and overrides of every command line exist."""
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands(page):
        for target in re.findall(r"\bmake ([a-z0-9-]+)", command):
            assert target in targets, command
        words = command.split()
        for script in [w for w in words if w.startswith(("examples/", "megarl/", "benchmarks/"))]:
            assert (ROOT / script).is_file(), command
        if "--config" in words:
            config = words[words.index("--config") + 1]
            after = words[words.index("--config") :]  # variables stand in front of the command
            overrides = [w for w in after if re.match(r"\+?[\w.]+=", w)]
            placeholder = config == "X.yaml"
            load_config(*([None] if placeholder else [ROOT / config, overrides]))


def commands(page: Path) -> Iterator[str]:
    """Lines of bash blocks, joined at backslashes and without comments; `make x` in the text."""
    for block in blocks(page, "bash"):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if command := line.partition("#")[0].strip():
                yield command
    yield from [s for s in spans(page) if s.startswith("make ")]


def test_sglangs_command_for_a_cpu_is_the_tests() -> None:
    """docs/servers.md starts SGLang with the environment and the flags of tests/sglang."""
    launched, alone = [
        shlex.split(c.replace("\\\n", " "))
        for c in blocks(ROOT / "docs" / "servers.md", "bash")
        if "SGLANG_USE_CPU_ENGINE" in c
    ]
    for words in (launched, alone):
        env = dict(w.split("=", 1) for w in itertools.takewhile(lambda w: "=" in w, words))
        assert (ROOT / env.pop("PYTHONPATH", "")).samefile(RECEIVER if words is alone else ROOT)
        assert {k: v for k, v in env.items() if not k.startswith("MEGARL_")} == sglang.ENV
    cfg = load_config(None, [w for w in launched if w.startswith("server.")])
    assert isinstance(cfg, GRPOConfig)
    tested = ServerConfig(type="sglang", python="", options=sglang.OPTIONS, **sglang.SIZES)
    assert dataclasses.replace(cfg.server, python="") == tested
    command = server_command(
        dataclasses.replace(tested, python=".venv-sglang/bin/python"),
        model_path="MODEL", dtype="float32", host="127.0.0.1", port=30000,
    )  # fmt: skip
    assert alone[alone.index(".venv-sglang/bin/python") :] == command


def test_key_and_value_in_code_spans_are_accepted() -> None:
    """`section.key=value`, `section.key: value` and `section.key` in the text."""
    names: dict[str, Key] = {k: v for cls in RECIPES.values() for k, v in key_table(cls).items()}
    sections = {part for name in names for part in name.split(".")[:-1]}
    seen = 0
    for page in TEXTS:
        for text in spans(page):
            match = re.fullmatch(r"(\w+(?:\.\w+)+)(?:=(\S+))?", text)
            if not match or match[1].partition(".")[0] not in sections:
                continue
            name, value = match.groups()
            if (ROOT / name).exists() or name.endswith(
                (".md", ".py", ".jsonl", ".yaml", ".pt", ".json")
            ):
                continue
            free = [k for k, key in names.items() if key.free_form and name.startswith(k + ".")]
            inner = any(full.endswith("." + name) for full in names)  # of some section
            assert name in names or inner or free or callable_of(name), f"{page.name}: `{text}`"
            if value is not None and name in names:
                recipe = next(r for r, cls in RECIPES.items() if name in key_table(cls))
                load_config(None, [f"recipe={recipe}", text])
            seen += 1
    assert seen > 30


def callable_of(name: str) -> bool:
    """`actor.ppo_update` and the like: verbs of the scripts' objects, not keys."""
    return name in ("actor.ppo_update", "model.generate", "saver.maybe_save")


def test_paths_in_the_text_exist() -> None:
    for page in TEXTS:
        for text in spans(page):
            if re.fullmatch(r"(megarl|examples|configs|tests|benchmarks|docs)/[\w./-]+", text):
                assert (ROOT / text).exists(), f"{page.name}: {text}"


# figures


def test_figures_in_the_text_are_logged() -> None:
    sources = "\n".join(p.read_text() for p in (ROOT / "megarl").rglob("*.py"))
    seen = 0
    for page in PAGES:
        for text in spans(page):
            group, slash, name = text.partition("/")
            if not re.fullmatch(r"[\w/]+", text) or not slash or group not in FIGURES:
                continue
            shape = FIGURES[group].format(name=name, phase=name.removesuffix("_s"))
            assert shape in sources, f"{page.name}: {text}"
            seen += 1
    assert seen > 20


# examples


def test_example_reward() -> None:
    reward = get_reward_fn("examples.close_reward:close_reward")
    row = {"answer": "125", "task": "sum", "row_id": 0}
    assert reward("57+68=", "125", [], [], **row) == 1.0
    assert reward("57+68=", "100", [], [], **row) == 0.8
    assert reward("57+68=", "who knows", [], [], **row) == 0.0

    with RewardPool(1, timeout=30.0) as pool:  # as in a run: in a process of its own
        score = asyncio.run(pool.score(reward, ("57+68=", "100", [], []), row, row_id=0))
    assert score == 0.8
    assert reward is close_reward
    assert reward("", "9" * 4000, [], [], answer="0") == 0.0


def test_example_workflow(tokenizer: Any) -> None:
    """The server writes tokens 100, 101, ... by position; the tool objects to all but one."""
    server = FakeServer()
    gconfig = GenerationHyperparameters(n_samples=2, max_new_tokens=3)
    messages = [{"role": "user", "content": "1+1"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    row = {"row_id": 0, "messages": messages, "prompt": prompt, "prompt_ids": ids, "answer": "2"}
    engine = RemoteSGLangEngine(RolloutConfig(addresses=[server.address]))
    try:
        engine.initialize()
        engine.set_version(5)
        server.versions = ["4", "5"]  # of the first and of the second answers
        with RewardPool(1, timeout=30.0) as pool:
            flow = TwoTurnWorkflow(close_reward, gconfig, tokenizer, reward_pool=pool)
            batch = engine.rollout_batch([row], workflow=flow).padded()
    finally:
        engine.destroy()
        server.close()
    first, second = server.requests
    between = tokenizer("\n<bos>user: a number\n<bos>assistant: ", add_special_tokens=False)
    n, m = len(ids), len(between["input_ids"])
    # the second request continues the first answer's own tokens, then what is new
    answer = [100 + n + i for i in range(3)]
    assert first["input_ids"] == [ids, ids]
    assert second["input_ids"] == [ids + answer + between["input_ids"]] * 2
    width = n + 3 + m + 3
    assert batch["input_ids"].shape == (2, width) and batch["attention_mask"].all()
    written = [*range(n, n + 3), *range(n + 3 + m, width)]
    for name, empty in (("loss_mask", False), ("logprobs", 0.0), ("versions", -1)):
        for t in range(width):
            assert (batch[name][0, t].item() != empty) == (t in written), (name, t)
    assert batch["versions"][0, written].tolist() == [4, 4, 4, 5, 5, 5]
    expected = [-float(100 + t) for t in written]  # the fake's logprob of token 100 + t
    assert batch["logprobs"][1, written].tolist() == expected
    assert batch["rewards"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("ended", [True, False])
def test_example_workflow_ends_a_turn_once(ended: bool) -> None:
    """The model's own end-of-turn token is not written again; one that is missing is."""
    tok = make_tokenizer(1)
    with RewardPool(1, timeout=30.0) as pool:
        flow = TwoTurnWorkflow(close_reward, GenerationHyperparameters(), tok, reward_pool=pool)
    written = "<|user|>1+1<|assistant|>3" + ("<|end|>" if ended else "")
    question = {"role": "user", "content": "1+1"}
    sample = Trajectory(messages=[question])
    sample.read(tok(written, add_special_tokens=False)["input_ids"])
    flow.tell(sample, "less")
    assert [m["role"] for m in sample.messages] == ["user", "assistant", "user"]
    whole = "<|user|>1+1<|assistant|>3<|end|><|user|>less<|assistant|>"
    assert tok.decode(sample.tokens) == whole


def test_config_names_workflow_and_reward(tokenizer: Any) -> None:
    from megarl.trainer.session import RolloutSession

    cfg = load_config(
        None,
        [
            "rollout.workflow=examples.two_turn:TwoTurnWorkflow",
            "rollout.addresses=[127.0.0.1:1]",
            "train_dataset.reward=examples.close_reward:close_reward",
            "gconfig.n_samples=2",
        ],
    )
    assert isinstance(cfg, GRPOConfig)
    session = RolloutSession(cfg, tokenizer)
    try:
        assert session.driver is not None
        assert type(session.driver.workflow) is TwoTurnWorkflow
        assert session.driver.workflow.reward_fn is close_reward
    finally:
        session.close()
    cfg.rollout.workflow.type = "examples.two_turn:ThreeTurnWorkflow"
    with pytest.raises(ValueError, match=r"^rollout\.workflow 'examples\.two_turn:ThreeTurn"):
        RolloutSession(cfg, tokenizer)


def test_example_rows(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [b for b in blocks(ROOT / "docs" / "data.md", "python") if "def capitals" in b]
    (tmp_path / "capitals.py").write_text(code)
    monkeypatch.setattr(sys, "path", [*sys.path])
    kind = f"{tmp_path / 'capitals.py'}:capitals"
    rows = {
        split: build_dataset(
            DatasetConfig(type=kind, split=split, options={"polite": True}),
            tokenizer,
            purpose="rl",
            seed=1,
        )
        for split in ("train", "test")
    }
    prompts = [row["prompt"] for rows_ in rows.values() for row in rows_]
    assert len(set(prompts)) == 4 and "Peru, please?" in "".join(prompts)
    wrong = DatasetConfig(type=kind, options={"polite": "very"})
    with pytest.raises(ValueError, match=r"options\.polite='very': not of type bool"):
        build_dataset(wrong, tokenizer, purpose="rl", seed=1)


def test_own_conversations_as_jsonl(tokenizer: Any, tmp_path: Path) -> None:
    line = next(iter(blocks(ROOT / "docs" / "data.md", "json")))
    (tmp_path / "train.jsonl").write_text(json.dumps(json.loads(line)) + "\n")
    cfg = DatasetConfig(type="chat", path=str(tmp_path / "train.jsonl"))
    (row,) = build_dataset(cfg, tokenizer, purpose="rl", seed=1)
    assert row["answer"] == "Lima"
    assert row["messages"][-1]["content"] == "What is the capital of Peru?"


def test_python_blocks_compile_and_their_imports_exist() -> None:
    for page in TEXTS:
        for code in blocks(page, "python"):
            if re.search(r"^(async def|response = await)", code, re.M):
                continue
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megarl"):
                    exec(ast.unparse(node), {})


def test_a_block_that_names_a_file_is_in_it() -> None:
    """`<!-- path -->` above a block: the page shows a part of that file, indented or not."""
    blocks = [
        (page.name, file, text)
        for page in (ROOT / "docs").glob("*.md")
        for file, text in re.findall(
            r"<!-- ([\w./-]+) -->\n```\w*\n(.*?)```", page.read_text(), flags=re.DOTALL
        )
    ]
    assert {"train.jsonl", "reward.py", "grpo.yaml"} <= {Path(file).name for _, file, _ in blocks}
    for page, file, text in blocks:
        source = (ROOT / file).read_text()
        assert any(indent(text, n * " ") in source for n in (0, 4)), f"{page}: not in {file}"


def test_keys_of_trl_are_answered_with_ours() -> None:
    text = (ROOT / "docs" / "from_trl.md").read_text().split("## Keys")[1]
    rows = re.findall(r"^\| `(\w+)` \| `([\w.=]+)` \|$", text, flags=re.MULTILINE)
    assert len(rows) > 15
    for theirs, ours in rows:
        assert aliased(key_table(RECIPES["grpo"]), theirs) == ours
