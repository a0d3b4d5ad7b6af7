"""Puts faults into a copy of this tree, one at a time, and says whether the tests catch them.

    python -m tests.mutants [--room ROOM] [--only NUMBER] [--list]

--room takes the faults of one package, --only the one of that number. The tests of all of them run
first without a fault; those that fail then tell nothing. The exit status is 1 where a fault
survived, no longer applies, or is told nothing about.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.mutants import PACKAGE, ROOT, Mutant
from tests.mutants.table import MUTANTS

CAUGHT, SURVIVED, GONE = "caught", "survived", "no longer applies"
FAILS, UNKNOWN = "its tests fail without it", "its tests cannot be run"
TIMEOUT = 300  # seconds of a test: a fault may be a wait without an end


def main() -> int:
    """Runs the faults that the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--room")
    parser.add_argument("--only", type=int)
    parser.add_argument("--list", action="store_true", help="print the faults and run none")
    args = parser.parse_args()
    chosen = {
        number: mutant
        for number, mutant in enumerate(MUTANTS, 1)
        if args.room in (None, mutant.room) and args.only in (None, number)
    }
    if args.list:
        for number, mutant in chosen.items():
            print(f"{number:3d} {mutant.file}: {mutant.old}  ->  {mutant.new}")
        return 0
    with tempfile.TemporaryDirectory() as made:
        found = run(chosen, copied(Path(made)))
    counts = Counter(found.values())
    print(", ".join(f"{n} {what}" for what, n in counts.most_common()))
    return 0 if set(counts) <= {CAUGHT} else 1


def run(chosen: Mapping[int, Mutant], tree: Path) -> dict[int, str]:
    """Tries every fault in a copy of the tree, and returns what became of it."""
    sound = {test: True for m in chosen.values() for test in m.tests}
    if pytest(tree, list(sound)) != 0:
        sound = {test: pytest(tree, [test]) == 0 for test in sound}
    found = {}
    for number, mutant in chosen.items():
        began = time.monotonic()
        found[number] = attempt(mutant, tree) if all(map(sound.get, mutant.tests)) else FAILS
        took = time.monotonic() - began
        print(
            f"{number:3d} {found[number]} ({took:.0f} s): {mutant.file}: {mutant.old}", flush=True
        )
    return found


def attempt(mutant: Mutant, tree: Path) -> str:
    """Tries one fault and takes it back."""
    path = tree / PACKAGE / mutant.file
    text = path.read_text() if path.exists() else ""
    changed = mutant.applied(text)
    if changed is None:
        return GONE
    times = path.stat()
    path.write_text(changed)
    try:
        status = pytest(tree, mutant.tests)
    finally:  # with its time, by which Python knows compiled files
        path.write_text(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    # of pytest: 0 passed, 1 failed, 2 interrupted, as by an error of an import, 4 no such test
    return {0: SURVIVED, 1: CAUGHT, 2: CAUGHT}.get(status, UNKNOWN)


def copied(home: Path) -> Path:
    """Copies the tree's files that git knows, or would; returns where."""
    tree = home / "tree"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def pytest(tree: Path, tests: Sequence[str]) -> int:
    """Runs tests in a copy of the tree until one fails; returns pytest's exit status."""
    command = [sys.executable, "-m", "pytest", "-x", f"--timeout={TIMEOUT}", *tests]
    env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "MEGARL_DEVICE": "cpu"}
    return subprocess.run(command, cwd=tree, env=env, capture_output=True).returncode


if __name__ == "__main__":
    sys.exit(main())
