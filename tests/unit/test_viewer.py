"""The page of `megarl view`: what was recorded is there, and what a model wrote cannot leave its
place."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.tiny_model import make_tokenizer
from megarl.cli.view import main
from megarl.config.errors import ConfigError
from megarl.observability.episodes import FOLDER, RECORDS, read_bytes, read_index
from megarl.observability.viewer import write_viewer
from megarl.trainer.episode_recorder import EpisodeRecorder, computed_part, computed_tokens
from tests.unit.test_episodes import EVIL, episode, record_batch, records, trained_batch


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(1)


class Scripts(HTMLParser):
    """Collects the script elements of a page by id, and every other element's tag and links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: dict[str, str] = {}
        self.run: list[str] = []  # scripts that a browser would run
        self.tags: set[str] = set()
        self.links: list[str] = []
        self._id: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        named = dict(attrs)
        self.links += [v for k, v in attrs if k in ("src", "href")]
        if tag == "script":
            self._id = named.get("id")
            if "type" not in named:
                self.run.append(str(self._id))
            self.scripts[str(self._id)] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._id = None

    def handle_data(self, data: str) -> None:
        if self._id is not None:
            self.scripts[self._id] += data


def page_of(run: Path, **named: Any) -> Scripts:
    out = run / "page.html"
    assert write_viewer(run, out, **named) is not None
    return Scripts(out.read_text(encoding="utf-8"))


def data_of(page: Scripts) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(page.scripts["about"])
    return found


def details(page: Scripts) -> list[str]:
    return [name for name in page.scripts if name.startswith("group-")]


def test_the_page_has_the_records_and_runs_only_its_own_script(
    tmp_path: Path, tokenizer: Any
) -> None:
    run = tmp_path / "<b>e&" / "t"
    record_batch(run, tokenizer, [episode(0, tokenizer, "lft"), episode(1, tokenizer, "lll")])
    page = page_of(run)
    assert set(page.tags) <= {
        "html", "head", "meta", "title", "style", "body", "main", "noscript", "div", "script"
    }  # fmt: skip
    assert page.run == ["None"] and page.links == []
    text = (run / "page.html").read_text()
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "url(" not in text
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; ") and "script-src 'sha256-" in policy
    about = data_of(page)
    assert about["run"] == "<b>e&/t" and [g["details"] for g in about["groups"]] == [True, True]
    assert about["groups"][0]["prompt"] == f"12+34 {EVIL}"
    assert about["steps"][0]["failures"] == {"tool": 1} and about["steps"][0]["forks"] == 1
    for at in read_index(run):
        assert base64.b64decode(page.scripts[f"group-5.{at['episode']}"]) == read_bytes(run, at)


def test_a_page_holds_what_fits_and_lists_all(tmp_path: Path, tokenizer: Any) -> None:
    recorder = EpisodeRecorder(tmp_path, tokenizer, None)
    for step in range(3):
        for k, kinds in enumerate(("ll", "lll", "lt")):
            recorder.ended(episode(3 * step + k, tokenizer, kinds))
        recorder.handed_out(step)
    recorder.close()
    sizes = {at["episode"]: -(-at["size"] // 3) * 4 for at in read_index(tmp_path)}
    page = page_of(tmp_path, max_bytes=sum(sizes[n] for n in (6, 7, 8, 3)))
    assert details(page) == ["group-3.6", "group-3.7", "group-3.8", "group-2.3"]
    assert len(data_of(page)["groups"]) == 9 and len(data_of(page)["steps"]) == 3
    one = page_of(tmp_path, steps=(1, 2), groups=2)
    assert details(one) == ["group-2.5", "group-2.4", "group-1.2", "group-1.1"]
    assert {g["step"] for g in data_of(one)["groups"]} == {1, 2}
    (tmp_path / FOLDER / RECORDS).write_bytes(b"")
    assert details(page_of(tmp_path)) == []  # the lists are still there


def test_the_command_names_what_is_wrong(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, why in (
        ([str(tmp_path)], "no episodes; no step has begun"),
        ([], "required: RUN"),
        ([str(tmp_path), "--steps", "3-1"], "--steps: 3-1: give the first and the last step"),
        ([str(tmp_path), "--groups", "0"], "--groups: 0: use a whole number of at least 1"),
    ):
        with pytest.raises(ConfigError, match=why):
            main(words)
    record_batch(tmp_path, tokenizer, [episode(0, tokenizer, "l")])
    out = tmp_path / "there" / "x.html"
    assert main([str(tmp_path), "--out", str(out), "--steps", "5"]) == 0
    assert out.is_file() and "1 groups of 1 steps, 1 with details" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no episodes of steps 7"):
        main([str(tmp_path), "--steps", "7"])


def test_a_rollout_that_leaves_the_batch_is_said_to(tmp_path: Path, tokenizer: Any) -> None:
    """A reward model gives other rewards, and none to one rollout, whose rows leave."""
    made = [episode(0, tokenizer, "ll"), episode(1, tokenizer, "lfl")]
    recorder = EpisodeRecorder(tmp_path, tokenizer, None)
    for one in made:
        recorder.ended(one)
    recorder.handed_out(0)
    batch = trained_batch(made)
    out = batch["rollout_ids"] == 3  # the fork
    batch["rewards"] = torch.arange(6.0)
    recorder.dropped(out, "reward")
    batch = batch.keep(~out)
    recorder.computed(
        computed_tokens(*computed_part(batch, None)), batch["rewards"], torch.arange(4) == 3
    )
    recorder.close()
    _, group = records(tmp_path)
    rows = group.about["rows"]
    assert [row["reward"] for row in rows if row.get("trained")] == [2.0, 5.0]
    assert [row.get("skipped") for row in rows] == [False, None, None, True]
    assert [row.get("failure") for row in rows] == [None, "reward", "reward", None]
    groups = data_of(page_of(tmp_path))["groups"]
    assert [g["rewards"] for g in groups] == [[0.0, 1.0], [2.0, 5.0]]
    assert [g["failures"] for g in groups] == [{}, {"reward": 1}]
