"""Compares installed versions with those that megarl's tests run with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

from megarl.cli.doctor.peers import FAIL, OK, WARN, Finding
from megarl.config.recipes import BaseConfig, GRPOConfig

# oldest and newest version in CI, by package: those of constraints/ and the Makefile
TESTED = {
    "torch": ("2.13.0", "2.13.0"),
    "megatron-core": ("0.16.1", "0.19.2"),
    "transformers": ("5.19.0", "5.23.0"),
    "transformer-engine": ("2.2.0", "2.20.2"),
    "sglang": ("0.5.23", "0.5.23"),
}
_ASK = "from importlib.metadata import version; print(version({!r}))"
ASK_TIMEOUT = 60.0  # seconds


def version_findings(cfg: BaseConfig, *, gpus: int) -> Iterator[Finding]:
    """Yields a finding for each package of TESTED that the recipe needs on this host, which has
    `gpus` GPUs."""
    for name in ("torch", "megatron-core", "transformers"):
        yield _finding(name, _installed(name))
    if gpus:
        yield _transformer_engine()
    if isinstance(cfg, GRPOConfig) and cfg.server.type == "sglang" and cfg.server.count:
        yield _sglang(cfg.server.python)


def _transformer_engine() -> Finding:
    name = "transformer-engine"
    if (found := _installed(name)) is not None:
        return _finding(name, found)
    return Finding(
        WARN,
        name,
        "not installed: attention is torch's, and there is no FP8",
        "install it against this torch: pip install --no-build-isolation "
        "'transformer_engine[pytorch]'",
    )


def _sglang(python: str) -> Finding:
    if not python:
        return _finding("sglang", _installed("sglang"))
    command = [python, "-c", _ASK.format("sglang")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as e:
        return Finding(FAIL, "sglang", f"server.python={python}: {e}", "name another interpreter")
    return _finding("sglang", done.stdout.strip() or None, where=python)


def _finding(name: str, found: str | None, *, where: str = sys.executable) -> Finding:
    if found is None:
        return Finding(
            FAIL, name, f"not installed for {where}", f"pip install {name}=={TESTED[name][1]}"
        )
    if (needed := _needed(name)) is not None and not needed.specifier.contains(found):
        return Finding(FAIL, name, f"{found}: megarl needs {needed}", f"pip install '{needed}'")
    low, high = TESTED[name]
    release = Version(found).release
    if Version(low).release <= release <= Version(high).release:
        return Finding(OK, name, f"{found}, as tested")
    tested = low if low == high else f"{low} to {high}"
    return Finding(
        WARN,
        name,
        f"{found}: tests run with {tested}",
        f"where something fails, take {name}=={high} and say so in an issue",
    )


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _needed(name: str) -> Requirement | None:
    """Returns what megarl's own installation asks of a package."""
    try:
        asked = [Requirement(text) for text in requires("megarl") or ()]
    except PackageNotFoundError:  # not installed, but on the path
        return None
    return next((r for r in asked if r.name == name and r.marker is None), None)
