"""Which GPUs go to whom, by plain names."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.errors import ConfigError
from megarl.launcher.devices import share_out, visible_gpus


def test_visible_gpus(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()

    def gpus(torch_version: str = "2.13.0+cu130", **env: str) -> list[str]:
        return visible_gpus(env, devices=tmp_path, torch_version=torch_version)

    assert gpus() == ["0", "1"]
    assert gpus(CUDA_VISIBLE_DEVICES="3,GPU-7") == ["3", "GPU-7"]
    assert gpus(CUDA_VISIBLE_DEVICES="") == []
    assert gpus(MEGARL_DEVICE="cpu") == []
    assert gpus("2.13.0+cpu") == []


def test_trainers_first_then_servers() -> None:
    devices = share_out([*"abcdefgh"], trainers=4, servers=2, server_tp=2)
    assert (devices.trainers, devices.servers) == ("a,b,c,d", ("e,f", "g,h"))
    assert not devices.shared


def test_too_few_gpus_are_shared() -> None:
    devices = share_out(["0", "1"], trainers=2, servers=2, server_tp=1)
    assert (devices.trainers, devices.servers, devices.shared) == ("0,1", ("0", "1"), True)
    devices = share_out(["0"], trainers=1, servers=1, server_tp=1)
    assert (devices.trainers, devices.servers, devices.shared) == ("0", ("0",), True)


def test_no_gpus() -> None:
    devices = share_out([], trainers=2, servers=1, server_tp=1)
    assert (devices.trainers, devices.servers, devices.shared) == (None, (None,), False)


def test_more_trainers_than_gpus_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"4 trainer processes .* 2 are visible"):
        share_out(["0", "1"], trainers=4, servers=0, server_tp=1)
    with pytest.raises(ConfigError, match=r"server\.tp=2: 1 GPU"):
        share_out(["0"], trainers=1, servers=1, server_tp=2)
