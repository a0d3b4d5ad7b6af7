"""Runs uv with the indexes of pip's configuration.

    python3 tools/uv.py pip install --python .venv -c constraints/cpu.txt -e .

uv is the one on PATH; otherwise pip installs it into .venv-uv, and a virtual environment's pip if
this Python has none. This file needs only the standard library. Pip's settings are those of `pip
config list`, then PIP_* variables; a UV_* variable that is already set wins. uv chooses versions
among all indexes, as pip does. If the index in TORCH_INDEX answers, uv searches it, too. The
default Python of uv is the one that runs this file.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

HOME = Path(__file__).resolve().parent.parent / ".venv-uv"
UV = "uv>=0.9,<1"
# pip's option: uv's variable, and what separates several values in it
VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "proxy": ("ALL_PROXY", " "),
}
SECTIONS = ("global", "install")  # install wins
ANSWER_S = 10
OLDEST = (3, 11)


def settings(listed: str, env: Mapping[str, str]) -> dict[str, str]:
    """Returns pip's options by name, from the output of `pip config list` and from variables."""
    options = {}
    for line in sorted(listed.splitlines()):  # install after global
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if section in SECTIONS:
            options[option] = str(ast.literal_eval(value))
    for name, value in env.items():
        if name.startswith("PIP_"):
            options[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    return options


def variables(options: dict[str, str]) -> dict[str, str]:
    """Returns uv's variables for pip's options."""
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_PYTHON": sys.executable}
    for option, (name, separator) in VARIABLES.items():
        if option in options:
            found[name] = separator.join(options[option].split())
    return found


def answers(url: str) -> bool:
    """Returns whether an index can be read."""
    try:
        with urlopen(url.rstrip("/") + "/", timeout=ANSWER_S):
            return True
    except (OSError, ValueError):
        return False


def pip() -> list[str]:
    """Returns the command of a pip: of this Python, or of .venv-uv; empty if there is none."""
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    inner = HOME / "bin" / "python"
    return [str(inner), "-m", "pip"] if inner.exists() else []


def runs(uv: str) -> bool:
    """Returns whether this is a uv that runs; a shim can name a program that is not installed."""
    try:
        return subprocess.run([uv, "--version"], capture_output=True).returncode == 0
    except OSError:
        return False


def installed() -> str:
    """Returns the path of uv; installs it if PATH has none."""
    for uv in (shutil.which("uv"), str(HOME / "bin" / "uv")):
        if uv and runs(uv):
            return uv
    where: list[str] = ["--target", str(HOME)]
    if not pip():
        where = []
        if subprocess.run([sys.executable, "-m", "venv", "--clear", str(HOME)]).returncode:
            sys.exit(
                f"{sys.executable}: it has neither pip nor venv, so uv cannot be installed; "
                "install pip (on Debian and Ubuntu: apt install python3-pip), or put uv on PATH"
            )
    if status := subprocess.run([*pip(), "install", "--quiet", *where, UV]).returncode:
        sys.exit(status)
    return str(HOME / "bin" / "uv")


def main() -> None:
    if sys.version_info < OLDEST:
        sys.exit(
            f"{sys.executable}: Python {sys.version.split()[0]}; megarl needs "
            f"{'.'.join(map(str, OLDEST))} or newer: name one, as in `make PYTHON=python3.12 ...`"
        )
    uv, command = installed(), pip()
    listed = ""
    if command:
        command += ["config", "list"]
        listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = variables(settings(listed, os.environ))
    torch = os.environ.get("TORCH_INDEX", "")
    if torch and answers(torch):
        found["UV_INDEX"] = f"{torch} {found.get('UV_INDEX', '')}".strip()
    os.execve(uv, [uv, *sys.argv[1:]], found | os.environ | {"UV_PYTHON": found["UV_PYTHON"]})


if __name__ == "__main__":
    main()
