"""pip finds what the Dockerfile installs, for its Python: nothing is installed.

One resolution of SGLang, whose pins decide, and of what megarl asks for beside them. Transformer
Engine is compiled against what is there then, so its own needs are left out.
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

from tests.unit.test_dockerfile import installs
from tests.wheel.conftest import HOME, ROOT

PYTHON = "3.12"  # Ubuntu 24.04's
GPU = ROOT / "constraints" / "gpu.txt"


def pip(*words: str, target: Path) -> subprocess.CompletedProcess[str]:
    """Asks pip what it would install for the Dockerfile's Python."""
    command = [str(HOME / "bin" / "python"), "-m", "pip", "install", "--dry-run", "--quiet"]
    command += ["--ignore-installed", "--python-version", PYTHON, "--target", str(target)]
    return subprocess.run([*command, *words], capture_output=True, text=True, timeout=900)


def constrained(target: Path) -> Path:
    """gpu.txt as that Python reads it: pip reads markers as its own Python."""
    kept = []
    for line in GPU.read_text().splitlines():
        pin, _, marker = line.partition(";")
        if not marker or Requirement(line).marker.evaluate({"python_version": PYTHON}):  # type: ignore[union-attr]
            kept.append(pin)
    file = target / "constraints.txt"
    file.write_text("\n".join(kept) + "\n")
    return file


@pytest.mark.timeout(1800)
def test_the_images_lines_resolve(tmp_path: Path) -> None:
    target, report = tmp_path / "target", tmp_path / "report.json"
    if pip("--no-deps", "wheel", target=target).returncode:
        pytest.skip("pip reaches no index: what the Dockerfile installs is NOT resolved")
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^FROM .*-ubuntu24\.04$", dockerfile, re.MULTILINE)
    pins = constrained(tmp_path)
    first, *_ = installs(dockerfile)
    (server,) = re.findall(r'"(sglang==[\d.]+)"', first)
    words = ("--only-binary", ":all:", "-c", str(pins), "--report", str(report), server)
    done = pip(*words, target=target)
    assert done.returncode == 0, done.stderr[-2000:]
    there = {
        item["metadata"]["name"].lower().replace("_", "-"): item["metadata"]["version"]
        for item in json.loads(report.read_text())["install"]
    }
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    seen = default_environment() | {"python_version": PYTHON, "python_full_version": f"{PYTHON}.3"}
    missing = ["transformer_engine[pytorch]"]
    for requirement in map(Requirement, asked):
        if requirement.marker is not None and not requirement.marker.evaluate(dict(seen)):
            continue
        if (version := there.get(requirement.name.lower())) is None:
            missing.append(f"{requirement.name}{requirement.specifier}")
        else:
            assert version in requirement.specifier, requirement  # megarl keeps what SGLang took
    done = pip("--no-deps", "-c", str(pins), *missing, target=target)
    assert done.returncode == 0, done.stderr[-2000:]
