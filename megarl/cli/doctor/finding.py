"""Holds what the doctor's checks found, merges the findings of several hosts, and prints them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.text import Text

OK, WARN, FAIL = "OK", "WARN", "FAIL"
_STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}


@dataclass(frozen=True)
class Finding:
    """Says how one thing is: `status` OK, WARN or FAIL, what was looked at, what was found, and how
    to mend it."""

    status: str
    name: str
    text: str
    fix: str = ""


def to_json(findings: Iterable[Finding]) -> str:
    """Returns findings as text that `from_json` reads."""
    return json.dumps([asdict(f) for f in findings])


def from_json(text: str) -> list[Finding]:
    """Returns the findings of `to_json`'s text."""
    return [Finding(**f) for f in json.loads(text)]


def merged(by_host: Sequence[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """Returns the findings of all hosts in the order of the first, equal ones once; one that not
    all hosts share names its hosts."""
    hosts: dict[Finding, list[str]] = {}
    for host, findings in by_host:
        for finding in findings:
            hosts.setdefault(finding, []).append(host)
    order = {name: i for i, name in enumerate(dict.fromkeys(f.name for f in hosts))}
    shown = []
    for finding, found in hosts.items():
        where = "" if len(found) == len(by_host) else f"{', '.join(dict.fromkeys(found))}: "
        shown.append(Finding(finding.status, finding.name, where + finding.text, finding.fix))
    return sorted(shown, key=lambda f: order[f.name])


def print_findings(findings: Sequence[Finding], console: Console | None = None) -> None:
    """Prints a line for each finding, its fix below, and how many there are of each status."""
    console = console or Console(highlight=False)
    width = max(len(f.name) for f in findings) + 2
    for f in findings:
        line = Text.assemble((f"{f.status:5}", _STYLES[f.status]), f"{f.name:{width}}{f.text}")
        console.print(line, soft_wrap=True)
        if f.fix and f.status != OK:
            console.print(Text(f"{'':{width + 5}}fix: {f.fix}"), soft_wrap=True)
    counts = [f"{sum(f.status == s for f in findings)} {s}" for s in (OK, WARN, FAIL)]
    console.print(Text(", ".join(counts), style="bold"))
