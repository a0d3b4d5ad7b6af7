"""megarl reads tool calls as SGLang's own parsers do."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from megarl.rollout.tools.calls import parse_calls
from tests.unit.test_tools import TOOLS, WRITTEN

# megarl's format -> SGLang's parser
NAMES = {
    "hermes": "hermes",
    "qwen": "qwen25",
    "qwen3_coder": "qwen3_coder",
    "llama3": "llama3",
    "deepseek": "deepseekv3",
    "glm": "glm45",
}
PROGRAM = """
import json, sys
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
given = json.load(sys.stdin)
tools = [Tool(**tool) for tool in given["tools"]]
found = {}
for name, text in given["texts"].items():
    _, calls = FunctionCallParser(tools, name).parse_non_stream(text)
    found[name] = [[call.name, json.loads(call.parameters)] for call in calls]
print("found:" + json.dumps(found))
"""


def test_calls_are_those_that_sglang_finds() -> None:
    texts = {NAMES[name]: text for name, text in WRITTEN.items()}
    done = subprocess.run(
        [os.environ["MEGARL_SGLANG_PYTHON"], "-c", PROGRAM],
        input=json.dumps({"tools": TOOLS, "texts": texts}),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    theirs: dict[str, Any] = json.loads(done.stdout.rpartition("found:")[2])
    for name, text in WRITTEN.items():
        ours = [[c.name, c.arguments] for c in parse_calls(text, name, TOOLS)]
        assert ours == theirs[NAMES[name]] and len(ours) == 2, name
