"""DeepEP's names, where megatron-core looks for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
from megarl.parallel import mcore
from megatron.core.transformer.moe import fused_a2a
print(fused_a2a.HAVE_DEEP_EP, mcore.deep_ep_problem(), sep="|")
"""

# as in DeepEP 2.1: utils has one of the two names
EVENT = "class EventHandle: ...\nclass EventOverlap: ...\n"
NEWER = {
    "__init__": "class Buffer: ...\n",
    "utils/__init__": "from .event import EventHandle\n",
    "utils/event": EVENT,
}
OLDER = {
    "__init__": "class Buffer: ...\n",
    "utils/__init__": "from .event import EventHandle, EventOverlap\n",
    "utils/event": EVENT,
}
WITHOUT_TOOLKIT = {**NEWER, "__init__": "assert False, 'cannot find CUDA_HOME'\n"}


@pytest.mark.parametrize(
    ("files", "usable", "why"),
    [
        (NEWER, True, ""),
        (OLDER, True, ""),
        (WITHOUT_TOOLKIT, False, "CUDA_HOME"),
        ({}, False, "not installed"),
    ],
    ids=["newer", "older", "no toolkit", "missing"],
)
def test_megatron_core_has_deep_ep_where_it_can_be_imported(
    tmp_path: Path, files: dict[str, str], usable: bool, why: str
) -> None:
    for name, text in files.items():
        path = tmp_path / "deep_ep" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROBE}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    have, problem = ran.stdout.strip().splitlines()[-1].split("|")
    assert have == str(usable)
    assert why in problem and bool(problem) is not usable
