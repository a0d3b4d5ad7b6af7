"""LoRA adapters sent alone: the server computes with base + adapter what transformers does with
merged weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.api.records import WeightUpdateMeta
from tests.dist.test_adapter_sync import upload
from tests.dist.test_lora import lora, write_adapter
from tests.dist.world import World
from tests.sglang.servers import RealServer, hf_logprobs, launch, save_model, serving
from tests.sglang.test_generation import PROMPT, ask, client_of, request

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("adapter") / "model", "qwen3", 0)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RealServer]:
    """Started as docs/lora.md says; the kernels of its default backend are for GPUs."""
    options = {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": LAYERS}
    options["lora_backend"] = "torch_native"
    server = launch(model, model.parent / "log", options=options)
    with serving(server):
        yield server


def test_answers_are_those_of_merged_weights(
    server: RealServer, model: Path, world: World, tmp_path: Path
) -> None:
    """Two versions one after the other: the first one's adapter is unloaded."""
    adapters = [write_adapter(tmp_path / f"a{s}", str(model), lora(), seed=s) for s in (1, 2)]
    client = client_of(server, "abort")
    client.initialize()
    try:
        (base,) = ask(client, request())
        for version, adapter in enumerate(adapters, 1):
            out = str(tmp_path / f"v{version}")
            cfg = lora(adapter_path=adapter)
            client.pause()
            world.run(upload, str(model), cfg, server.address, out, [("adapter", version)])
            client.resume()
            meta = WeightUpdateMeta(type="adapter", version=version, path=f"{out}/sync")
            client.update_weights(meta).result(60)
            (r,) = ask(client, request())
            assert r.output_versions == [version] * 16
            expected = hf_logprobs(Path(out) / "merged", PROMPT, r.output_tokens)
            torch.testing.assert_close(torch.tensor(r.output_logprobs), expected, atol=2e-5, rtol=0)
            before = hf_logprobs(model, PROMPT, r.output_tokens)
            assert (before - expected).abs().max() > 1e-2
    finally:
        client.destroy()
    assert base.output_versions == [0] * 16
    served = {m["id"] for m in server.get("/v1/models")[1]["data"]}
    assert {name for name in served if name.startswith("megarl-")} == {"megarl-v2"}
