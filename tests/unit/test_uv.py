"""What `make` installs: uv with pip's settings, and the pins of constraints/cpu.txt."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "uv.py"
UV = runpy.run_path(str(TOOL))
PINS = (ROOT / "constraints" / "cpu.txt").read_text()

FAKE = f"""#!{sys.executable}
import json, os, sys
if sys.argv[1:] == ["--version"]:
    sys.exit()
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""


def called(tmp_path: Path, **env: str) -> tuple[list[str], dict[str, str]]:
    """The arguments and variables with which tools/uv.py runs a uv on PATH."""
    program = tmp_path / "uv"
    program.write_text(FAKE)
    program.chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_", "SSL_"))}
    kept |= {"PATH": f"{tmp_path}:{kept['PATH']}", "PIP_CONFIG_FILE": os.devnull} | env
    done = subprocess.run(
        [sys.executable, str(TOOL), "pip", "install", "a b"],
        env=kept, capture_output=True, text=True, check=True,
    )  # fmt: skip
    words, variables = json.loads(done.stdout)
    return words, variables


def test_pips_settings_reach_uv(tmp_path: Path) -> None:
    words, env = called(
        tmp_path,
        PIP_INDEX_URL="https://mirror/simple",
        PIP_EXTRA_INDEX_URL="https://a/simple  file:///b/simple",
        PIP_FIND_LINKS="/c /d",
        PIP_CERT="/e.pem",
    )
    assert words == ["pip", "install", "a b"]
    assert env["UV_DEFAULT_INDEX"] == "https://mirror/simple"
    assert env["UV_INDEX"] == "https://a/simple file:///b/simple"
    assert env["UV_FIND_LINKS"] == "/c,/d" and env["SSL_CERT_FILE"] == "/e.pem"
    assert env["UV_INDEX_STRATEGY"] == "unsafe-best-match" and Path(env["UV_PYTHON"]).exists()


def test_without_settings_of_pip_uv_has_its_own(tmp_path: Path) -> None:
    _, env = called(tmp_path)
    assert not {"UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS", "UV_NO_INDEX"} & set(env)
    _, env = called(tmp_path, PIP_INDEX_URL="https://a/simple", UV_DEFAULT_INDEX="https://b/simple")
    assert env["UV_DEFAULT_INDEX"] == "https://b/simple"


def test_an_index_of_torch_is_searched_only_if_it_answers(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        _, env = called(tmp_path, TORCH_INDEX=url, PIP_EXTRA_INDEX_URL="https://a/simple")
        assert env["UV_INDEX"] == f"{url} https://a/simple"
        _, env = called(tmp_path, TORCH_INDEX=f"{url}/missing")
        assert "UV_INDEX" not in env
        server.shutdown()


def test_a_later_section_of_pips_settings_wins() -> None:
    listed = (
        "install.timeout='2'\nglobal.timeout='1'\nglobal.cert='/e'\n"
        "global.find-links='\\n/a\\n/b'\nfreeze.timeout='4'\n"
    )
    env = UV["variables"](UV["settings"](listed, {"PIP_CERT": "/f", "CERT": "/g"}))
    assert env["UV_HTTP_TIMEOUT"] == "2" and env["SSL_CERT_FILE"] == "/f"
    assert env["UV_FIND_LINKS"] == "/a,/b"


def test_the_pins_have_names_versions_and_markers_only() -> None:
    for line in PINS.splitlines():
        asked = Requirement(line)
        assert len(asked.specifier) == 1 and str(asked.specifier).startswith("=="), line
        assert not asked.extras and asked.url is None and "+" not in str(asked.specifier), line


@pytest.mark.parametrize("python", ["3.11.0", "3.11.2", "3.11.9", "3.12.0", "3.13.0"])
def test_every_python_has_one_pin_of_a_package(python: str) -> None:
    seen = default_environment() | {
        "python_version": python.rpartition(".")[0], "python_full_version": python,
        "sys_platform": "linux", "platform_machine": "x86_64",
    }  # fmt: skip
    asked = map(Requirement, PINS.splitlines())
    names = [r.name for r in asked if r.marker is None or r.marker.evaluate(dict(seen))]
    assert len(names) == len(set(names))
    assert {"torch", "triton", "numpy", "megatron-core", "pytest"} <= set(names)
