"""Episodes on disk: what was trained, nothing lost by a kill, nothing twice after a resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from examples.tiny_model import make_tokenizer
from megarl.api.batch import Batch, Padded, Tokens
from megarl.api.records import ModelResponse
from megarl.observability.episodes import (
    FOLDER,
    INDEX,
    RECORDS,
    Record,
    append_record,
    pack,
    read_bytes,
    read_index,
    unpack,
)
from megarl.observability.run_log import RunLog
from megarl.rollout.episode import batch_parts, without_failed
from megarl.rollout.episodes import Episode
from megarl.rollout.rewards.results import Scored
from megarl.rollout.trajectory import Trajectory, to_batch
from megarl.trainer.episode_recorder import (
    EpisodeRecorder,
    TokenPieces,
    computed_part,
    computed_tokens,
)
from tests.full_disk import files_below
from tests.unit.rollout_fakes import Scripted

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def steps(run: Path) -> list[tuple[int, int]]:
    return [(at["step"], at["episode"]) for at in read_index(run)]


def records(run: Path) -> list[Record]:
    return [unpack(read_bytes(run, at)) for at in read_index(run)]


# the stream


def test_a_record_comes_back_as_it_was() -> None:
    arrays = {
        "ids": np.array([0, 1, -70_000, 2**31 - 1], "<i4"),
        "mask": np.array([], "|u1"),
        "logprobs": np.array([-0.1, 0.0, -3e-38], "<f4"),
    }
    about = {"text": "naïve\n\u2028" + EVIL, "none": None}
    found = unpack(pack(about, arrays))
    assert found.about == about and list(found.arrays) == list(arrays)
    for name, array in arrays.items():
        assert found.arrays[name].dtype == array.dtype
        assert found.arrays[name].tobytes() == array.tobytes()
    for damaged in (b"", pack(about, arrays)[:-9], zlib.compress(b"{}\n"), zlib.compress(b"[")):
        with pytest.raises(ValueError):
            unpack(damaged)


def test_what_a_killed_writer_leaves_is_read_and_continued(tmp_path: Path) -> None:
    """The process is killed while it writes; every line that is there names a whole record."""
    code = (
        "import sys, numpy as np; from pathlib import Path;"
        "from megarl.observability.episodes import append_record, pack\n"
        "for i in range(10**9):\n"
        " data = pack({'i': i}, {'x': np.random.default_rng(i).random(5000)})\n"
        " append_record(Path(sys.argv[1]), 1 + i // 10, {'episode': i}, data)\n"
        " print(i, flush=True)"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    for said in writer.stdout:
        if int(said) >= 25:
            os.kill(writer.pid, signal.SIGKILL)
            break
    writer.stdout.close()
    writer.wait(60)
    before = read_index(tmp_path)
    assert len(before) >= 26
    assert [unpack(read_bytes(tmp_path, at)).about["i"] for at in before] == list(
        range(len(before))
    )
    with (tmp_path / FOLDER / INDEX).open("ab") as index:  # and cut in mid-record
        index.write(b'{"step":9,"epi\xc3')
    assert read_index(tmp_path) == before
    RunLog(tmp_path / FOLDER / INDEX).begin(2)  # steps 3 and later are made again
    append_record(tmp_path, 3, {"episode": 20}, pack({"i": "again"}, {}))
    assert steps(tmp_path) == [(1 + i // 10, i) for i in range(20)] + [(3, 20)]
    assert unpack(read_bytes(tmp_path, read_index(tmp_path)[-1])).about == {"i": "again"}


def test_a_later_line_supersedes(tmp_path: Path) -> None:
    for step, number in ((2, 1), (1, 0), (1, 1), (1, 0)):
        append_record(tmp_path, step, {"episode": number}, pack({"n": 3}, {"x": np.arange(20.0)}))
    assert steps(tmp_path) == [(1, 0), (1, 1), (2, 1)]
    (tmp_path / FOLDER / RECORDS).write_bytes(b"short")
    with pytest.raises(ValueError, match="ends before byte"):
        read_bytes(tmp_path, read_index(tmp_path)[2])


# records


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(1)


def rollout(index: int, tokenizer: Any, *, kind: str = "line", version: int = 4) -> Trajectory:
    """A prompt, an answer that ends with EVIL, what a tool said, another answer."""

    def wrote(text: str, after: Any = None) -> None:
        ids = tokenizer.encode(text)
        made.wrote(
            ModelResponse(
                input_tokens=(after or made.head).path_tokens(),
                output_tokens=ids,
                output_logprobs=[-(k + 1) / 8 for k in range(len(ids))],
                output_versions=[version - 1] + [version] * (len(ids) - 1),
                stop_reason="stop",
            ),
            after=after,
        )

    made = Trajectory(index=index)
    asked = made.read(tokenizer.encode("<|user|>12+34<|assistant|>"))
    wrote(f"{index}{EVIL}")
    if kind == "tool":
        made.fail("tool")
        return made
    made.read(tokenizer.encode("told"))
    wrote("46")
    if kind == "fork":
        wrote(f"{index}again", after=asked)
    made.score(Scored(0.5 + index, {"right": 0.5, "bonus": float(index)}))
    return made


def episode(number: int, tokenizer: Any, kinds: str, **more: Any) -> Episode:
    names = {"l": "line", "f": "fork", "t": "tool"}
    made = to_batch([rollout(i, tokenizer, kind=names[k]) for i, k in enumerate(kinds)])
    batch, failed = without_failed(made)
    out = Episode(number=number, row={}, workflow=Scripted(), batch=batch, failed=failed, **more)
    out.row = {"row_id": number, "prompt": f"12+34 {EVIL}", "answer": EVIL, "prompt_ids": [1]}
    if failed:
        out.lost = [{k: v[~made["valid"]] for k, v in made.items()}]
    return out


def trained_batch(episodes: list[Episode]) -> Batch:
    """The episodes as the trainer has them after its pass over them."""
    batch = Batch.from_local(batch_parts(episodes, group_ids=range(len(episodes))))
    logprobs = batch["logprobs"]
    batch["prox_logp"] = Tokens(logprobs.values + 0.25, logprobs.lengths)
    return batch


def record_batch(run: Path, tokenizer: Any, episodes: list[Episode], **named: Any) -> Batch:
    recorder = EpisodeRecorder(run, tokenizer, named.get("keep"))
    for one in episodes:
        recorder.ended(one)
    recorder.handed_out(4)
    batch = trained_batch([e for e in episodes if e.batch is not None])
    recorder.computed(
        computed_tokens(*computed_part(batch, named.get("keep"))), batch["rewards"], None
    )
    recorder.close()
    return batch


def rows_of(record: Record) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What is said of each row of a group, and its arrays."""
    ends = np.cumsum([row["length"] for row in record.about["rows"]])
    parts = {name: np.split(array, ends[:-1]) for name, array in record.arrays.items()}
    return [
        (row, {name: part[i] for name, part in parts.items()})
        for i, row in enumerate(record.about["rows"])
    ]


def test_a_record_is_the_trained_batch_and_what_failed(tmp_path: Path, tokenizer: Any) -> None:
    batch = record_batch(
        tmp_path, tokenizer, [episode(8, tokenizer, "lfl"), episode(3, tokenizer, "ltl")]
    )
    first, second = records(tmp_path)
    assert [r.about["episode"] for r in (first, second)] == [3, 8]
    found = [(row, part) for r in (first, second) for row, part in rows_of(r)]
    good = [(row, part) for row, part in found if "failure" not in row]
    assert len(good) == len(batch) == 6
    padded = batch.padded()
    for k, (row, part) in enumerate(good):
        n = int(batch.lengths[k])
        fields = {"ids": "input_ids", "mask": "loss_mask", "logprobs": "logprobs"}
        for name, field in (fields | {"versions": "versions"}).items():
            assert part[name].tolist() == padded[field][k, :n].tolist()
        assert row["reward"] == batch["rewards"][k].item()
        assert row["parts"] == {"right": 0.5, "bonus": row["reward"] - 0.5}
    (lost,) = [(row, part) for row, part in found if "failure" in row]
    assert lost[0]["failure"] == "tool" and not lost[1]["mask"].any()
    assert EVIL in tokenizer.decode(lost[1]["ids"])
    assert second.about["failed"] == [] and first.about["failed"] == [["tool", lost[0]["length"]]]
    prompt = len(tokenizer.encode("<|user|>12+34<|assistant|>"))
    forks = [row.get("fork") for row, _ in rows_of(second)]
    assert forks == [None, None, [1, prompt], None]
    for row, part in found:
        assert row.get("trained", False) == ("failure" not in row)
        of_trainer = part["logprobs"] + np.float32(0.25) if "trained" in row else 0
        assert np.array_equal(part["prox_logp"], of_trainer * np.ones_like(part["logprobs"]))


def test_the_first_groups_are_kept_and_those_that_only_failed(
    tmp_path: Path, tokenizer: Any
) -> None:
    made = [episode(n, tokenizer, kinds) for n, kinds in enumerate(("ll", "tt", "ll", "tt", "lf"))]
    assert made[1].batch is None
    record_batch(tmp_path, tokenizer, made, keep=1)
    index = read_index(tmp_path)
    assert [(at["episode"], at["accepted"]) for at in index] == [(0, True), (1, False)]
    assert index[1]["failures"] == {"tool": 2} and index[1]["rewards"] == []
    assert {at["step"] for at in index} == {5}  # after four updates


def test_samples_that_failed_may_hold_anything(tmp_path: Path, tokenizer: Any) -> None:
    made = episode(0, tokenizer, "l")
    ids = torch.tensor([[5, 7, 0]])
    garbage: Padded = {"input_ids": ids, "attention_mask": ids > 0}
    garbage |= {"logprobs": torch.full((1, 3), torch.nan), "versions": torch.zeros(1, 2)}
    made.failed, made.lost = [("other", 2), ("timeout", 0)], [garbage]
    recorder = EpisodeRecorder(tmp_path, tokenizer, None)
    recorder.ended(made)
    recorder.handed_out(0)
    recorder.close()
    (record,) = records(tmp_path)
    row, part = rows_of(record)[-1]
    assert (row["failure"], part["ids"].tolist()) == ("other", [5, 7])
    assert part["logprobs"].tolist() == part["versions"].tolist() == [0, 0]
    assert read_index(tmp_path)[0]["failures"] == {"other": 1, "timeout": 1}


def test_a_full_disk_costs_the_record_and_not_the_run(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = EpisodeRecorder(tmp_path, tokenizer, None)
    with files_below(6000):
        for version in range(12):
            recorder.ended(episode(version, tokenizer, "lll"))
            recorder.handed_out(version)
        recorder.close()
    assert "not recorded: episodes of step 12: OSError" in capsys.readouterr().err
    whole = [unpack(read_bytes(tmp_path, at)).about["step"] for at in read_index(tmp_path)]
    assert whole[:2] == [1, 2] and len(whole) < 12


def test_pieces_side_by_side_are_the_text(tokenizer: Any) -> None:
    pieces = TokenPieces(tokenizer)
    text = "12+ naïve 🙂\n" + EVIL
    ids = tokenizer.encode(text) + [tokenizer.eos_token_id]
    spelled = pieces.of(set(ids))
    assert any(isinstance(p, list) for p in spelled.values())  # bytes of the smile
    whole = b"".join(p.encode() if isinstance(p, str) else bytes(p) for p in map(spelled.get, ids))
    assert whole.decode() == text + "<|end|>"
    assert pieces.special(ids) == [tokenizer.eos_token_id]
    assert pieces.of([10**9, -1]) == {10**9: "<|1000000000|>", -1: "<|-1|>"}

    class SentencePiece:
        names: ClassVar = {0: "\u2581the", 1: "<0xC3>", 2: "<0xAF>", 3: "n"}

        def convert_ids_to_tokens(self, i: int) -> str:
            return self.names[i]

        def decode(self, ids: list[int], **named: Any) -> str:
            return {0: "the", 1: "\ufffd", 2: "\ufffd", 3: "n"}[ids[0]]

    assert TokenPieces(SentencePiece()).of(range(4)) == {0: " the", 1: [0xC3], 2: [0xAF], 3: "n"}


def test_what_failed_before_a_batch_was_there_can_be_seen(tmp_path: Path, tokenizer: Any) -> None:
    """An agent that always fails ends the run before its first step, or between two."""
    recorder = EpisodeRecorder(tmp_path, tokenizer, None)
    recorder.ended(episode(0, tokenizer, "tt"))
    recorder.close()
    (line,) = read_index(tmp_path)
    assert (line["step"], line["accepted"], line["failures"]) == (1, False, {"tool": 2})
    recorder = EpisodeRecorder(tmp_path / "later", tokenizer, None)
    recorder.ended(episode(0, tokenizer, "ll"))
    recorder.handed_out(0)
    recorder.ended(episode(1, tokenizer, "ll"))  # accepted, and not yet handed out
    recorder.ended(episode(2, tokenizer, "t"))
    recorder.close()
    assert steps(tmp_path / "later") == [(1, 0), (2, 2)]
