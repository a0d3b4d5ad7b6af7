"""Environment defaults of training processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.utils import env as module
from megarl.utils.env import (
    cores,
    has_interface,
    is_loopback,
    memory_bytes,
    set_memory_saver_defaults,
    set_trainer_defaults,
)

LO = {"GLOO_SOCKET_IFNAME": "lo"} if has_interface("lo") else {}
NCCL = {"NCCL_CUMEM_ENABLE": "0"}
ALWAYS = {"TOKENIZERS_PARALLELISM": "false", "CUDA_DEVICE_MAX_CONNECTIONS": "1", **NCCL}


def defaults(env: dict[str, str], servers: tuple[str, ...] = ()) -> dict[str, str]:
    before = dict(env)
    set_trainer_defaults(env, servers=servers)
    assert before.items() <= env.items()  # what the user has set stays
    return {k: v for k, v in env.items() if k not in before}


def test_one_process() -> None:
    assert defaults({}) == ALWAYS | LO


@pytest.mark.parametrize(("cores", "threads"), [(2, "1"), (1, "1"), (9, "4")])
def test_several_processes_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: str
) -> None:
    monkeypatch.setattr(module, "cores", lambda: cores)
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert defaults(dict(env)) == ALWAYS | LO | {"OMP_NUM_THREADS": threads}
    assert defaults(env | {"OMP_NUM_THREADS": "5"}) == ALWAYS | LO


def test_loopback_only_where_every_peer_is_on_this_host() -> None:
    many = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    assert "GLOO_SOCKET_IFNAME" not in defaults(many)
    assert "GLOO_SOCKET_IFNAME" not in defaults({}, ("127.0.0.1:1", "10.0.0.2:1"))
    assert defaults({}, ("127.0.0.1:1", "localhost:2", "[::1]:3")) == ALWAYS | LO


def test_cumem_is_the_users_where_he_has_set_it() -> None:
    env = {"NCCL_CUMEM_ENABLE": "1"}
    assert "NCCL_CUMEM_ENABLE" not in defaults(env) and env["NCCL_CUMEM_ENABLE"] == "1"


def test_is_loopback() -> None:
    assert [is_loopback(a) for a in ("127.0.0.9", "::1", "[::1]", "localhost")] == [True] * 4
    assert [is_loopback(a) for a in ("10.0.0.1", "node1", "")] == [False] * 3


def test_trainers_that_multiply_in_fp8_by_blocks_scale_as_servers_do() -> None:
    name = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
    env: dict[str, str] = {}
    set_trainer_defaults(env)
    assert name not in env
    set_trainer_defaults(env, block_fp8=True)
    assert env[name] == "1"
    env = {name: "0"}
    set_trainer_defaults(env, block_fp8=True)
    assert env[name] == "0"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_servers_that_release_memory_have_no_expandable_segments(name: str) -> None:
    env = {name: "max_split_size_mb:64,expandable_segments:True"}
    set_memory_saver_defaults(env)
    assert env[name] == "max_split_size_mb:64,expandable_segments:False"
    assert env["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "1"
    env = {name: "max_split_size_mb:64"}
    set_memory_saver_defaults(env)
    assert env[name] == "max_split_size_mb:64"


@pytest.mark.parametrize(
    ("files", "count", "memory"),
    [
        ({"cpu.max": "100000 100000\n", "memory.max": "1048576\n"}, 1, 1 << 20),
        ({"cpu.max": "50000 100000\n"}, 1, None),
        ({"cpu.max": "max 100000\n", "memory.max": "max\n"}, None, None),
        (
            {
                "cpu/cpu.cfs_quota_us": "100000\n",
                "cpu/cpu.cfs_period_us": "100000\n",
                "memory/memory.limit_in_bytes": "4096\n",
            },
            1,
            4096,
        ),
        ({"memory.max": f"{1 << 62}\n"}, None, None),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None, None),
        ({}, None, None),
    ],
    ids=["v2", "half a core", "v2 unlimited", "v1", "more than all", "v1 unlimited", "none"],
)
def test_a_containers_quotas_bound_what_there_is(
    tmp_path: Path, files: dict[str, str], count: int | None, memory: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    whole, everything = cores(cgroups=tmp_path / "none"), memory_bytes(cgroups=tmp_path / "none")
    assert cores(cgroups=tmp_path) == (count or whole)
    assert memory_bytes(cgroups=tmp_path) == (memory or everything)
