"""Keeps the files that a run appends to while it trains.

A RunLog has a JSON object on each line, of one step of the run. A start that goes on from a step
moves lines of later steps aside, so that what stands in the file counts, for everybody who reads
it. A DiskThread writes beside training, which never waits for it.

<run>/record/fingerprints.jsonl has a line for each phase of a step: {"step", "phase", "tensors":
{name: fingerprint}}. The line {"step": k, "start": {...}} says where and with what a start goes on
from step k. A hash is of bits, so that equal hashes mean equal tensors; norm and sum only tell
people how far apart two tensors are. Beyond DETAIL_BYTES the tensors of weights are no longer
listed one by one: a line then has one hash for all of them, under the name "*". The rest of a step
takes a few kB.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any, BinaryIO

from megarl.config.errors import ConfigError
from megarl.config.run import RECORD_DIR
from megarl.observability.logging import get_logger
from megarl.utils.files import Digest, Fingerprint, write_whole

log = get_logger(__name__)

Line = dict[str, Any]
PATIENCE = 30.0  # seconds that the end of a run waits for the disk
# one object per evaluation: {"step", "rewards": {prompt: the rewards of its samples}}, and the
# "dataset" where it is one of valid_datasets
EVAL_REWARDS_FILE = "eval_rewards.jsonl"
FINGERPRINTS_FILE = f"{RECORD_DIR}/fingerprints.jsonl"
# the run logs of a run directory
LOGS = (
    "stats.jsonl",
    "samples.jsonl",
    EVAL_REWARDS_FILE,
    FINGERPRINTS_FILE,
    "episodes/index.jsonl",
)
_BEGINNINGS = ("", "{", '{"')  # of lines that may be ours, but cut short


class RunLog:
    """Reads and appends to the lines at `path`. One process writes; a killed one leaves behind at
    worst one line that is cut short."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, after: int) -> None:
        """Goes on from step `after`, from nothing where it is negative: moves lines of later steps,
        and lines that are cut short, to the end of NAME.superseded.jsonl beside it."""
        if not self.path.is_file():
            return
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        stay = [_stays(line, after) for line in lines]
        if not all(stay):
            moved = (f"{line}\n" for line, stays in zip(lines, stay, strict=True) if not stays)
            with self.path.with_suffix(".superseded.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(moved)
            write_whole(self.path, "".join(f"{line}\n" for line in compress(lines, stay)))

    def append(self, step: int, line: Mapping[str, Any]) -> None:
        """Appends a line of a step. Raises OSError where there is no room, and leaves no half."""
        append_line(self.path, {"step": step} | dict(line) | {"step": step})

    def read(self) -> list[Line]:
        """Returns all whole lines, see `read_lines`. Raises ConfigError as check_age does."""
        check_age([self.path])
        return list(read_lines(self.path))


def check_age(paths: Iterable[Path]) -> None:
    """Raises ConfigError for files of an older megarl, which say otherwise what counts; one line
    names them all."""
    older = []
    for path in filter(Path.is_file, paths):
        with path.open(encoding="utf-8", errors="replace") as file:
            if any('"after":' in line and '"step":' not in line for line in file):
                older.append(str(path))
    if older:
        raise ConfigError(
            f"{' and '.join(older)}: written by an older megarl; move what is named away, and "
            "the run goes on from its checkpoint with new ones"
        )


def _stays(text: str, after: int) -> bool:
    try:
        line = json.loads(text)
    except ValueError:
        return False
    return isinstance(line, dict) and bool(line.get("step", 0) <= after)


def read_lines(path: Path) -> Iterator[Line]:
    """Yields the JSON objects on the lines of a file, none where there is no file. A line that a
    kill cut short is left out. Raises ValueError for another that is no object."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for number, text in enumerate(map(str.strip, file), 1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError) as e:
                if text.strip("\0")[:2] not in _BEGINNINGS:  # somebody else's file
                    raise ValueError(f"{path}:{number}: not a JSON object: {e}") from e
                continue
            if not isinstance(line, dict):
                raise ValueError(f"{path}:{number}: not a JSON object")
            yield line


def append_line(path: Path, line: Mapping[str, Any]) -> int:
    """Appends a line and returns how long the file is then. It does not join one that lacks its
    end, as a kill leaves it. Raises OSError where there is no room, and leaves no half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = f"{json.dumps(line, separators=(',', ':'))}\n".encode()
    with path.open("a+b", buffering=0) as file:
        if end := file.seek(0, os.SEEK_END):
            file.seek(end - 1)
            data = data if file.read(1) == b"\n" else b"\n" + data
        return append(file, data) + len(data)


def append(file: BinaryIO, data: bytes) -> int:
    """Writes `data` at the end of an unbuffered file and returns where. Raises OSError where there
    is no room, and takes back what was written."""
    at = file.seek(0, os.SEEK_END)
    left = memoryview(data)
    try:
        while left:  # a disk takes what it has room for, and says so at the next write
            left = left[file.write(left) :]
    except OSError:
        file.truncate(at)
        raise
    return at


class DiskThread:
    """Does pieces of work one after the other. Nothing here ends a run: where the disk is full or
    does not follow, an error in the log says what is not recorded, and training goes on."""

    def __init__(self, name: str, *, waiting: int) -> None:
        """waiting: pieces of work that the disk may be behind; more are left out."""
        self._name = name
        self._work: queue.Queue[tuple[str, Callable[[], None]] | None] = queue.Queue(waiting)
        self._thread: threading.Thread | None = None
        self._over = False

    def do(self, what: str, work: Callable[[], None]) -> None:
        """Has the thread call `work`, which records `what`; not after `close`."""
        if self._over:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        try:
            self._work.put_nowait((what, work))
        except queue.Full:
            log.error("not recorded: %s: the disk is behind", what)

    def _run(self) -> None:
        while (job := self._work.get()) is not None:
            what, work = job
            try:
                work()
            except Exception as e:  # of a disk that is full, mostly
                log.error("not recorded: %s: %s: %s", what, type(e).__name__, e)

    def close(self) -> bool:
        """Waits until all is written, PATIENCE seconds at most, and returns whether it is. May be
        called twice."""
        self._over, thread = True, self._thread
        if thread is None:
            return True
        with contextlib.suppress(queue.Full):
            self._work.put(None, timeout=PATIENCE)
        thread.join(PATIENCE)
        if thread.is_alive():
            log.error("%s: the last is not recorded: the disk did not answer", self._name)
            return False
        self._thread = None
        return True


# ---- fingerprints of what every step computed

DETAIL_BYTES = 64 << 20
ALL = "*"  # the name of one hash for all tensors of a phase
_BEFORE_UPDATES = ROLLOUT, BATCH, LOGP, REF, TEACHER, VALUES, ADVANTAGES = (
    "rollout",  # the batch as it was handed out
    "batch",  # what of it a reward model or a filter changed
    "logp",
    "ref",
    "teacher",
    "values",
    "advantages",
)
UPDATE, WEIGHTS, SERVERS = "update", "weights", "servers"
_UPDATE = re.compile(r"(?:(?P<role>\w+) )?update (?P<number>\d+)")
Tensors = Mapping[str, Fingerprint]


def phase_of(kind: str, role: str = "actor", number: int | None = None) -> str:
    """Returns the name of a phase of a role: "update 2", "critic weights"."""
    words = [*([role] if role != "actor" else []), kind, *([str(number)] if number else [])]
    return " ".join(words)


class FingerprintFile:
    """Appends to the fingerprints of a run. One process writes."""

    def __init__(self, run_dir: Path) -> None:
        self._log = RunLog(run_dir / FINGERPRINTS_FILE)

    def begin(self, after: int, start: Mapping[str, Any]) -> None:
        """Says with what a start goes on from step `after`. Raises OSError."""
        self._log.append(after, {"start": start})

    def append(self, step: int, phase: str, tensors: Tensors) -> None:
        """Appends a phase of a step. Raises OSError where there is no room."""
        if phase.endswith((WEIGHTS, SERVERS)) and self._log.path.stat().st_size > DETAIL_BYTES:
            tensors = {ALL: Fingerprint(_of_all(tensors))}
        listed = {name: _shortened(fingerprint) for name, fingerprint in tensors.items()}
        self._log.append(step, {"phase": phase, "tensors": listed})


def _shortened(fingerprint: Fingerprint) -> list[Any]:
    """Returns the fingerprint as it is written, without what is empty at its end."""
    fields: list[Any] = [
        fingerprint.bits,
        *map(_rounded, (fingerprint.norm, fingerprint.sum)),
        *fingerprint[3:],
    ]
    while not fields[-1] and len(fields) > 1:
        fields.pop()
    return fields


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.9g}")


def _of_all(tensors: Tensors) -> str:
    """Returns one hash for all tensors of a phase."""
    if ALL in tensors:
        return tensors[ALL].bits
    return Digest(" ".join(f"{n}={tensors[n].bits}" for n in sorted(tensors)).encode()).hexdigest()


@dataclass
class Fingerprints:
    """Holds what a run recorded. start: of its last start, which versions, layout and machine it
    had. steps: by step and phase the fingerprints of tensors by name."""

    start: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, dict[str, dict[str, Fingerprint]]] = field(default_factory=dict)


def read_fingerprints(run_dir: Path) -> Fingerprints:
    """Returns the fingerprints that count; a line that was cut short is left out. Raises
    FileNotFoundError where none were recorded, ConfigError for a file of an older megarl."""
    log = RunLog(run_dir / FINGERPRINTS_FILE)
    log.path.stat()
    fingerprints = Fingerprints()
    for line in log.read():
        if "start" in line:
            fingerprints.start = line["start"]
        else:
            tensors = {name: Fingerprint(*fields) for name, fields in line["tensors"].items()}
            fingerprints.steps.setdefault(line["step"], {})[line["phase"]] = tensors
    return fingerprints


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Says how two runs compare. steps: those that both recorded, up to the first that differs.
    count: how many tensors were compared. phase: of the last of `steps` the first that differs,
    None where nothing does; differing: its tensors in their order, each with why; equal: the phases
    of that step that were compared before."""

    steps: tuple[int, ...]
    count: int
    phase: str | None = None
    differing: Mapping[str, str] = field(default_factory=dict)
    equal: tuple[str, ...] = ()


def compare(a: Fingerprints, b: Fingerprints, steps: Iterable[int] | None = None) -> Comparison:
    """Compares two runs step by step, of `steps` (None: of all) those that both recorded, and of
    these the phases that both recorded."""
    both = sorted(a.steps.keys() & b.steps.keys() & set(a.steps if steps is None else steps))
    count = 0
    for i, step in enumerate(both):
        equal: list[str] = []
        for phase in _phases_of_both(a.steps[step], b.steps[step]):
            first, second = (_in_phase(run.steps[step], phase) for run in (a, b))
            count += len(first)
            if wrong := differing(first, second):
                return Comparison(
                    steps=tuple(both[: i + 1]),
                    count=count,
                    phase=phase,
                    differing=wrong,
                    equal=tuple(equal),
                )
            equal.append(phase)
    return Comparison(steps=tuple(both), count=count)


def _phases_of_both(a: Mapping[str, Tensors], b: Mapping[str, Tensors]) -> list[str]:
    """Returns the phases of a step that two runs have in common. One whose batch was not changed
    has no phase of this name, and yet can be compared."""
    both = a.keys() & b.keys()
    if ROLLOUT in both and (BATCH in a or BATCH in b):
        both |= {BATCH}
    return sorted(both, key=_rank)


def _in_phase(step: Mapping[str, Tensors], phase: str) -> Tensors:
    """Returns the tensors of a phase; of the batch as it was trained on, also what did not
    change."""
    return {**step[ROLLOUT], **step.get(BATCH, {})} if phase == BATCH else step[phase]


def differing(a: Tensors, b: Tensors) -> dict[str, str]:
    """Returns the tensors of one phase that differ, in the order of `a`, and how."""
    if ALL in a or ALL in b:
        return {} if _of_all(a) == _of_all(b) else {ALL: "the tensors were not listed"}
    differences = {}
    for name in dict.fromkeys([*a, *b]):
        if name not in a or name not in b:
            differences[name] = f"only the {'first' if name in a else 'second'} run has it"
        elif a[name].bits != b[name].bits or a[name].shape != b[name].shape:
            differences[name] = _why(a[name], b[name])
    return differences


def _why(a: Fingerprint, b: Fingerprint) -> str:
    """Says how two tensors of one name differ."""
    if a.shape != b.shape:
        return f"{a.shape} and {b.shape}"
    if a.rows and a.rows == b.rows:
        return "the same rows in another order"
    if a.norm is None or b.norm is None:
        return "not the same bits"
    if a.norm != b.norm:
        return f"{'norm ' if a.shape else ''}{a.norm:.9g} and {b.norm:.9g}"
    if a.sum != b.sum and a.sum is not None and b.sum is not None:
        return f"norm {a.norm:.9g} in both, sum {a.sum:.9g} and {b.sum:.9g}"
    return f"norm {a.norm:.9g} in both, to nine digits"


def _rank(phase: str) -> tuple[int, int, str]:
    """Returns a key that sorts phases as a step goes: a critic is updated before the policy."""
    after = len(_BEFORE_UPDATES)
    if phase in _BEFORE_UPDATES:
        return _BEFORE_UPDATES.index(phase), 0, phase
    if match := _UPDATE.fullmatch(phase):
        return after if match["role"] else after + 1, int(match["number"]), phase
    return after + (3 if phase == SERVERS else 2), 0, phase
