"""The files of a model directory against its config.json, and what a save must not replace."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.ckpt.convert import dist2hf, hf2dist
from megarl.ckpt.hf import copy_beside, load_hf, write_sidecars
from megarl.ckpt.peft import merge_peft
from megarl.ckpt.safetensors import INDEX, SINGLE, SafetensorsDir
from megarl.models.hf_config import read_hf_config
from megarl.models.piece_table import build_piece_table
from megarl.parallel.layout import Layout
from megarl.utils.files import put_in_place, stage
from tests.tiny import nest, save_tiny


def load(path: Path, head: str = "lm") -> dict[str, torch.Tensor]:
    """All parameters of the model in `path`, on one rank."""
    layout = Layout()
    table = build_piece_table(read_hf_config(path, head=head), layout)
    shapes = table.local_params(layout.coords(0))
    params = {n: torch.full(p.shape, torch.nan) for n, p in shapes.items()}
    load_hf(path, table, layout, 0, params)
    return params


def change(path: Path, **values: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_head_unlike_the_embedding_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    path = save_tiny(tmp_path, "llama", layers=1)
    change(path, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"tie_word_embeddings=true, but lm_head\.weight is not"):
        load(path)
    load(path, head="value")  # has no use for either
    stored = load_file(path / SINGLE)
    for head, fits in (
        (stored["model.embed_tokens.weight"].clone(), True),
        (stored["model.embed_tokens.weight"].index_fill(0, torch.tensor(129), 0.5), False),
        (stored["model.embed_tokens.weight"][:-1].clone(), False),
    ):
        save_file({**stored, "lm_head.weight": head}, path / SINGLE, {"format": "pt"})
        if fits:
            load(path)
            continue
        with pytest.raises(ValueError, match="is not the embedding"):
            load(path)


@pytest.mark.parametrize("kind", ("llama", "deepseek_v3"))
@pytest.mark.parametrize("layers", (2, 4))
def test_another_number_of_layers_is_named(tmp_path: Path, kind: str, layers: int) -> None:
    """DeepSeek's last layer is not taken for one that predicts further tokens."""
    path = save_tiny(tmp_path, kind, layers=3)
    change(path, num_hidden_layers=layers)
    words = f"num_hidden_layers={layers}, the weights are of 3 layers"
    with pytest.raises(ValueError, match=words):
        load(path)


def test_one_file_beside_an_index_of_others_is_refused_with_both_named(tmp_path: Path) -> None:
    """transformers reads the one, SGLang the others."""
    path = save_tiny(tmp_path / "a", "llama", layers=1)
    other = AutoModelForCausalLM.from_pretrained(path)
    (path / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(load_file(path / SINGLE), SINGLE)})
    )
    load(path)  # the same file
    with torch.no_grad():
        other.model.norm.weight += 1.0
    other.save_pretrained(tmp_path / "b", max_shard_size="20KB")
    for file in (tmp_path / "b").glob("model*"):
        shutil.copy(file, path)
    found = AutoModelForCausalLM.from_pretrained(path)
    assert not torch.equal(found.model.norm.weight, other.model.norm.weight)
    with pytest.raises(ValueError, match=rf"both {SINGLE} and {INDEX} \(of \d+ files\) are"):
        load(path)


def test_an_adapter_given_as_a_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ValueError, match="holds a PEFT adapter, not a model"):
        read_hf_config(tmp_path)
    with (
        pytest.raises(ValueError, match="holds a PEFT adapter, not a model"),
        SafetensorsDir(tmp_path),
    ):
        pass


def test_saving_onto_a_link_is_refused_and_takes_nothing_away(tmp_path: Path) -> None:
    real, link = tmp_path / "step_1", tmp_path / "latest"
    real.mkdir()
    (real / "config.json").write_text("{}")
    link.symlink_to(real.name)
    with pytest.raises(
        ValueError, match=r"cannot save to .*/latest: it is a link to step_1; remove"
    ):
        stage(link)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_1"]
    beyond = tmp_path / "linked_folder"
    beyond.symlink_to(real)
    put_in_place(stage(beyond / "new"), beyond / "new")  # below a link is another matter
    assert (real / "new").is_dir()


SIDECARS = (
    "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "modeling_own.py", "layers/__init__.py", "layers/own/mlp.py",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "tokenizer.model.v3",
    "tokenizer.model.v7m1", "own.tiktoken", "tekken.json", "chat_template.jinja",
    "chat_template.json", "additional_chat_templates/rag.jinja", "chat_templates/tools.jinja",
)  # fmt: skip
LEFT = ("README.md", ".git/hooks.py", "pytorch_model.bin", "trainer_state.json", "layers/data.bin")


@pytest.mark.parametrize("way", ("saved", "converted", "merged"))
def test_files_that_tokenizers_processors_and_servers_need_are_kept(
    tmp_path: Path, way: str
) -> None:
    base, out = save_tiny(tmp_path / "a", "llama", layers=1), tmp_path / "out"
    adapter = tmp_path / "adapter"
    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(adapter)
    for name in (*SIDECARS, *LEFT):
        (base / name).parent.mkdir(exist_ok=True, parents=True)
        (base / name).write_text(f"{name} of the base")
    if way == "converted":
        hf2dist(base, tmp_path / "dist")
        dist2hf(tmp_path / "dist", out)
    elif way == "saved":
        out.mkdir()
        write_sidecars(out, base, None)
    else:
        out.mkdir()
        merge_peft(base, adapter, out)
        assert (out / "config.json").read_text() == (base / "config.json").read_text()
    for name in SIDECARS:
        assert (out / name).read_text() == (base / name).read_text(), name
    assert not any((out / name).exists() for name in LEFT)


# of a number, in the format's order
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


def test_a_vision_tower_of_any_dtype_is_kept_to_the_bit(tmp_path: Path) -> None:
    """A copy that cannot be written would fail at the end of a training."""
    path = nest(save_tiny(tmp_path / "a", "kimi_k2", layers=2), "KimiK25ForConditionalGeneration")
    (path / SINGLE).rename(path / "a.safetensors")
    shape, data = (3, 8), {}
    for i, (dtype, bits) in enumerate(BITS.items()):
        numbers = range(i, i + 3 * bits)  # bytes of 24 numbers
        data[f"vision_tower.{dtype.lower()}"] = (dtype, bytes(n % 2 for n in numbers))
    write_raw(path / "b.safetensors", {n: (dtype, shape, d) for n, (dtype, d) in data.items()})
    index = dict.fromkeys(load_file(path / "a.safetensors"), "a.safetensors")
    index |= dict.fromkeys(data, "b.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": index}))
    load(path)
    table = build_piece_table(read_hf_config(path), Layout())
    names = {m.name for m in copy_beside(tmp_path / SINGLE, table, path)}
    assert names == {n for n in index if not n.startswith("language_model.")}
    with SafetensorsDir(tmp_path) as copied, safe_open(tmp_path / SINGLE, "pt") as library:
        for name, (dtype, want) in data.items():
            s = copied.stored(name)
            have = s.file.read_bytes()[s.offset : s.offset + len(want)]
            assert (s.dtype, s.shape, have) == (dtype, shape, want), name
            if not dtype.startswith("F6"):  # torch has no such dtype
                assert library.get_tensor(name).nbytes == len(want)


def write_raw(file: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """Writes a safetensors file of (dtype, shape, bytes) by name."""
    header, data = {}, b""
    for name, (dtype, shape, numbers) in tensors.items():
        offsets = [len(data), len(data) + len(numbers)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += numbers
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


BAD: list[Any] = [None, "x", -1, 0.5, True, [], ["x"], {}, {"a": 1}, float("nan")]


@pytest.mark.parametrize(
    "kind", ("llama", "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3", "glm4")
)
def test_a_config_with_any_wrong_value_is_read_or_refused_by_name(
    tmp_path: Path, kind: str
) -> None:
    """Never a TypeError from somewhere inside."""
    raw = json.loads((save_tiny(tmp_path, kind, layers=2) / "config.json").read_text())
    for key in raw:
        for value in BAD:
            (tmp_path / "config.json").write_text(json.dumps({**raw, key: value}))
            try:
                read_hf_config(tmp_path)
            except ValueError as e:
                assert "config.json: " in str(e) and "\n" not in str(e), (key, value, str(e))
