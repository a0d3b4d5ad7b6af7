"""An adapter either computes what PEFT makes of its adapter_config.json, or is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file

from tests.dist.engine_jobs import TEMPERATURE, batch, make_engine, save_model
from tests.dist.lora_files import ALL, lora, write_adapter
from tests.dist.reference import hf_outputs
from tests.tiny import nest, save_tiny, tiny_hf

# A value of every field of PEFT's LoraConfig that is not its default.
OTHERS: dict[str, list[Any]] = {
    "task_type": ["SEQ_CLS", None],
    "peft_type": ["IA3", "ADALORA"],
    "auto_mapping": [{"base_model_class": "X", "parent_library": "y"}],
    "peft_version": ["0.5.0"],
    "base_model_name_or_path": ["some/model"],
    "revision": ["main"],
    "inference_mode": [False],
    "r": [8],
    "target_modules": [
        ["q_proj"],
        "all-linear",
        r".*_proj",
        r"model\.layers\.\d+\.self_attn\.q_proj",
        ["model.layers.1.self_attn.o_proj"],
    ],
    "exclude_modules": [["q_proj"], r".*layers\.0.*"],
    "lora_alpha": [12],
    "lora_dropout": [0.1],
    "fan_in_fan_out": [True],
    "bias": ["all", "lora_only"],
    "use_rslora": [True],
    "modules_to_save": [["lm_head"]],
    "init_lora_weights": [
        *(False, None, "gaussian", "orthogonal", "pissa", "pissa_niter_4", "olora", "loftq"),
        *("eva", "corda", "lora_ga"),
    ],
    "layers_to_transform": [[0, 1], 1],
    "layers_pattern": ["layers"],
    "rank_pattern": [{"q_proj": 2}],
    "alpha_pattern": [{"q_proj": 2}],
    "megatron_config": [{"tensor_model_parallel_size": 2}],
    "megatron_core": ["megatron"],
    "trainable_token_indices": [[1, 2]],
    "loftq_config": [{"loftq_bits": 4}],
    "eva_config": [{"rho": 2.0}],
    "corda_config": [{"corda_method": "ipm"}],
    "lora_ga_config": [{"direction": "ArB2r"}],
    "use_dora": [True],
    "velora_config": [{"num_groups": 2}],
    "alora_invocation_tokens": [[5]],
    "use_qalora": [True],
    "qalora_group_size": [8],
    "monteclora_config": [{}, {"num_samples": 2}],
    "layer_replication": [[[0, 2], [1, 4]]],
    "runtime_config": [{"ephemeral_gpu_offload": True}],
    "lora_bias": [True],
    "target_parameters": [["mlp.experts.gate_up_proj"]],
    "use_bdlora": [True, {"nblocks": 2}],
    "arrow_config": [{"top_k": 2}],
    "kasa_config": [{"beta": 1.0}],
    "ensure_weight_tying": [True],
}
UNKNOWN = {"a_newer_kind": [None, False, {"x": 1}, True, "on"]}


def test_every_field_of_peft_is_here() -> None:
    assert {f.name for f in dataclasses.fields(peft.LoraConfig)} == OTHERS.keys()


def outputs(path: str, directories: list[str]) -> list[torch.Tensor | str]:
    """Returns the logprobs with each adapter, or the words of the ValueError."""
    found: list[torch.Tensor | str] = []
    for directory in directories:
        try:
            engine = make_engine(path, {}, lora=lora(adapter_path=directory))
        except ValueError as e:
            found.append(str(e))
        else:
            found.append(engine.forward(batch(), temperature=TEMPERATURE))
            engine.destroy()
    return found


def test_an_adapter_is_peft_s_or_refused(worlds: Any, models: Path, tmp_path: Path) -> None:
    path, cases = save_model(models, "qwen3", False), {}
    for key, values in (OTHERS | UNKNOWN).items():
        for i, value in enumerate(values):
            directory = Path(write_adapter(tmp_path / f"{key}{i}", path, lora()))
            file = directory / "adapter_config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
            cases[str(directory)] = key, value
    plain = write_adapter(tmp_path / "plain", path, lora(ALL))
    (found,) = worlds(1).run(outputs, path, [plain, *cases])
    taken = {}
    for (key, value), mine in zip(cases.values(), found[1:], strict=True):
        if isinstance(mine, str):
            assert key in mine and repr(value) in mine, mine
        else:
            taken.setdefault(key, []).append(value)
            assert torch.equal(mine, found[0]), (key, value)
    for directory, (key, value) in cases.items():
        # modules_to_save: PEFT does not load a file without the tensors of these modules
        if value in taken.get(key, ()) and key != "modules_to_save":
            want = hf_outputs(peft.PeftModel.from_pretrained(tiny_hf("qwen3"), directory), batch())
            torch.testing.assert_close(found[0], want["logprobs"], rtol=0, atol=1e-5, msg=key)
    assert {"lora_dropout", "base_model_name_or_path"} <= taken.keys()
    assert taken["init_lora_weights"] == [False, None, "gaussian", "orthogonal"]
    assert taken["a_newer_kind"] == [None, False]
    assert taken["target_modules"] == ["all-linear", r".*_proj"]


def logprobs(path: str, adapter: str) -> torch.Tensor:
    cfg = lora(("q_proj", "o_proj"), adapter_path=adapter)
    engine = make_engine(path, {}, trained=False, lora=cfg)
    found: torch.Tensor = engine.forward(batch())
    engine.destroy()
    return found


def test_an_adapter_of_a_language_model_fits_the_whole_and_the_other_way_round(
    world1: Any, tmp_path: Path
) -> None:
    """PEFT names an adapter by the modules of the class that was trained, of either model."""
    alone, whole = (str(save_tiny(tmp_path / name, "qwen3_5_text")) for name in ("alone", "whole"))
    nest(Path(whole), "Qwen3_5ForConditionalGeneration")
    cfg = lora(("q_proj", "o_proj"))
    adapters = [write_adapter(tmp_path / f"of-{Path(p).name}", p, cfg) for p in (alone, whole)]
    files = [load_file(Path(adapter) / "adapter_model.safetensors") for adapter in adapters]
    assert not files[0].keys() & files[1].keys()
    found = [world1.run(logprobs, p, a)[0] for p in (alone, whole) for a in adapters]
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert not torch.equal(found[0], world1.run(logprobs, alone, "")[0])
