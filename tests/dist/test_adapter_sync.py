"""A sync of adapters alone: servers compute the same with base + adapter as with merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.api.records import SaveLoadMeta, WeightUpdateMeta
from tests.dist.engine_jobs import SP, make_engine
from tests.dist.lora_files import lora, write_adapter
from tests.embedded_server import Server, address, checksums, embedded_server, load, version
from tests.tiny import save_tiny

pytestmark = pytest.mark.system

PROMPT = {
    "input_ids": [[3, 1, 4, 1, 5], [9, 2, 6]],
    "sampling_params": {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True},
    "return_logprob": True,
}


def upload(path: str, cfg: Any, server: str, out: str, steps: list[tuple[str, int]]) -> list[Any]:
    engine = make_engine(path, SP, lora=cfg)
    metas = (
        WeightUpdateMeta(type=t, version=v, addresses=(server,), path=f"{out}/sync", timeout=60.0)
        for t, v in steps
    )
    stats = [engine.upload_weights(meta) for meta in metas]
    engine.save(SaveLoadMeta(path=f"{out}/merged"))
    engine.destroy()
    return [s["weight_sync/bytes"] for s in stats]


def answers(server: Server, **asked: Any) -> tuple[list[Any], torch.Tensor]:
    """Returns the tokens of an answer and their logprobs."""
    items = server.ok("/generate", PROMPT | asked)
    assert isinstance(items, list)
    told = [i["meta_info"]["output_token_logprobs"] for i in items]
    return [i["output_ids"] for i in items], torch.tensor([[t[0] for t in one] for one in told])


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.full)])
def test_an_adapter_equals_merged_weights(
    worlds: Any, models: Path, tmp_path: Path, kind: str
) -> None:
    path = str(save_tiny(tmp_path / "model", kind))
    cfg = lora(adapter_path=write_adapter(tmp_path / "adapter", path, lora()))
    args = path, cfg
    with embedded_server(Path(path), log=tmp_path / "log") as server:
        base, before = answers(server), checksums(server)
        # files that an earlier run may have left are replaced
        sent = worlds(2).run(
            upload, *args, address(server), str(tmp_path), [("adapter", 3), ("adapter", 7)]
        )[0]
        assert version(server) == "7"
        assert [d.name for d in (tmp_path / "sync").iterdir()] == ["v7"]
        tokens, logprobs = answers(server, lora_path=["megarl-v7"] * 2)
        assert tokens != base[0]
        for refused in (None, "megarl-v3"):
            status, answer = server.post("/generate", PROMPT | {"lora_path": refused})
            assert status == 400 and "computes with LoRA adapter 'megarl-v7'" in str(answer)
        again = worlds(2).run(
            upload, *args, address(server), str(tmp_path), [("adapter", 7), ("distributed", 8)]
        )[0]
        assert version(server) == "8"
        assert sent == [again[0]] * 2 and 2 * again[0] < again[1]
        merged_tokens, merged_logprobs = answers(server)
        assert tokens == merged_tokens
        torch.testing.assert_close(logprobs, merged_logprobs, rtol=0, atol=1e-5)
        streamed = checksums(server)
        load(server, tmp_path / "merged")
        assert checksums(server) == streamed != before


def test_unloading_leaves_the_base_bit_for_bit(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "model", "qwen2", dtype=torch.bfloat16)
    adapter = {
        "lora_name": "a",
        "lora_path": write_adapter(tmp_path / "adapter", str(path), lora()),
    }
    with embedded_server(path, log=tmp_path / "log") as server:
        before = checksums(server)
        assert server.ok("/load_lora_adapter", adapter)["loaded_adapters"].keys() == {"a"}
        status, answer = server.post("/load_lora_adapter", adapter)
        assert status == 400 and "loaded already" in str(answer)
        assert checksums(server) != before
        assert server.ok("/unload_lora_adapter", {"lora_name": "a"})["loaded_adapters"] == {}
        assert checksums(server) == before
        for name in ("a", "b", "c"):  # c is merged, the others are loaded beside it
            server.ok("/load_lora_adapter", adapter | {"lora_name": name})
        assert server.ok("/unload_lora_adapter", {"lora_name": "a"})["loaded_adapters"].keys() == {
            "b",
            "c",
        }
        status, answer = server.post("/unload_lora_adapter", {"lora_name": "a"})
        assert status == 400 and "not loaded" in str(answer)
        for name in ("b", "c"):
            server.ok("/unload_lora_adapter", {"lora_name": name})
        assert checksums(server) == before
        file = tmp_path / "adapter" / "adapter_model.safetensors"
        tensors = load_file(file)
        tensors.pop(next(n for n in tensors if ".lora_B." in n))
        save_file(tensors, file)
        status, answer = server.post("/load_lora_adapter", adapter)
        assert status == 400 and "has no lora_B beside it" in str(answer)
        assert checksums(server) == before


def test_no_update_begins_while_the_weights_are_away(tmp_path: Path) -> None:
    """It would put back the base below an adapter into memory that is not there."""
    path = save_tiny(tmp_path / "model", "qwen2", dtype=torch.bfloat16)
    adapter = {
        "lora_name": "a",
        "lora_path": write_adapter(tmp_path / "adapter", str(path), lora()),
    }
    with embedded_server(path, "--enable-weights-cpu-backup", log=tmp_path / "log") as server:
        before = checksums(server)
        server.ok("/load_lora_adapter", adapter)
        merged = checksums(server)
        server.ok("/pause_generation", {})
        server.ok("/release_memory_occupation", {"tags": ["weights"]})
        status, answer = server.post("/begin_weight_update")
        assert status == 400 and "released" in answer["message"]
        server.ok("/resume_memory_occupation", {"tags": ["weights"]})
        assert checksums(server) == merged != before
        server.ok("/begin_weight_update")
        server.ok("/end_weight_update")
        assert checksums(server) == before
