"""Files of others run nothing: an attacker's file beside a model or data (docs/security.md)."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from megarl.ckpt.safetensors import SafetensorsDir
from megarl.config.dataset import DatasetConfig
from megarl.data.sources import load_rows
from megarl.data.tokenizer import load_hf_tokenizer
from megarl.models.hf_config import read_hf_config
from megarl.trainer.recover import AnswersFile
from tests.hostile import Hostile
from tests.tiny import save_tiny
from tests.tiny_tokenizer import save_tokenizer


@pytest.fixture
def mark(tmp_path: Path):
    """A directory that is made where an attacker's code runs."""
    path = tmp_path / "attacked"
    pickle.loads(pickle.dumps(Hostile(path)))
    path.rmdir()  # it works
    yield path
    assert not path.exists()


def open_weights(path: Path) -> None:
    with SafetensorsDir(path):
        pass


def code(mark: Path) -> str:
    return f"from pathlib import Path\nPath({str(mark)!r}).mkdir()\n"


def test_code_beside_a_tokenizer_runs_where_it_is_allowed_alone(tmp_path, mark):
    model = tmp_path / "model"
    model.mkdir()
    save_tokenizer(model)
    own = "from transformers import PreTrainedTokenizerFast as Fast\nclass Own(Fast): pass\n"
    (model / "own.py").write_text(code(mark) + own)
    file = model / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {
        "tokenizer_class": "Own",
        "auto_map": {"AutoTokenizer": [None, "own.Own"]},
    }
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="read that code, then set trust_remote_code=true"):
        load_hf_tokenizer(str(model))
    assert not mark.exists()
    assert type(load_hf_tokenizer(str(model), trust_remote_code=True)).__name__ == "Own"
    mark.rmdir()  # it ran, as it may


def test_code_beside_a_model_does_not_run(tmp_path, mark):
    model = save_tiny(tmp_path / "model", "qwen3", layers=1)
    (model / "modeling_own.py").write_text(code(mark))
    file = model / "config.json"
    auto_map = {"AutoConfig": "modeling_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": auto_map}))
    assert read_hf_config(model).num_layers == 1


def test_pickled_weights_are_named_and_not_read(tmp_path, mark):
    model = save_tiny(tmp_path / "model", "qwen3", layers=1)
    for file in model.glob("*.safetensors"):
        file.unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile(mark)))
    with pytest.raises(ValueError, match=r"it holds pytorch \.bin weights"):
        open_weights(model)


@pytest.mark.parametrize("name", ["rows", "rows.jsonl"])
def test_code_beside_data_does_not_run(name, tmp_path, mark):
    """A loading script, as `datasets` once took them, or a file that is no text at all."""
    rows = tmp_path / name
    if name == "rows":
        rows.mkdir()
        (rows / "rows.py").write_text(code(mark))
    else:
        rows.write_bytes(pickle.dumps(Hostile(mark)))
    with pytest.raises(ValueError, match=str(rows)):
        load_rows(DatasetConfig(type="chat", path=str(rows)), seed=1)


def test_answers_that_are_more_than_data_are_removed_unread(tmp_path, mark):
    path = tmp_path / "answers.pt"
    path.write_bytes(pickle.dumps(Hostile(mark)))
    assert AnswersFile(path, None, None).read(0) is None
    assert not path.exists()


def test_a_path_of_the_configuration_is_not_executed(tmp_path, mark):
    """A program given in the place of a model, a tokenizer or a dataset is read, and refused."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nmkdir {mark}\n")
    program.chmod(0o755)
    for read in (read_hf_config, open_weights, lambda p: load_hf_tokenizer(str(p))):
        with pytest.raises((ValueError, OSError)):
            read(program)
    with pytest.raises(ValueError):
        load_rows(DatasetConfig(type="chat", path=str(program)), seed=1)
