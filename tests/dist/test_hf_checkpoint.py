"""HF -> sharded parameters -> HF, bit for bit; the directory around them; readable errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from megarl.ckpt.hf import load_hf, save_hf
from megarl.models.hf_config import read_hf_config
from megarl.models.params import named_params
from megarl.models.piece_table import build_piece_table
from megarl.parallel.layout import Layout
from megarl.transfer.gather import BucketGatherer, plan_buckets
from tests.dist.models_util import built_model
from tests.dist.world import World
from tests.files import read_all, same
from tests.tiny import nest, save_tiny

Parallel = dict[str, Any]
# without a degree, the ranks are data-parallel
TWO: tuple[Parallel, ...] = (
    dict(tp=2),
    dict(pp=2),
    {},
    dict(tp=2, sequence_parallel=True),
    dict(pp=2, pipeline_split=[1, 3]),
)
FOUR: tuple[Parallel, ...] = (
    dict(tp=2, pp=2),
    dict(pp=2, vpp=2),
    dict(tp=4),
    dict(pp=4),
    dict(cp=2, tp=2),
)


def run_round_trip(
    source: Path, target: Path, parallel: dict[str, Any], held: torch.dtype, **kw: Any
) -> bool:
    """Loads as `held`, saves, and returns whether this rank's vocabulary padding is zero."""
    divisible = kw.pop("vocab_divisible_by", 8)
    with built_model(source, parallel, dtype=held, vocab_divisible_by=divisible) as (model, groups):
        params = named_params(model.chunks)
        save_hf(target, model.table, groups.layout, groups.rank, params, **kw)
        local = model.table.local_params(groups.coords)
        return all(
            params[n].detach()[slice(*p.padding)].eq(0).all().item() for n, p in local.items()
        )


# every family, tied or not, dtype and layout at least once; every layout in both dtypes
@pytest.mark.parametrize("i", range(len(TWO) + len(FOUR)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_round_trip_is_bit_exact(
    world2: World, world4: World, i: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    parallel: dict[str, Any] = (*TWO, *FOUR)[i]
    kind = ("llama", "qwen2", "qwen3", "glm", "glm4")[(i + (dtype == torch.float32)) % 5]
    source = save_tiny(tmp_path / "a", kind, tie=i % 2 == 0, dtype=dtype)
    world = world2 if i < len(TWO) else world4
    zero = world.run(
        run_round_trip, source, tmp_path / "b", parallel, dtype,
        base_model_path=source, vocab_divisible_by=128 if i % 3 == 0 else 8,
        bucket_bytes=1 << (12 + i), max_shard_bytes=1 << (14 + i),
    )  # fmt: skip
    assert all(zero)
    same(source, tmp_path / "b")


@pytest.mark.parametrize(
    "kind, architecture",
    [
        ("kimi_k2", "KimiK25ForConditionalGeneration"),
        ("qwen3_5_moe_text", "Qwen3_5MoeForConditionalGeneration"),
    ],
)
def test_a_saved_whole_has_what_its_base_has_beside(
    world2: World, tmp_path: Path, kind: str, architecture: str
) -> None:
    whole = nest(save_tiny(tmp_path / "a", kind), architecture)
    kw: dict[str, Any] = dict(bucket_bytes=30_000, max_shard_bytes=60_000)
    layout, run = dict(tp=2, sequence_parallel=True), run_round_trip
    assert all(
        world2.run(run, whole, tmp_path / "b", layout, torch.float32, base_model_path=whole, **kw)
    )
    same(whole, tmp_path / "b")
    assert all(world2.run(run, whole, tmp_path / "c", dict(pp=2), torch.float32, **kw))
    prefixes = ("vision_tower.", "model.visual.", "mtp.")
    text = {n: t for n, t in read_all(whole).items() if not n.startswith(prefixes)}
    alone = read_all(tmp_path / "c")
    assert alone.keys() == text.keys() and all(torch.equal(t, text[n]) for n, t in alone.items())
    for name in "bc":
        assert read_hf_config(tmp_path / name).raw == read_hf_config(whole).raw


@contextmanager
def weight_files_opened(then: Callable[[str], object]) -> Iterator[None]:
    """Calls `then` with the name of a weight file whenever this rank opens it to write."""
    real = Path.open

    def opened(path: Path, mode: str = "r", *args: Any, **kw: Any) -> Any:
        if path.suffix == ".safetensors" and mode not in ("r", "rb"):
            then(path.name)
        return real(path, mode, *args, **kw)

    with patch.object(Path, "open", opened):
        yield


def run_recorded(*args: Any, **kw: Any) -> list[str]:
    """Runs run_round_trip; returns the files that this rank wrote."""
    written: set[str] = set()
    with weight_files_opened(written.add):
        assert run_round_trip(*args, **kw)
    return sorted(written)


def test_every_rank_writes_and_the_layout_does_not_show(
    world2: World, world4: World, tmp_path: Path
) -> None:
    source = save_tiny(tmp_path / "a", "qwen3_moe")
    kw: dict[str, Any] = dict(bucket_bytes=30_000, max_shard_bytes=60_000)
    layouts = ((world2, dict(tp=2, sequence_parallel=True)), (world4, dict(pp=2, ep=2)))
    found = []
    for i, (world, parallel) in enumerate(layouts):
        target = tmp_path / f"b{i}"
        written = world.run(run_recorded, source, target, parallel, torch.float32, **kw)
        assert all(written)
        names = sorted(n for w in written for n in w)
        assert names == sorted(f.name for f in target.glob("*.safetensors")) and len(names) > 8
        found.append({f.name: f.read_bytes() for f in target.iterdir()})
    assert found[0] == found[1]
    same(source, tmp_path / "b0")


def test_storage_of_rank_0_alone(world2: World, tmp_path: Path) -> None:
    """The directory exists on rank 0 alone, as if the other rank were on another machine."""
    source = save_tiny(tmp_path / "a", "qwen3")
    written = world2.run(
        run_blind, source, tmp_path / "b", dict(pp=2), torch.float32, max_shard_bytes=60_000
    )
    assert len(written[0]) > 2 and written[1] == []
    same(source, tmp_path / "b")


def run_blind(*args: Any, **kw: Any) -> list[str]:
    if torch.distributed.get_rank() == 0:
        return run_recorded(*args, **kw)
    with patch.object(Path, "is_dir", lambda _: False):
        return run_recorded(*args, **kw)


class Largest(TorchDispatchMode):
    """Records the most elements of any tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for t in tree_leaves(made):
            if isinstance(t, torch.Tensor):
                self.numel = max(self.numel, t.numel())
        return made


def run_watched(source: Path, parallel: Parallel) -> tuple[int, int]:
    """Builds a model; returns the sizes of the largest tensor made and of the largest parameter."""
    with Largest() as largest, built_model(source, parallel, load=False) as (model, _):
        pass
    return largest.numel, max(p.numel() for p in named_params(model.chunks).values())


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_model_is_built_without_whole_weights(world4: World, tmp_path: Path, kind: str) -> None:
    source = save_tiny(tmp_path / "a", kind, vocab_size=4096)
    parallel = dict(tp=4, sequence_parallel=True)
    for made, held in world4.run(run_watched, source, parallel):
        assert made == held


def test_fewer_key_value_heads_than_ranks(world4: World, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "a", "qwen2", num_key_value_heads=2)
    world4.run(run_round_trip, source, tmp_path / "b", dict(tp=4), torch.float32)
    same(source, tmp_path / "b")


def test_the_saved_directory_loads_and_brings_its_companions(world2: World, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "a", "qwen3", tie=True)
    companions = (
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "own.tiktoken",
        "modeling_own.py",
    )  # fmt: skip
    for name in companions:
        (source / name).write_text(f"of the base model: {name}")
    (source / "README.md").write_text("not carried over")
    target = tmp_path / "deep" / "b"
    world2.run(
        run_round_trip, source, target, dict(tp=2), torch.float32,
        dtype=torch.bfloat16, base_model_path=source, max_shard_bytes=100_000,
    )  # fmt: skip
    for name in companions:
        assert (target / name).read_text() == (source / name).read_text()
    assert not (target / "README.md").exists() and (target / "generation_config.json").is_file()
    index = json.loads((target / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) > 2 and all((target / s).is_file() for s in shards)
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    model, info = AutoModelForCausalLM.from_pretrained(
        target, dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, p in AutoModelForCausalLM.from_pretrained(source).named_parameters():
        assert torch.equal(p.bfloat16(), model.get_parameter(name)), name


class BrokenTokenizer:
    def save_pretrained(self, path: str) -> None:
        raise OSError(28, "No space left on device")


def run_failing_save(source: Path, target: Path, tokenizer: Any) -> str:
    try:
        run_round_trip(source, target, {}, torch.float32, tokenizer=tokenizer)
    except (OSError, ValueError, RuntimeError) as e:
        return f"{type(e).__name__}: {e}"
    return ""


def test_a_failed_save_is_an_error_on_every_rank_and_leaves_the_old_model(
    world2: World, tmp_path: Path
) -> None:
    source = save_tiny(tmp_path / "a", "llama")
    target = save_tiny(tmp_path / "b", "llama", seed=1)
    before = read_all(target)
    errors = world2.run(run_failing_save, source, target, BrokenTokenizer())
    assert all("No space left" in e for e in errors) and "rank 0" in errors[1]
    assert all(torch.equal(t, before[n]) for n, t in read_all(target).items())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
    world2.run(run_round_trip, source, target, {}, torch.float32)  # and now it is replaced
    same(source, target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def run_full_disk(source: Path, target: Path, rank: int) -> str:
    """Fills one rank's disk while the rank still has buckets to send and to receive."""
    writes = 0

    def full(name: str) -> None:
        nonlocal writes
        writes += torch.distributed.get_rank() == rank
        if writes == 5:
            raise OSError(28, "No space left on device")

    try:
        with weight_files_opened(full):
            run_round_trip(
                source,
                target,
                dict(pp=2),
                torch.float32,
                bucket_bytes=20_000,
                max_shard_bytes=80_000,
            )
    except (OSError, RuntimeError) as e:
        return str(e)
    return ""


def test_a_disk_that_fills_up_midway_stops_every_rank(world2: World, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "a", "llama")
    for rank in (0, 1):
        errors = world2.run(run_full_disk, source, tmp_path / "b", rank)
        assert all("No space left" in e for e in errors), errors
        assert f"rank {rank}" in errors[1 - rank]
        assert [p.name for p in tmp_path.iterdir()] == ["a"]
    world2.run(run_round_trip, source, tmp_path / "b", dict(pp=2), torch.float32)
    same(source, tmp_path / "b")


def run_another_table(source: Path, target: Path, verb: str) -> str:
    """Gives rank 1 alone the table of another layout."""
    with built_model(source, {}) as (model, groups):
        params, table = named_params(model.chunks), model.table
        if groups.rank == 1:
            table = build_piece_table(read_hf_config(source), Layout(tp=2))
        try:
            if verb == "save":
                save_hf(target, table, groups.layout, groups.rank, params)
            else:
                buckets = plan_buckets(table, torch.float32, 1 << 16)
                BucketGatherer(table, groups.rank, params, buckets)
        except ValueError as e:
            return str(e)
    return ""


@pytest.mark.parametrize("verb", ("save", "gather"))
def test_ranks_that_plan_differently_write_nothing(
    world2: World, tmp_path: Path, verb: str
) -> None:
    source = save_tiny(tmp_path / "a", "llama")
    for error in world2.run(run_another_table, source, tmp_path / "b", verb):
        assert "rank 1 has another layout than rank 0" in error
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_save_does_not_replace_what_is_no_model(world2: World, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "a", "llama")
    thesis = tmp_path / "documents" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    for target, words in ((thesis.parent, "holds no model"), (thesis, "a file is there")):
        errors = world2.run(run_failing_save, source, target, None)
        assert all(words in e for e in errors)
    assert thesis.read_text() == "years of work"


def load_one_rank(path: Path) -> dict[str, torch.Tensor]:
    """Loads one rank of tp=2 alone: load_hf needs no process group."""
    table = build_piece_table(read_hf_config(path), layout := Layout(tp=2))
    params = {
        n: torch.full(p.shape, torch.nan) for n, p in table.local_params(layout.coords(1)).items()
    }
    load_hf(path, table, layout, 1, params)
    return params


def test_ignorable_tensors_are_ignored(tmp_path: Path) -> None:
    path = save_tiny(tmp_path, "llama", tie=True)
    file = path / "model.safetensors"
    tensors = load_file(file)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    save_file({**tensors, **extra}, file, {"format": "pt"})
    assert all(p.isfinite().all() for p in load_one_rank(path).values())


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def cut_header(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def empty_file(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"")


def remove_file(path: Path) -> None:
    (path / "model.safetensors").unlink()


def bin_only(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def lose_shard(path: Path) -> None:
    weight_map = dict.fromkeys(load_file(path / "model.safetensors"), "model-00001-of-00001.st")
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def break_index(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text('{"weight_m')


def edit(path: Path, **change: torch.Tensor | None) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors = {n: t for n, t in {**tensors, **change}.items() if t is not None}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


DOWN = "model.layers.2.mlp.down_proj.weight"
BROKEN = (
    (truncate, r"model\.safetensors: not a whole safetensors file.*bytes\); download"),
    (cut_header, r"model\.safetensors: not a whole safetensors file"),
    (empty_file, r"model\.safetensors: not a whole safetensors file"),
    (remove_file, r"neither model\.safetensors nor"),
    (bin_only, r"pytorch \.bin weights: convert"),
    (lose_shard, r"model-00001-of-00001\.st is missing but model\.safetensors\.index\.json"),
    (break_index, r"index\.json: not a safetensors index"),
    (lambda p: edit(p, **{DOWN: None}), r"tensor model\.layers\.2\.mlp\.down_proj.* is missing"),
    (lambda p: edit(p, **{"lm_head.weight": None}), "lm_head.*tie_word_embeddings=true"),
    (
        lambda p: edit(p, **{DOWN: torch.zeros(64, 95)}),
        r"down_proj\.weight has shape \[64, 95\], config\.json asks for \[64, 96\]",
    ),
    (
        lambda p: edit(p, **{"model.layers.9.mlp.down_proj.weight": torch.zeros(1)}),
        r"1 tensors are not part of a llama model.*layers\.9",
    ),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("whole"), "llama")


@pytest.mark.parametrize("spoil, words", BROKEN)
def test_broken_files_are_named(spoil: Any, words: str, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(whole, path)
    load_one_rank(path)
    spoil(path)
    with pytest.raises(ValueError, match=words):
        load_one_rank(path)
