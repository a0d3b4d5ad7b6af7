"""Keeps fingerprints of what every step of a run computed, and finds where two runs differ.

<run>/record/fingerprints.jsonl has a line for each phase of a step: {"step", "phase", "tensors":
{name: fingerprint}}; it is a RunLog. The line {"step": k, "start": {...}} says where and with what
a start goes on from step k. A hash is of bits, so that equal hashes mean equal tensors; norm and
sum only tell people how far apart two tensors are.

Beyond DETAIL_BYTES the tensors of weights are no longer listed one by one: a line then has one hash
for all of them, under the name "*". The rest of a step takes a few kB.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.config.run import RECORD_DIR
from megarl.observability.run_log import RunLog
from megarl.utils.files import Digest, Fingerprint

FILE = "fingerprints.jsonl"
DETAIL_BYTES = 64 << 20
ALL = "*"  # the name of one hash for all tensors of a phase
ROLLOUT, BATCH, LOGP, REF, TEACHER, VALUES, ADVANTAGES = (
    "rollout",  # the batch as it was handed out
    "batch",  # what of it a reward model or a filter changed
    "logp",
    "ref",
    "teacher",
    "values",
    "advantages",
)
UPDATE, WEIGHTS, SERVERS = "update", "weights", "servers"
_BEFORE_UPDATES = (ROLLOUT, BATCH, LOGP, REF, TEACHER, VALUES, ADVANTAGES)
_UPDATE = re.compile(r"(?:(?P<role>\w+) )?update (?P<number>\d+)")


Tensors = Mapping[str, Fingerprint]


def phase_of(kind: str, role: str = "actor", number: int | None = None) -> str:
    """Returns the name of a phase of a role: "update 2", "critic weights"."""
    words = [*([role] if role != "actor" else []), kind, *([str(number)] if number else [])]
    return " ".join(words)


def _rank(phase: str) -> tuple[int, int, str]:
    """Returns a key that sorts phases as a step goes: a critic is updated before the policy."""
    after = len(_BEFORE_UPDATES)
    if phase in _BEFORE_UPDATES:
        return _BEFORE_UPDATES.index(phase), 0, phase
    if match := _UPDATE.fullmatch(phase):
        return after if match["role"] else after + 1, int(match["number"]), phase
    return after + (3 if phase == SERVERS else 2), 0, phase


class FingerprintFile:
    """Appends to the fingerprints of a run. One process writes."""

    def __init__(self, run_dir: Path) -> None:
        self._log = RunLog(run_dir / RECORD_DIR / FILE)

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
    log = RunLog(run_dir / RECORD_DIR / FILE)
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
