"""The converter: HF -> dist -> HF is bit-exact, bounded in memory, checked first."""

from __future__ import annotations

import errno
import json
import os
import pickle
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megarl.ckpt.convert import dist2hf, hf2dist, inspect, verify
from megarl.ckpt.convert.rows import chunk_bytes, resident_bytes
from megarl.ckpt.files import read_info, write_marker
from megarl.ckpt.restricted import read_metadata
from megarl.utils.files import seal
from tests.files import read_all, same
from tests.hostile import Hostile
from tests.tiny import (
    HYBRID_KINDS,
    KINDS,
    MLA_KINDS,
    MOE_KINDS,
    OSS_KINDS,
    WINDOW_ROPE_KINDS,
    save_tiny,
    tiny_hf,
)

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = dict(part_bytes=60_000)  # several files even of a tiny model


CASES = [
    *(
        (k, False)
        for k in (*KINDS, *MOE_KINDS, *MLA_KINDS, *HYBRID_KINDS, *WINDOW_ROPE_KINDS, *OSS_KINDS)
    ),
    ("llama", True),
    ("qwen3", True),
    ("gemma3_text", True),
]


@pytest.mark.parametrize("i, kind, tie", [(i, *c) for i, c in enumerate(CASES)])
def test_there_and_back_is_bit_exact(tmp_path: Path, i: int, kind: str, tie: bool) -> None:
    a, ck, b = tmp_path / "a", tmp_path / "ck", tmp_path / "b"
    biased = (
        "deepseek_v3",
        "glm4_moe",
        "kimi_k2",
        "glm4_moe_lite",
    )  # their routers' biases stay fp32
    bf16 = i % 2 == 1 and kind not in biased
    save_tiny(a, kind, tie=tie, dtype=torch.bfloat16 if bf16 else torch.float32)
    (a / "tokenizer.json").write_text("{}")
    # chunks of one row of some tensors, and of several tensors
    with patch("megarl.ckpt.convert.write.chunk_bytes", return_value=5000):
        hf2dist(a, ck, workers=1 + i % 3, **SMALL)
        dist2hf(ck, b, workers=1 + i % 3, max_shard_bytes=100_000)
    same(a, b)
    assert verify(a, ck) == verify(ck, b) == []
    assert len(list(ck.glob("*.distcp"))) > 3 and len(list(b.glob("model-*"))) > 2
    assert (b / "tokenizer.json").read_text() == "{}"
    configs = [json.loads((d / "config.json").read_text()) for d in (a, b)]
    assert configs[0] == configs[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "ck"]


@pytest.mark.parametrize("name", ["Qwen2ForTokenClassification", "LlamaForSequenceClassification"])
def test_value_models(tmp_path: Path, name: str) -> None:
    a, ck, b = tmp_path / "a", tmp_path / "ck", tmp_path / "b"
    config = tiny_hf(name[:5].lower()).config
    config.num_labels = 1
    getattr(transformers, name)(config).save_pretrained(a)
    hf2dist(a, ck)
    assert "value model" in inspect(ck)["family"]
    dist2hf(ck, b)
    same(a, b)
    assert json.loads((b / "config.json").read_text())["architectures"] == [name]


def test_another_dtype_casts_all_but_buffers(tmp_path: Path) -> None:
    a = save_tiny(tmp_path / "a", "deepseek_v3")
    hf2dist(a, tmp_path / "ck", dtype=torch.bfloat16)
    dist2hf(tmp_path / "ck", tmp_path / "b")
    got = read_all(tmp_path / "b")
    for name, t in read_all(a).items():
        want = t if name.endswith("e_score_correction_bias") else t.bfloat16()
        assert got[name].dtype == want.dtype and torch.equal(got[name], want), name
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "bfloat16"
    worst = verify(a, tmp_path / "b")
    assert worst[0].worst > 0 and "torch.bfloat16" in str(worst[0])


def test_norms_stand_under_both_names_of_one_place(tmp_path: Path) -> None:
    hf2dist(save_tiny(tmp_path / "a", "qwen3"), tmp_path / "ck")
    metadata = read_metadata(tmp_path / "ck")
    where = {i.fqn: (s.relative_path, s.offset) for i, s in metadata.storage_data.items()}
    layer = "decoder.layers.2."
    fused, local = f"{layer}mlp.linear_fc1.layer_norm_weight", f"{layer}pre_mlp_layernorm.weight"
    assert where[fused] == where[local]


def test_verify_names_the_worst(tmp_path: Path) -> None:
    a, b = (save_tiny(tmp_path / x, "llama") for x in "ab")
    stored = load_file(b / "model.safetensors")
    stored["model.norm.weight"][3] += 0.5
    stored["model.layers.1.mlp.up_proj.weight"][1, 2] += 2.0
    stored["model.layers.2.mlp.up_proj.weight"][0, 0] = -0.0
    stored["lm_head.weight"][0, 0] = float("nan")
    save_file(stored, b / "model.safetensors", {"format": "pt"})
    hf2dist(b, tmp_path / "ck")
    found = verify(a, tmp_path / "ck")
    assert [d.name for d in found][:3] == [
        "lm_head.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.norm.weight",
    ]
    assert found[1].worst == pytest.approx(2.0) and "1 of 6144 numbers" in str(found[1])
    tied = save_tiny(tmp_path / "tied", "llama", tie=True)
    assert verify(a, tied)[0].name == "lm_head.weight"


def change_config(path: Path, **values: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    "values, words",
    [
        (dict(tie_word_embeddings=True), "lm_head.weight is not the embedding"),
        (dict(num_hidden_layers=3), "num_hidden_layers=3, the weights are of 4 layers"),
        (dict(num_hidden_layers=5), "num_hidden_layers=5, the weights are of 4 layers"),
        (dict(intermediate_size=100), "has shape"),
        (dict(vocab_size=131), "has shape"),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_a_config_of_other_weights_is_refused_before_anything_is_written(
    tmp_path: Path, values: dict[str, Any], words: str
) -> None:
    a = save_tiny(tmp_path / "a", "llama")
    hf2dist(a, tmp_path / "ck")
    change_config(a, **values)
    with pytest.raises(ValueError, match=words):
        hf2dist(a, tmp_path / "out")
    with pytest.raises(ValueError, match="is of another model than"):
        dist2hf(tmp_path / "ck", tmp_path / "out", base=a)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "ck"]


def test_what_cannot_be_converted_is_named(tmp_path: Path) -> None:
    a, ck = save_tiny(tmp_path / "a", "llama"), tmp_path / "ck"
    hf2dist(a, ck, **SMALL)
    with pytest.raises(ValueError, match="there already"):
        hf2dist(a, ck)
    marker = json.loads((ck / "megarl.json").read_text())
    for change, words in (({"lora": {"r": 8}}, "adapters"), ({"hf_config": None}, "--base")):
        changed = {k: v for k, v in marker.items() if k != "checksum"}
        text = json.dumps(seal({**changed, "info": {**marker["info"], **change}}))
        (ck / "megarl.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            dist2hf(ck, tmp_path / "b")
    dist2hf(ck, tmp_path / "b", base=a)
    same(a, tmp_path / "b")
    part = ck / "__0_1.distcp"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged"):
        dist2hf(ck, tmp_path / "c", base=a)
    stored = load_file(a / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    save_file(stored | {name: stored[name].half()}, a / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="--dtype"):
        hf2dist(a, tmp_path / "d")


@pytest.mark.parametrize("workers", (1, 3))
def test_a_failing_part_leaves_nothing_behind(tmp_path: Path, workers: int) -> None:
    a, ck = save_tiny(tmp_path / "a", "qwen2"), tmp_path / "ck"
    no_room = OSError(28, "No space left on device")
    with (
        patch("torch.save", side_effect=[None, None, no_room, *[None] * 99]),
        pytest.raises(OSError, match="No space"),
    ):
        hf2dist(a, ck, workers=workers, **SMALL)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    with (
        patch("shutil.disk_usage", return_value=shutil.disk_usage(tmp_path)._replace(free=1000)),
        pytest.raises(ValueError, match=r"are needed, the disk has 1000 B free; make room there"),
    ):
        hf2dist(a, ck, **SMALL)
    hf2dist(a, ck, **SMALL)
    assert verify(a, ck) == []


KILLED = """
import os, sys
import torch
from megarl.ckpt import convert
real, calls = torch.frombuffer, []
def counted(*args, **kw):
    calls.append(args)
    if len(calls) == 30:
        os.kill(os.getpid(), 9)
    return real(*args, **kw)
torch.frombuffer = counted
way, source, out = sys.argv[1:]
getattr(convert, way)(source, out, workers=1)
"""


def child(script: str, *args: Any, **env: str) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": str(ROOT), "MEGARL_DEVICE": "cpu", "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, args)],
        env=os.environ | env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


SLOW = """
import sys
import torch
from megarl.ckpt import convert
real = torch.save
def waiting(*args, **kw):
    if not sys.stdin.closed:
        print("begun", flush=True)
        sys.stdin.read()
        sys.stdin.close()
    return real(*args, **kw)
torch.save = waiting
convert.hf2dist(*sys.argv[1:], workers=1)
"""


def test_a_directory_is_for_one_conversion_at_a_time(tmp_path: Path) -> None:
    a, out = save_tiny(tmp_path / "a", "qwen3"), tmp_path / "out"
    env = {"PYTHONPATH": str(ROOT), "MEGARL_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(a), str(out)],
        env=os.environ | env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert first.stdout is not None and first.stdout.readline() == "begun\n"
        with pytest.raises(ValueError, match=f"{out}: another conversion works there"):
            hf2dist(a, out, **SMALL)
        hf2dist(a, tmp_path / "out2", **SMALL)  # another directory beside it
        first.communicate(timeout=60)
    finally:
        first.kill()
        first.wait()
    assert first.returncode == 0 and verify(a, out) == verify(a, tmp_path / "out2") == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "out", "out2"]
    with pytest.raises(ValueError, match="is there already"):
        hf2dist(a, out, **SMALL)


def test_file_systems_that_lock_otherwise(tmp_path: Path) -> None:
    """One has no locks; SMB's word for a lock that another holds is EACCES."""
    a = save_tiny(tmp_path / "a", "qwen3")
    held = patch("fcntl.flock", side_effect=OSError(errno.EACCES, "held"))
    with held, pytest.raises(ValueError, match="another conversion works there"):
        hf2dist(a, tmp_path / "out", **SMALL)
    with patch("fcntl.flock", side_effect=OSError(errno.ENOLCK, "no locks")):
        hf2dist(a, tmp_path / "out", **SMALL)
    assert verify(a, tmp_path / "out") == []


@pytest.mark.parametrize("way", ["hf2dist", "dist2hf"])
def test_a_killed_conversion_begins_anew(tmp_path: Path, way: str) -> None:
    a, ck, out = save_tiny(tmp_path / "a", "qwen3"), tmp_path / "ck", tmp_path / "out"
    hf2dist(a, ck, **SMALL)
    source = a if way == "hf2dist" else ck
    killed = child(KILLED, way, source, out)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not out.exists() and len(list(tmp_path.glob(".out.tmp-*"))) == 1
    hf2dist(a, out) if way == "hf2dist" else dist2hf(ck, out)
    assert verify(a, out) == [] and inspect(out)["complete"] == "yes"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "ck", "out"]


LARGE = """
import sys
from megarl.ckpt import convert
from megarl.ckpt.convert.rows import resident_bytes
limit = resident_bytes() + (12 << 20)
kw = dict(workers=2, max_memory=limit)
if sys.argv[1] == "hf2dist":
    convert.hf2dist(sys.argv[2], sys.argv[3], **kw)
else:
    convert.dist2hf(sys.argv[2], sys.argv[3], **kw)
status = dict(l.split(":", 1) for l in open("/proc/self/status"))
print(limit, int(status["VmHWM"].split()[0]) * 1024)
"""


def test_memory_stays_below_the_limit(tmp_path: Path) -> None:
    """An embedding of 48 MiB goes through 12."""
    a = save_tiny(tmp_path / "a", "llama", layers=1, vocab_size=96 << 10, hidden_size=128,
                  intermediate_size=1024, tie=True, num_attention_heads=8)  # fmt: skip
    for way, source, out in (("hf2dist", a, "ck"), ("dist2hf", tmp_path / "ck", "b")):
        ran = child(LARGE, way, source, tmp_path / out)
        assert ran.returncode == 0, ran.stderr
        limit, peak = map(int, ran.stdout.split())
        assert peak < limit + (4 << 20), (way, limit, peak)
    same(a, tmp_path / "b")


ADDRESSES = """
import resource, sys
from megarl.ckpt import convert
from megarl.ckpt.convert.rows import resident_bytes
room = int(sys.argv[4]) << 20
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
limit = resident_bytes() + (24 << 20)
getattr(convert, sys.argv[1])(sys.argv[2], sys.argv[3], workers=2, max_memory=limit)
"""


def test_less_address_space_than_the_model_is_enough(tmp_path: Path) -> None:
    """A model of 240 MiB, its largest tensor of 96, goes through 80 in both directions."""
    a = save_tiny(tmp_path / "a", "llama", layers=12, vocab_size=96 << 10, hidden_size=256,
                  intermediate_size=4096, tie=False, num_attention_heads=8)  # fmt: skip
    total = sum(f.stat().st_size for f in a.glob("*.safetensors"))
    assert total > 240 << 20
    for way, source, out in (("hf2dist", a, "ck"), ("dist2hf", tmp_path / "ck", "b")):
        ran = child(ADDRESSES, way, source, tmp_path / out, 80, MALLOC_ARENA_MAX="1")
        assert ran.returncode == 0, ran.stderr
    assert verify(a, tmp_path / "b") == []


def test_the_limit_counts_what_is_there_already() -> None:
    with pytest.raises(ValueError, match="give at least"):
        chunk_bytes(resident_bytes() + (1 << 20), 2)
    assert chunk_bytes(resident_bytes() + (40 << 20), 1) < 14 << 20
    with pytest.raises(ValueError, match="--workers 0"):
        chunk_bytes(1 << 40, 0)


def test_inspect_says_what_it_is(tmp_path: Path) -> None:
    a = save_tiny(tmp_path / "a", "mixtral")
    found = inspect(a)
    assert (found["what"], found["family"], found["complete"]) == (
        "a Hugging Face model", "mixtral", "yes",
    )  # fmt: skip
    hf2dist(a, tmp_path / "ck", **SMALL)
    found = inspect(tmp_path / "ck")
    assert (found["what"], found["layout"], found["optimizer state"]) == (
        "a dist checkpoint", "one rank", "no",
    )  # fmt: skip
    (tmp_path / "ck" / "__0_2.distcp").unlink()
    assert inspect(tmp_path / "ck")["complete"].startswith("no: ")
    (a / "model.safetensors").write_bytes(b"")
    assert inspect(a)["complete"].startswith("no: ")
    assert inspect(tmp_path / "ck" / "..")["models"] == "ck/"  # as a run's recover/step_000004
    assert inspect(tmp_path)["complete"].startswith("ck/ no: ")
    (tmp_path / "none").mkdir()
    assert inspect(tmp_path / "none")["what"].startswith("neither")


def test_no_command_runs_what_a_hostile_file_names(tmp_path: Path) -> None:
    a, ck, ran = save_tiny(tmp_path / "a", "llama", layers=1), tmp_path / "ck", tmp_path / "ran"
    hf2dist(a, ck)
    info = read_info(ck)
    good = (ck / ".metadata").read_bytes()
    deep = pickle.loads(good)  # the object stands where a tensor's description should
    deep.state_dict_metadata["evil"] = Hostile(ran)
    for content in (pickle.dumps(Hostile(ran)), pickle.dumps(deep)):
        (ck / ".metadata").write_bytes(content)
        write_marker(ck, info)  # whoever writes the file can write its checksum
        said = inspect(ck)["complete"]
        assert said.startswith("no: ") and "mkdir is not allowed" in said
        for command in (lambda: verify(a, ck), lambda: dist2hf(ck, tmp_path / "b")):
            with pytest.raises(ValueError, match="mkdir is not allowed"):
                command()
        assert not ran.exists()
    (ck / ".metadata").write_bytes(good)
    write_marker(ck, info)
    assert verify(a, ck) == []


def test_flipped_bytes_are_seen_in_every_file(tmp_path: Path) -> None:
    a, ck = save_tiny(tmp_path / "a", "llama", layers=1), tmp_path / "ck"
    hf2dist(a, ck)
    files = [f for f in ck.rglob("*") if f.is_file()]
    assert {".metadata", "common.pt", "metadata.json", "megarl.json"} <= {f.name for f in files}
    for file in files:
        content = file.read_bytes()
        at = len(content) // 3
        file.write_bytes(content[:at] + bytes(b ^ 0x11 for b in content[at : at + 64])
                         + content[at + 64 :])  # fmt: skip
        assert inspect(ck)["complete"][:2] == "no", file
        with pytest.raises(ValueError, match=r"megarl\.json|damaged"):
            dist2hf(ck, tmp_path / "b")
        file.write_bytes(content)
    assert inspect(ck)["complete"] == "yes"
    marker = json.loads((ck / "megarl.json").read_text())
    del marker["checksum"]
    (ck / "megarl.json").write_text(json.dumps(marker))
    assert inspect(ck)["complete"][:2] == "no"


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, ck, b = (str(tmp_path / x) for x in ("a", "ck", "b"))
    save_tiny(Path(a), "qwen2", layers=2)
    main = runpy.run_path(str(ROOT / "tools" / "convert_ckpt.py"))["main"]
    assert main(["hf2dist", "--hf", a, "--out", ck, "--max-memory", "64G"]) == 0
    assert capsys.readouterr().out == f"{ck}\n"
    assert main(["dist2hf", "--dist", ck, "--out", b, "--max-shard-size", "100K"]) == 0
    assert len(list(Path(b).glob("model-*.safetensors"))) > 2
    assert main(["verify", a, b]) == 0 and main(["inspect", b]) == 0
    save_tiny(tmp_path / "other", "qwen2", layers=2, seed=1)
    assert main(["verify", str(tmp_path / "other"), b]) == 1
    assert main(["hf2dist", "--hf", str(tmp_path), "--out", f"{tmp_path}/c"]) == 2
    assert "error: no config.json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["hf2dist", "--hf", a, "--out", b, "--max-memory", "much"])
    with pytest.raises(SystemExit):
        main(["hf2dist", "--hf", a, "--out", b, "--check-logits"])
    assert "by verify" in capsys.readouterr().err


def test_a_checkpoint_of_a_run_is_its_only_model(tmp_path: Path) -> None:
    model, step = save_tiny(tmp_path / "model", "qwen3"), tmp_path / "recover" / "step_000005"
    hf2dist(model, step / "actor", **SMALL)
    found = inspect(step)
    assert (found["models"], found["complete"]) == ("actor/", "yes")
    dist2hf(step, tmp_path / "out")
    assert verify(model, tmp_path / "out") == verify(step, model) == []
    hf2dist(model, step / "critic", **SMALL)
    with pytest.raises(ValueError, match=r"step_000005/actor.*step_000005/critic"):
        dist2hf(step, tmp_path / "other")


def test_an_adapter_is_refused_with_its_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    with pytest.raises(ValueError, match="some/base") as e:
        hf2dist(tmp_path, tmp_path / "out", **SMALL)
    assert str(tmp_path) in str(e.value) and "adapter_path" not in str(e.value)
