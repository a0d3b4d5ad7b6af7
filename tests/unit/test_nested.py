"""Language models inside a whole: text_config, names of their own, a vision tower beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megarl.ckpt.convert import dist2hf, hf2dist, verify
from megarl.ckpt.hf import load_hf
from megarl.ckpt.peft import merge_peft
from megarl.ckpt.safetensors import SINGLE
from megarl.cli.rehearse.small import shrink_model, write_model
from megarl.config.engine import LoRAConfig
from megarl.models.hf_config import read_hf_config, transformers_config
from megarl.models.lora import adapter_table
from megarl.models.piece_table import build_piece_table
from megarl.parallel.layout import Layout
from megarl.server.adapters import Adapters
from megarl.server.args import ServerArgs
from megarl.server.runner import ModelRunner
from megarl.server.weights import WeightStore
from tests.files import read_all, same
from tests.tiny import nest, save_tiny, tiny_hf

KIMI = "KimiK25ForConditionalGeneration"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the language model alone, the whole)."""
    root = tmp_path_factory.mktemp("nested")
    alone, whole = (save_tiny(root / name, "kimi_k2", layers=2) for name in ("alone", "whole"))
    return alone, nest(whole, KIMI)


def params(path: Path, head: str = "lm") -> dict[str, torch.Tensor]:
    table = build_piece_table(read_hf_config(path, head=head), Layout())
    shapes = table.local_params(Layout().coords(0))
    values = {n: torch.full(p.shape, torch.nan) for n, p in shapes.items()}
    load_hf(path, table, Layout(), 0, values)
    return values


@pytest.mark.parametrize("head", ("lm", "value"))
def test_a_whole_is_read_as_its_language_model(pair: tuple[Path, Path], head: str) -> None:
    alone, whole = (read_hf_config(path, head=head) for path in pair)
    assert whole.wrapper is not None and whole.wrapper.architecture == KIMI
    assert replace(whole, wrapper=None) == alone and whole.meaning() == alone.meaning()
    a, b = (params(path, head) for path in pair)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name, kind", (("", "_text"), ("Moe", "_moe_text")))
def test_a_language_model_that_transformers_took_out_of_a_whole_is_read(
    name: str, kind: str, tmp_path: Path
) -> None:
    """transformers saves it with the config of the language model and the names of the whole."""
    text = tiny_hf(f"qwen3_5{kind}", layers=2)
    vision = dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64,
        patch_size=4, num_position_embeddings=16,
    )  # fmt: skip
    config = getattr(transformers, f"Qwen3_5{name}Config")(
        text_config=text.config.to_dict(), vision_config=vision
    )
    whole = getattr(transformers, f"Qwen3_5{name}ForConditionalGeneration")(config).float()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path / "whole")
    taken = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    taken.save_pretrained(tmp_path / "taken")
    text.save_pretrained(tmp_path / "alone")
    assert "model.language_model.norm.weight" in read_all(tmp_path / "taken")
    want, have = (params(tmp_path / path) for path in ("alone", "taken"))
    assert want.keys() == have.keys() and all(torch.equal(want[n], have[n]) for n in want)
    hf2dist(tmp_path / "taken", tmp_path / "ck")
    dist2hf(tmp_path / "ck", tmp_path / "back")
    same(tmp_path / "alone", tmp_path / "back")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, taken(ids).logits)


@pytest.mark.parametrize("kind", ("kimi_k2", "gemma3_text", "qwen3_5_text"))
@pytest.mark.parametrize("named", ("whole", "alone"))
def test_a_flat_config_is_the_language_models(kind: str, named: str, tmp_path: Path) -> None:
    """As in transformers the model_type decides, whichever model `architectures` names; tensors
    have the names of either."""
    alone, whole = (save_tiny(tmp_path / name, kind, layers=2) for name in ("alone", "whole"))
    nest(whole, WHOLES[kind][0])
    raw = json.loads((alone / "config.json").read_text())
    flat = json.dumps(raw | {"architectures": [WHOLES[kind][0]]})
    (tmp_path / named / "config.json").write_text(flat)
    m = read_hf_config(tmp_path / named)
    assert m.wrapper is None and m.family == kind
    have = params(tmp_path / named)
    (alone / "config.json").write_text(json.dumps(raw))
    want = params(alone)
    assert want.keys() == have.keys() and all(torch.equal(want[n], have[n]) for n in want)


def test_a_whole_takes_tensors_that_have_the_language_models_names(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    alone, whole = pair
    tensors = load_file(alone / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((whole / "config.json").read_text())
    want, have = params(whole), params(tmp_path)
    assert want.keys() == have.keys() and all(torch.equal(want[n], have[n]) for n in want)


def test_there_and_back_keeps_what_is_beside(pair: tuple[Path, Path], tmp_path: Path) -> None:
    _, whole = pair
    hf2dist(whole, tmp_path / "ck")
    for name, size in (("one", 1 << 30), ("many", 60_000)):
        dist2hf(tmp_path / "ck", tmp_path / name, max_shard_bytes=size)
        same(whole, tmp_path / name)
        files = sorted(path.name for path in (tmp_path / name).glob("*.safetensors"))
        assert files[-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
        assert read_hf_config(tmp_path / name).raw == read_hf_config(whole).raw
        assert verify(whole, tmp_path / name) == []


def test_a_model_saved_in_another_dtype_says_so_twice(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    hf2dist(pair[1], tmp_path / "ck", dtype=torch.bfloat16)
    dist2hf(tmp_path / "ck", tmp_path / "b")
    raw = read_hf_config(tmp_path / "b").raw
    assert raw["dtype"] == raw["text_config"]["dtype"] == "bfloat16"
    assert read_all(tmp_path / "b")["vision_tower.ids"].dtype == torch.int64


def test_a_value_model_of_a_whole_is_read_back(pair: tuple[Path, Path], tmp_path: Path) -> None:
    m = read_hf_config(pair[1], head="value")
    (tmp_path / "config.json").write_text(json.dumps(m.raw))
    assert m.raw["architectures"] == ["KimiK25ForTokenClassification"]
    again = read_hf_config(tmp_path, head="value")
    assert again == m and not again.new_head
    names = {t.name for t in build_piece_table(again, Layout()).tensors}
    assert {"score.weight", "language_model.model.norm.weight"} <= names


def test_overridden_keys_go_into_text_config(pair: tuple[Path, Path]) -> None:
    _, whole = pair
    override = {"text_config": {"rms_norm_eps": 0.25}}
    m = read_hf_config(whole, override=override)
    assert m.rms_norm_eps == m.raw["text_config"]["rms_norm_eps"] == 0.25
    assert m.raw["text_config"]["hidden_size"] == m.hidden_size == 64
    assert transformers_config(whole, override).rms_norm_eps == 0.25
    with pytest.raises(ValueError, match=r"write override_config\.text_config\.rms_norm_eps"):
        read_hf_config(whole, override={"rms_norm_eps": 0.25})


@pytest.mark.parametrize(
    "change, words",
    (
        ({"text_config": None}, "text_config=None; expected the language model's settings"),
        ({"quantization_config": {"bits": 4}}, "dequantise the checkpoint first"),
        ({"dtype": "float64"}, "dtype 'float64' is not supported"),
    ),
)
def test_what_a_whole_says_otherwise_is_refused(
    pair: tuple[Path, Path], tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    raw = dict(read_hf_config(pair[1]).raw) | change
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=words):
        read_hf_config(tmp_path)


def test_the_whole_decides_whether_embeddings_are_tied(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """As transformers' ForConditionalGeneration classes do."""
    raw = dict(read_hf_config(pair[1]).raw) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_hf_config(tmp_path).tie_word_embeddings
    tensors = load_file(pair[1] / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"language_model\.lm_head\.weight is not"):
        params(tmp_path)


def test_an_unknown_tensor_of_the_language_model_is_refused(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    tensors = load_file(pair[1] / "model.safetensors")
    tensors["language_model.model.layers.0.extra"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((pair[1] / "config.json").read_text())
    with pytest.raises(ValueError, match=r"the first is language_model\.model\.layers\.0\.extra"):
        params(tmp_path)


def test_the_server_has_the_language_model_under_the_names_of_the_whole(
    pair: tuple[Path, Path],
) -> None:
    _, whole = pair
    runner = ModelRunner(ServerArgs(model_path=str(whole), dtype="float32", device="cpu"))
    want = tiny_hf("kimi_k2", layers=2).state_dict()
    assert all(torch.equal(want[n], t) for n, t in runner.model.state_dict().items())
    store = WeightStore(runner.model, runner.wrapper)
    table = build_piece_table(read_hf_config(whole), Layout())
    assert store.tensors.keys() == {t.name for t in table.tensors}
    store.tensors["language_model.model.norm.weight"].zero_()
    store.load_directory(str(whole))
    assert all(torch.equal(want[n], t) for n, t in runner.model.state_dict().items())


def test_a_whole_has_a_small_one_to_rehearse_with(pair: tuple[Path, Path], tmp_path: Path) -> None:
    raw = shrink_model(read_hf_config(pair[1]).raw, layers=2)
    write_model(raw, tmp_path / "small", head="lm", seed=0)
    values = params(tmp_path / "small")
    assert all(value.isfinite().all() for value in values.values())
    assert read_hf_config(tmp_path / "small").wrapper == read_hf_config(pair[1]).wrapper


WHOLES = {
    "kimi_k2": (KIMI, transformers.Kimi_K25ForConditionalGeneration),
    "gemma3_text": ("Gemma3ForConditionalGeneration", transformers.Gemma3ForConditionalGeneration),
    "qwen3_5_text": (
        "Qwen3_5ForConditionalGeneration",
        transformers.Qwen3_5ForConditionalGeneration,
    ),
}


@pytest.mark.parametrize("kind", WHOLES)
def test_adapters_have_the_names_of_the_modules(kind: str, tmp_path: Path) -> None:
    """PEFT goes by modules, whose names within a whole are not those of published tensors."""
    name, whole_class = WHOLES[kind]
    path = nest(save_tiny(tmp_path, kind, layers=2), name)
    text = transformers_config(path).to_dict()
    with torch.device("meta"):
        whole = whole_class(whole_class.config_class(text_config=text))
    modules = {
        f"base_model.model.{n}.lora_{x}.weight"
        for n, module in whole.named_modules()
        if isinstance(module, torch.nn.Linear) and "language_model" in n and "o_proj" in n
        for x in "AB"
    }
    targets = LoRAConfig(r=2, target_modules=["o_proj"])
    table = adapter_table(read_hf_config(path), Layout(), targets)
    assert modules == {t.name for t in table.tensors} != set()


def write_adapter(folder: Path, names_of: Path) -> Path:
    """Writes an adapter of ones of the o_proj modules, named as in the model at `names_of`."""
    cfg = LoRAConfig(r=2, target_modules=["o_proj"])
    table = adapter_table(read_hf_config(names_of), Layout(), cfg)
    folder.mkdir()
    ones = {t.name: torch.ones(t.shape) for t in table.tensors}
    save_file(ones, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", WHOLES)
def test_an_adapter_has_the_names_of_the_whole_or_of_its_language_model(
    kind: str, tmp_path: Path
) -> None:
    """An adapter trained on one fits the other, in a server and merged for an evaluation. "taken"
    has the config of the language model and the tensors of the whole, as transformers saves it."""
    alone, whole, taken = (
        save_tiny(tmp_path / name, kind, layers=2) for name in ("alone", "whole", "taken")
    )
    config = (taken / "config.json").read_text()
    for path in (whole, taken):
        nest(path, WHOLES[kind][0])
    (taken / "config.json").write_text(config)
    tensors = load_file(taken / SINGLE)
    inside = {n: tensors[n] for n in tensors if "language_model" in n or n == "lm_head.weight"}
    save_file(inside, taken / SINGLE, {"format": "pt"})
    adapters = [write_adapter(tmp_path / f"adapter{i}", p) for i, p in enumerate((alone, whole))]
    for adapter, base in product(adapters, (alone, whole, taken)):
        out = tmp_path / f"{adapter.name}-{base.name}"
        out.mkdir()
        merge_peft(base, adapter, out)
        before, after = (load_file(path / SINGLE) for path in (base, out))
        changed = {n for n, t in after.items() if not torch.equal(t, before[n])}
        assert changed == {n for n in before if n.endswith("o_proj.weight")} != set()
        assert all(torch.allclose(after[n], before[n] + 2.0) for n in changed)
    for base in (alone, whole):
        runner = ModelRunner(ServerArgs(model_path=str(base), dtype="float32", device="cpu"))
        store = WeightStore(runner.model, runner.wrapper)
        for adapter in adapters:
            loaded = Adapters(store)
            loaded.load("v1", str(adapter))
            want = load_file(tmp_path / f"{adapter.name}-{base.name}" / SINGLE)
            assert all(torch.equal(t, want[n]) for n, t in store.tensors.items())
            loaded.forget()
        store.load_directory(str(taken if base == alone else alone))
