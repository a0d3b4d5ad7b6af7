"""The run's chat template: named in the configuration, checked before the start, saved with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megarl.api import chat_template
from megarl.ckpt.hf import write_sidecars
from megarl.config.check import check_config
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.recipes import BaseConfig
from megarl.data.tokenizer import PlainTokenizer, Template, run_tokenizer, tokenizer_to_save
from megarl.trainer.preflight import check_data
from tests.tiny import save_tiny
from tests.tiny_tokenizer import save_tokenizer

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has no chat template, as base models' have none."""
    path = tmp_path_factory.mktemp("model")
    save_tiny(path, "qwen3", layers=1)
    tokenizer = save_tokenizer(path)
    (path / "chat_template.jinja").unlink()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def template(tmp_path: Path) -> Path:
    file = tmp_path / "own.jinja"
    file.write_text(TEMPLATE)
    return file


def recipe(model: Path, *overrides: str) -> BaseConfig:
    cfg = load_config(None, [f"actor.path={model}", "train_dataset.size=16", *overrides])
    return cfg


def sft(model: Path, rows: list[dict[str, Any]], template: Path) -> BaseConfig:
    file = template.with_name("rows.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"train_dataset.path={file}", "train_dataset.batch_size=1", "train_dataset.type=chat"]
    words += ["recipe=sft", f"model.path={model}", f"chat_template={template}"]
    return load_config(None, words)


def problem_of(cfg: BaseConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        check_data(cfg, renders=True)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("isolated", [False, True])
def test_a_tokenizer_without_a_template_is_refused_before_the_start(
    model: Path, template: Path, isolated: bool
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_data(recipe(model), renders=True, in_child=isolated)
    (problem,) = caught.value.problems
    assert problem.startswith("train_dataset: ") and "chat_template" in problem
    check_data(recipe(model, f"chat_template={template}"), renders=True, in_child=isolated)


def test_plain_files_are_judged_without_transformers(model: Path, template: Path) -> None:
    code = """
import sys
from megarl.config.loader import load_config
from megarl.trainer.preflight import check_data
check_data(load_config(None, sys.argv[1:]), renders=True)
assert not {"torch", "transformers"} & set(sys.modules)
"""
    words = [f"actor.path={model}", "train_dataset.size=16", f"chat_template={template}"]
    subprocess.run([sys.executable, "-c", code, *words], check=True)


def test_plain_files_give_the_tokens_of_transformers(tmp_path: Path) -> None:
    of_transformers, plain = save_tokenizer(tmp_path), PlainTokenizer(tmp_path)
    messages = [turn("user", "1 + 1?"), turn("assistant", "2"), turn("user", "and 3?")]
    for tools in (None, [{"name": "sum"}]):
        texts = [Template(t, {}).render(messages, tools=tools) for t in (plain, of_transformers)]
        tokens = [Template(t, {}).encode(texts[0]) for t in (plain, of_transformers)]
        assert texts[0] == texts[1] and tokens[0] == tokens[1] != []
    assert plain.eos_token_id == of_transformers.eos_token_id


ODD = {
    "refuses roles": "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}",
    "refuses nothing": "{% if not messages %}{{ raise_exception('no') }}{% endif %}{{ messages }}",
    "a date": "{{ strftime_now('%Y') if strftime_now is defined else 'long ago' }}",
    "JSON": "{{ tools | tojson }}{{ messages[0] | tojson(indent=2) }}<ä>{{ 'ä<>' | tojson }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{{ m.content }}{% endfor %}",
    "a namespace": "{% set n = namespace(k=0) %}{% for m in messages %}{% set n.k = n.k + 1 %}"
    "{% endfor %}{{ n.k }}",
    "blocks in lines": "  {% if tools %}\n  {{ tools | length }}\n  {% endif %}\nend",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}{{ sep_token }}",
    "a flag that is no token": "{{ add_bos_token }}",
    "an option": "{{ enable_thinking if enable_thinking is defined else 'as it likes' }}",
    "thoughts": "{% for m in messages %}{{ m.reasoning_content or m.reasoning }}{% endfor %}",
    "marks": "{% generation %}{{ messages[1].content }}{% endgeneration %}",
    "an unknown tag": "{% trans %}{{ messages }}{% endtrans %}",
    "an unknown function": "{{ fetch('x') }}",
    "a changed list": "{{ messages.append(1) }}",
    "a hidden attribute": "{{ messages.__class__.__mro__ }}",
    "a missing key": "{{ messages[0].parts[0] }}",
}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
@pytest.mark.parametrize("thoughts", [False, True])
def test_what_plain_files_render_is_what_transformers_renders(
    tmp_path: Path, text: str, thoughts: bool
) -> None:
    """Where they render nothing, a check asks transformers."""
    save_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"add_bos_token": True}))
    (tmp_path / "chat_template.jinja").write_text(text)
    messages = [turn("user", "1 + 1?"), turn("assistant", "2")]
    if thoughts:
        messages[1]["reasoning"] = "easy"
    tools = [{"type": "function", "function": {"name": "sum"}}]
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    whole = Template(run_tokenizer(recipe(tmp_path), str(tmp_path)), options)
    try:
        plain = Template(PlainTokenizer(tmp_path), options)
        rendered = plain.render(messages, tools)
    except Exception:
        if "generation %}" not in text and not thoughts:  # of which transformers makes more
            with pytest.raises(ValueError):
                whole.render(messages, tools)
        return
    assert rendered == whole.render(messages, tools)
    assert plain.encode(rendered) == whole.encode(rendered)


@pytest.mark.parametrize(
    "change",
    [{"tokenizer_class": "Qwen9Tokenizer"}, {"auto_map": {}}, {"eos_token": None}],
    ids=["another class", "code of its own", "no EOS"],
)
def test_other_files_are_left_to_transformers(tmp_path: Path, change: dict[str, Any]) -> None:
    save_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises((ValueError, KeyError)):
        PlainTokenizer(tmp_path)


def test_a_template_that_cannot_be_read_is_named(model: Path, tmp_path: Path) -> None:
    cfg = recipe(model, f"chat_template={tmp_path}/none.jinja")
    with pytest.raises(ConfigError) as caught:
        check_config(cfg, 1)
    key = f"chat_template={tmp_path}/none.jinja"
    assert any(p.startswith(key) for p in caught.value.problems)
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for m in messages %}")
    problem = problem_of(recipe(model, f"chat_template={broken}"))
    assert problem.startswith("train_dataset: ")


def test_the_template_is_saved_with_the_model(model: Path, template: Path, tmp_path: Path) -> None:
    assert tokenizer_to_save(recipe(model), str(model)) is None
    cfg = recipe(model, f"chat_template={template}")
    write_sidecars(tmp_path, model, tokenizer_to_save(cfg, str(model)))
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == TEMPLATE
    final = recipe(tmp_path)
    assert run_tokenizer(final, str(tmp_path)).chat_template == TEMPLATE


def test_tokenizer_path_is_saved_with_the_model(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    theirs = save_tokenizer(other)
    (other / "vocab.txt").write_text("of the other\n")
    cfg = recipe(model, f"tokenizer_path={other}")
    assert run_tokenizer(cfg, str(model)).chat_template == theirs.chat_template
    saved = tmp_path / "final"
    saved.mkdir()
    (model / "merges.txt").write_text("of the model\n")
    write_sidecars(saved, model, tokenizer_to_save(cfg, str(model)))
    (model / "merges.txt").unlink()
    assert AutoTokenizer.from_pretrained(saved).chat_template == theirs.chat_template
    assert not (saved / "merges.txt").exists()  # a part of the other tokenizer would be read, too


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ([turn("user", "hi")], "row 1"),
        ([turn("user", "hi"), turn("assistant", "")], "row 1"),
    ],
    ids=["no assistant", "no text"],
)
def test_a_row_with_nothing_to_learn_is_named(
    model: Path, template: Path, row: list[dict[str, str]], what: str
) -> None:
    good = {"messages": [turn("user", "a"), turn("assistant", "b")]}
    check_data(sft(model, [good], template), renders=True)
    problem = problem_of(sft(model, [good, {"messages": row}], template))
    assert problem.startswith("train_dataset: ") and what in problem


def test_an_answer_of_null_is_no_reward_of_zero(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"messages": "1 + 1", "answer": "2"}\n{"messages": "2 + 1", "answer": null}\n')
    words = ["type=chat", f"path={file}", "batch_size=1", "reward=exact"]
    cfg = recipe(model, *(f"train_dataset.{word}" for word in words), "train_dataset.size=null")
    with pytest.raises(ConfigError) as caught:
        check_data(cfg)
    (problem,) = caught.value.problems
    assert problem.startswith("train_dataset: row 1: ") and "answer" in problem


def test_rows_of_a_weighted_reward_are_read_before_the_start(model: Path) -> None:
    parts = "{right: {type: arithmetic, weight: 2}, text: exact}"
    words = ["reward.type=weighted", f"reward.options={{parts: {parts}}}"]
    check_data(recipe(model, *(f"train_dataset.{word}" for word in words)))


def test_the_template_is_read_where_megarl_is_not(tmp_path: Path) -> None:
    """Workers of environments load the file in an interpreter of their own."""
    save_tokenizer(tmp_path)
    code = """
import importlib.util, sys
sys.modules["megarl"] = None
spec = importlib.util.spec_from_file_location("shared", sys.argv[1])
shared = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shared)
from transformers import AutoTokenizer
template = shared.ChatTemplate(AutoTokenizer.from_pretrained(sys.argv[2]), {})
chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "any"}]
ids = template.after(chat, chat[:1], last_token=None)
whole = template.render([*chat, chat[0]])
assert whole.endswith("any" + template.tokenizer.decode(ids))
assert template.after(chat, chat[:1], last_token=ids[0]) == ids[1:]
"""
    command = [sys.executable, "-c", code, chat_template.__file__, str(tmp_path)]
    subprocess.run(command, check=True)
