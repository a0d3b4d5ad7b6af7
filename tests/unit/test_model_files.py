"""The files of a model directory against its config.json, and what a save must not replace."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.ckpt.hf import load_hf
from megarl.ckpt.safetensors import INDEX, SINGLE, SafetensorsDir
from megarl.models.hf_config import read_hf_config
from megarl.models.piece_table import build_piece_table
from megarl.parallel.layout import Layout
from megarl.utils.files import put_in_place, stage
from tests.tiny import save_tiny


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
