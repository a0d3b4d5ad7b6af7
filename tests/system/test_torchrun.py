"""torchrun on two nodes: two of its agents, at two addresses of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from megarl.utils.env import free_port
from tests.system.test_recover import COMMON, ROOT, SFT
from tests.tiny import save_tiny
from tests.tiny_tokenizer import save_tokenizer


def test_two_nodes_train_as_one(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "qwen3", layers=2)
    save_tokenizer(model)
    command = [*SFT, *COMMON, f"model.path={model}", "model.parallel.tp=2", "total_train_steps=2"]
    meeting = f"127.0.0.2:{free_port('127.0.0.2')}"
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node",
             "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-id", "one",
             "--local-addr", address, "megarl/run.py", *command, f"fileroot={tmp_path}/two"],
            cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for address in ("127.0.0.2", "127.0.0.3")
    ]  # fmt: skip
    try:
        outputs = [node.communicate(timeout=240)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait(30)
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    one = subprocess.run(
        [sys.executable, "-m", "megarl.launcher.local", *command, f"fileroot={tmp_path}/one"],
        cwd=ROOT, text=True, timeout=240, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert one.returncode == 0, one.stdout
    ours, theirs = (
        load_file(tmp_path / root / "e" / "t" / "final" / "model.safetensors")
        for root in ("two", "one")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
