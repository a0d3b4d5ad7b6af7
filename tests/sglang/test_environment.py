"""Trainers and SGLang agree on what NCCL has to find alike in both processes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from megarl.utils.env import set_trainer_defaults
from tests.sglang import servers
from tests.sglang.servers import PYTHON, save_model

SETTING = "NCCL_CUMEM_ENABLE"
# what `python -m sglang.launch_server` does to its environment before it starts its workers
SGLANG = """
import json, os, sys
from sglang.srt.entrypoints.engine import _set_envs_and_config
from sglang.srt.server_args import ServerArgs
args = ServerArgs(model_path=sys.argv[1], device="cpu", attention_backend="torch_native")
for given in json.loads(sys.argv[2]):
    os.environ.pop("NCCL_CUMEM_ENABLE", None)
    os.environ.update(given)
    _set_envs_and_config(args)
    print("CUMEM", os.environ["NCCL_CUMEM_ENABLE"])
"""


def test_cumem_is_the_same_in_trainers_and_servers(tmp_path: Path) -> None:
    given: list[dict[str, str]] = [{}, {SETTING: "1"}, {SETTING: "0"}]
    model = save_model(tmp_path / "model", "qwen3", 0)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("NCCL_")} | servers.ENV
    output = subprocess.run(
        [PYTHON, "-c", SGLANG, str(model), json.dumps(given)],
        env=clean, capture_output=True, text=True, timeout=200, check=True,
    ).stdout  # fmt: skip
    theirs = [line.split()[1] for line in output.splitlines() if line.startswith("CUMEM ")]
    ours = [dict(env) for env in given]
    for env in ours:
        set_trainer_defaults(env)
    assert theirs == [env[SETTING] for env in ours] == ["0", "1", "0"]
