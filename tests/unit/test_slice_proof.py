"""With what slices over NCCL have passed on a machine."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest
import torch

from megarl.weight_sync import proof
from megarl.weight_sync.proof import proof_file, why_unproved, write_proof

GPU, HOST = torch.device("cuda", 1), torch.device("cpu")
STOCK, OURS = "0.5.23", "0.5.23+megarl"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "driver").write_text("NVRM version: 570.86.15\nGCC version: 12\n")
    monkeypatch.setattr(proof, "DRIVER", tmp_path / "driver")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 3))


def test_what_has_passed_holds_for_servers_of_that_version(tmp_path: Path) -> None:
    assert "first_day.py slices" in (why := why_unproved(GPU, [STOCK])) and str(tmp_path) in why
    assert write_proof(GPU, STOCK) == proof_file() and tmp_path in proof_file().parents
    assert why_unproved(GPU, [STOCK]) == why_unproved(GPU, []) == ""
    why = why_unproved(GPU, [STOCK, OURS])
    assert f"with server {OURS} (" in why and f"has {STOCK})" in why
    write_proof(GPU, OURS)  # of the latest alone
    assert why_unproved(GPU, [OURS]) == "" != why_unproved(GPU, [STOCK])


def test_it_holds_for_one_card_driver_nccl_and_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_proof(GPU, STOCK)
    assert "card" in why_unproved(HOST, [STOCK])
    others = (
        (torch.cuda, "get_device_name", lambda device: "NVIDIA H200"),
        (torch.cuda.nccl, "version", lambda: (2, 30, 0)),
        (torch, "__version__", "9.0.0"),
        (proof, "DRIVER", tmp_path / "none"),
    )
    for where, name, other in others:
        with monkeypatch.context() as m:
            m.setattr(where, name, other)
            assert "have not passed on" in why_unproved(GPU, [STOCK]), name
    assert why_unproved(GPU, [STOCK]) == ""


@pytest.mark.parametrize("content", ("", '{"card": "NVI', "[]", "{}", '"card"'))
def test_a_file_that_says_nothing_of_the_kind_counts_as_none(content: str) -> None:
    write_proof(GPU, STOCK)
    proof_file().write_text(content)
    assert why_unproved(GPU, [STOCK])


def test_a_user_without_a_home_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert "first_day.py slices" in why_unproved(GPU, [STOCK])
