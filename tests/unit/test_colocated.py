"""Who reads whose memory, and memory as text."""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys

import pytest
import torch

from megarl.parallel import worlds
from megarl.utils.env import is_here
from megarl.weight_sync.colocated import RankLocation, read_from
from megarl.wire import handles

HOST = torch.device("cpu")
GROWING, FIXED = "expandable_segments:True", "expandable_segments:False"


def spots(*gpus: str | None, near: int, machine: str = "m") -> list[RankLocation]:
    return [RankLocation(machine, gpu, (True,) * near) for gpu in gpus]


def test_on_hosts_one_rank_is_read_by_all() -> None:
    here = spots(None, None, near=2)
    assert read_from(here, {"a": 1, "b": 2}, sender=1) == {"a": (1,), "b": (1, 1)}
    away = [RankLocation("other", None, (False, False)), *here]
    assert read_from(away, {"a": 1, "b": 2}, sender=0) == {"a": (1,), "b": (1, 1)}


def test_on_gpus_each_worker_reads_the_rank_beside_it() -> None:
    four = spots("g0", "g1", "g2", "g3", near=3)
    assert read_from(four, {"a": 2, "b": 1, "c": 2}, sender=0) == {
        "a": (0, 1), "b": (2,), "c": (3, 0),
    }  # fmt: skip
    shared = spots("g0", "g0", "g1", "g1", near=1)  # two ranks on each GPU
    assert read_from(shared, {"a": 2}, sender=3) == {"a": (0, 2)}


def test_machines_are_counted_apart() -> None:
    near = {"m": (True, False, True), "n": (False, True, False)}
    ranks = [RankLocation(m, f"{m}{i}", near[m]) for m in ("m", "n") for i in range(2)]
    servers = {"m:1": 1, "n:1": 2, "m:2": 1}
    assert read_from(ranks, servers, sender=0) == {"m:1": (0,), "n:1": (2, 3), "m:2": (1,)}


@pytest.mark.parametrize(
    "near, where", (((False, False), "no machine"), ((True, True), "2 machines"))
)
def test_a_server_elsewhere_is_refused(near: tuple[bool, bool], where: str) -> None:
    ranks = [RankLocation(m, None, (n,)) for m, n in zip("mn", near)]
    with pytest.raises(RuntimeError, match=f"server a:1 is on {where} of the trainers"):
        read_from(ranks, {"a:1": 1}, sender=0)


def test_which_addresses_are_here() -> None:
    assert is_here("127.0.0.1:1") and is_here("localhost:80") and is_here("http://[::1]:80/")
    assert not is_here("192.0.2.7:30000")


READER = """
import sys, torch
from megarl.wire import handles
for name, tensor in handles.unpack(sys.stdin.read()):
    print(name, list(tensor.shape), tensor.dtype, tensor.float().sum().item())
    tensor.zero_()  # it is the writer's own memory
    if tensor.is_cuda:
        torch.cuda.synchronize()
"""


def check_shared(device: torch.device) -> None:
    """Another process, no relative of the memory's owner, reads and writes it, twice."""
    memory = handles.allocate(6 * 4 + 64, device)[: 6 * 4]
    numbers = memory.view(torch.float32)
    numbers.copy_(torch.arange(6.0))
    for total in (15.0, 0.0):
        done = subprocess.run(
            [sys.executable, "-c", READER], text=True, capture_output=True,
            input=handles.pack("w", numbers), timeout=120, env=os.environ,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert f"w [6] torch.float32 {total}" in done.stdout
        assert not memory.any()


def test_another_process_reads_and_writes_the_same_memory() -> None:
    check_shared(HOST)


@pytest.mark.parametrize(
    "content", (print, {"w": 1}, [1], [("w",)], 7, subprocess.Popen, torch.load)
)
def test_nothing_but_tensors_is_unpacked(content: object) -> None:
    text = base64.b64encode(pickle.dumps(content)).decode()
    with pytest.raises(ValueError, match="not a list of tensors"):
        handles.unpack(text)


def test_text_that_is_no_pickle() -> None:
    for text in ("", "%%", base64.b64encode(b"nonsense").decode()):
        with pytest.raises(ValueError, match="not a list of tensors"):
            handles.unpack(text)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings that torch's allocator gets, and its allocations, in order."""
    events: list[str] = []
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", events.append)
    # torch 2.11 has no function that returns the settings
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: events.append("empty"))
    monkeypatch.setattr(handles, "segments_grow", False)
    return events


def test_what_a_handle_shares_lies_in_a_segment_that_does_not_grow(allocator: list[str]) -> None:
    gpu = torch.device("cuda")
    handles.allocate(8, gpu)
    assert allocator == ["empty"]  # torch's segments do not grow by default
    handles.expand_segments({})
    handles.allocate(8, gpu)
    assert allocator[1:] == [GROWING, FIXED, "empty", GROWING]


@pytest.mark.parametrize("name", ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
def test_the_users_allocator_stays(
    name: str, allocator: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handles.expand_segments({name: "max_split_size_mb:128"})
    assert allocator == []
    users = f"max_split_size_mb:128,{GROWING}"
    monkeypatch.setenv(name, users)
    handles.expand_segments(os.environ)
    handles.allocate(8, torch.device("cuda"))
    assert allocator == [f"max_split_size_mb:128,{FIXED}", "empty", users]


def test_trainers_on_gpus_grow_their_segments(
    monkeypatch: pytest.MonkeyPatch, allocator: list[str]
) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    worlds.init_distributed()
    assert allocator == []  # on a CPU
    monkeypatch.setattr(worlds, "on_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: allocator.append("empty"))
    worlds.init_distributed()
    assert allocator == ["empty", GROWING]


@pytest.mark.parametrize("chosen", (None, "0"))
@pytest.mark.parametrize("process", ("trainer", "server"))
def test_flash_attention_comes_before_cudnns(process: str, chosen: str | None) -> None:
    """cuDNN plans every new shape, and each micro-batch and decoded token has a new shape."""
    name = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
    starts = {
        "trainer": "from megarl.parallel import worlds; worlds.init_distributed()",
        "server": "import sys; sys.modules['megarl.server.app'] = type(sys)('app'); "
        "sys.modules['megarl.server.app'].serve = lambda args: 0; "
        "sys.argv = ['server', '--model-path', 'x', '--port', '1']; "
        "from megarl.server.__main__ import main; main()",
    }
    code = f"{starts[process]}; import os; print(os.environ.get({name!r}))"
    env = {k: v for k, v in os.environ.items() if k != name} | {"MEGARL_DEVICE": "cpu"}
    if chosen is not None:
        env[name] = chosen
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [chosen or "1"]


def test_torch_takes_the_settings() -> None:
    """In a process of its own, as they are the process's."""
    code = (
        "import os, torch; from megarl.wire.handles import expand_segments; "
        "expand_segments(os.environ); print(torch._C._accelerator_getAllocatorSettings())"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTORCH_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [GROWING]
