"""What a rehearsal shrinks, as plain arithmetic; the runs are in tests/system."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import COMMANDS
from megarl.cli import main as megarl
from megarl.cli.rehearse import (
    STEPS,
    RehearsalFailed,
    construct,
    make_plan,
    sample_ranks,
    write_small,
)
from megarl.cli.rehearse.small import (
    OVERLAY,
    REWARD,
    changes,
    shrink_config,
    shrink_layouts,
    shrink_model,
    write_model,
)
from megarl.config.check import check_config
from megarl.config.engine import ParallelConfig
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.recipe_engines import engines
from megarl.config.recipes import RECIPES
from megarl.config.schema import all_keys
from megarl.models.hf_config import check_layout, parse_hf_config, read_hf_config
from megarl.utils.importing import call_isolated
from tests.unit.test_gemma import GEMMA, OLMO
from tests.unit.test_reallocation_plan import FAMILIES, config

ROOT = Path(__file__).resolve().parents[2]
CARDS = ROOT / "configs" / "models"
VOCAB = OVERLAY["model"]["vocab_size"]


def parallel(**degrees: Any) -> ParallelConfig:
    return ParallelConfig(sequence_parallel=degrees.get("tp", 1) > 1, **degrees)


@pytest.mark.parametrize(
    ("degrees", "ranks", "small", "world", "left_out"),
    [
        ({}, 8, {}, 2, ()),
        ({"tp": 4}, 8, {"tp": 2}, 4, ()),
        ({"tp": 4}, 2, {"tp": 2}, 2, ()),  # data parallelism alone goes
        ({"tp": 8, "pp": 2}, 8, {"tp": 2, "pp": 2}, 8, ()),
        ({"tp": 8, "pp": 16, "cp": 4}, 8, {"tp": 2, "pp": 2, "cp": 2}, 8, ()),
        ({"tp": 4, "pp": 8, "vpp": 4, "ep": 8}, 8, {"tp": 2, "pp": 2, "vpp": 2, "ep": 2}, 8, ()),
        ({"tp": 8, "pp": 2, "cp": 2}, 4, {"tp": 2, "pp": 2}, 4, ("cp",)),
        ({"tp": 8, "pp": 2, "vpp": 2}, 2, {"pp": 2, "vpp": 2}, 2, ("tp",)),
        ({"tp": 3, "pp": 3, "vpp": 2}, 1, {}, 1, ("tp", "pp")),
    ],
)
def test_layouts_keep_every_dimension_that_fits(
    degrees: dict[str, int],
    ranks: int,
    small: dict[str, int],
    world: int,
    left_out: tuple[str, ...],
) -> None:
    found = shrink_layouts({"actor": parallel(**degrees)}, ranks=ranks)
    p = found.parallel["actor"]
    names = ("tp", "pp", "vpp", "cp", "ep", "etp")
    assert {n: getattr(p, n) for n in names if getattr(p, n) > 1} == small
    assert (found.world_size, tuple(found.left_out)) == (world, left_out)
    assert p.sequence_parallel == (p.tp > 1) and found.layers % (p.pp * p.vpp) == 0


def test_engines_share_one_world() -> None:
    layouts = {"actor": parallel(tp=8, pp=4), "ref": parallel(tp=2, pp=1)}
    found = shrink_layouts(layouts, ranks=8)
    assert found.world_size == 8 and found.layers == 4
    assert (found.parallel["ref"].tp, found.parallel["ref"].pp) == (2, 1)


@pytest.mark.parametrize("degrees", [{"pp": 2}, {"pp": 4, "vpp": 2}])
def test_an_uneven_split_stays_uneven(degrees: dict[str, int]) -> None:
    uneven = parallel(**degrees, pipeline_split=[4, *[3] * (degrees["pp"] - 1)])
    small = shrink_layouts({"actor": uneven, "ref": parallel()}, ranks=8)
    p = small.parallel["actor"]
    assert p.pipeline_split is not None and len(p.pipeline_split) == p.pp * p.vpp
    assert sum(p.pipeline_split) == small.layers and len(set(p.pipeline_split)) > 1
    assert shrink_layouts({"actor": uneven}, ranks=1).parallel["actor"].pipeline_split is None


@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("cluster_tp", (1, 16))
@pytest.mark.parametrize("card", sorted(p.stem for p in CARDS.glob("*.json")))
def test_published_models_shrink_to_ones_that_fit(card: str, cluster_tp: int, tp: int) -> None:
    raw = json.loads((CARDS / f"{card}.json").read_text())
    small = shrink_model(raw, layers=8, cluster_tp=cluster_tp)
    m, whole = parse_hf_config(small), parse_hf_config(raw)
    assert m.family == whole.family and (m.moe is None) == (whole.moe is None)
    assert m.num_layers == 8 and m.vocab_size == VOCAB and m.hidden_size < 1024
    grouped = whole.attention.heads > whole.attention.kv_heads
    assert (m.attention.heads > m.attention.kv_heads) == grouped
    assert (m.attention.kv_heads < 2) == (grouped and cluster_tp > whole.attention.kv_heads)
    if m.moe and whole.moe:
        assert m.moe.num_experts == 4 and m.moe.top_k == 2
        assert bool(m.moe.dense_layers) == bool(whole.moe.dense_layers)
        assert (m.moe.groups > 1) == (whole.moe.groups > 1)
        assert (m.moe.top_groups < m.moe.groups) == (whole.moe.top_groups < whole.moe.groups)
    etp = 2 if m.moe and not m.moe.bias else 1  # biases of experts are not cut
    here = parallel(tp=tp, pp=2, vpp=2, ep=2 if m.moe else 1, etp=etp)
    check_layout(m, here)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_gets_a_model_that_loads(architecture: str, tmp_path: Path) -> None:
    raw = dict(config(architecture).raw)
    small = shrink_model(raw, layers=8)
    numel = write_model(small, tmp_path / "m", head="lm", seed=1)
    m = read_hf_config(tmp_path / "m")
    assert m.family == config(architecture).family and 10_000 < numel < 10_000_000
    check_layout(m, parallel(tp=2, pp=2, vpp=2, ep=2 if m.moe else 1))


@pytest.mark.parametrize("layers", (2, 8))
@pytest.mark.parametrize(
    "raw",
    [
        GEMMA,
        OLMO,
        {k: v for k, v in config("Qwen3NextForCausalLM").raw.items() if "interval" not in k},
        config(use_sliding_window=True, sliding_window=64, max_window_layers=3).raw,
        config("GptOssForCausalLM", sliding_window=128).raw,
    ],
    ids=("gemma3", "olmo3", "qwen3_next", "qwen2", "gpt_oss"),
)
def test_kinds_of_layers_take_turns(raw: dict[str, Any], layers: int) -> None:
    whole = parse_hf_config({**raw, "num_hidden_layers": 12, "layer_types": None})
    small = parse_hf_config(shrink_model(dict(whole.raw), layers=layers))
    kinds = [[m.layer_type(i) for i in range(m.num_layers)] for m in (whole, small)]
    assert set(kinds[0]) == set(kinds[1]) and len(set(kinds[0])) == 2
    assert abs(2 * kinds[1].count("full_attention") - layers) < 2


def test_numbers_that_are_rotated_shrink_with_their_heads() -> None:
    raw = dict(  # as MiniMax-M2 is published
        architectures=["MiniMaxM2ForCausalLM"], vocab_size=200064, hidden_size=3072, head_dim=128,
        intermediate_size=1536, num_hidden_layers=62, num_attention_heads=48, rotary_dim=64,
        num_key_value_heads=8, num_local_experts=256, num_experts_per_tok=8,
    )  # fmt: skip
    attention = parse_hf_config(shrink_model(raw, layers=8)).attention
    assert (attention.head_dim, attention.rotary_dim) == (16, 8)


@pytest.mark.parametrize(
    ("world", "stages", "ranks"),
    [
        (1, 1, [0]),
        (16, 2, [0, 9, 15]),
        (128, 16, [s * 8 + s % 8 for s in range(16)]),
    ],
)
def test_ranks_of_every_stage_are_constructed(world: int, stages: int, ranks: list[int]) -> None:
    found = sample_ranks(world, stages)
    assert found == ranks and found[-1] == world - 1
    assert {r * stages // world for r in found} == set(range(stages))


def test_a_wrong_rank_is_named() -> None:
    cfg = load_config(str(ROOT / "configs" / "llama3_70b_grpo.yaml"))
    with pytest.raises(RehearsalFailed, match="actor on rank 0 of 16: ValueError: no config"):
        construct("actor", engines(cfg)["actor"], 16, [0])  # its path has none


def test_a_rank_of_the_published_model_is_constructed(tmp_path: Path) -> None:
    """Real shapes, no memory: a middle stage of a Qwen3-235B has 1/8 of its layers' experts."""
    engine = engines(load_config(str(ROOT / "configs" / "qwen3_235b_grpo.yaml")))["actor"]
    (tmp_path / "config.json").write_text((CARDS / "qwen3-235b-a22b.json").read_text())
    engine.path = str(tmp_path)
    engine.optimizer = None
    found = call_isolated(construct, "actor", engine, 64, [12], timeout=300)
    experts = 12 * 16 * 3 * 4096 * 1536  # layers, experts of a rank, matrices
    assert experts < found < 1.2 * experts


@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "configs").glob("*.yaml")))
def test_every_recipe_shrinks_to_a_sound_one(name: str, tmp_path: Path) -> None:
    cfg = load_config(str(ROOT / "configs" / f"{name}.yaml"), _model(name))
    before = dict(engines(cfg))
    plan = make_plan(cfg, cards=CARDS, ranks=8)
    small = write_small(plan, tmp_path)
    check_config(small, plan.layouts.world_size)
    assert small.recipe == cfg.recipe and small.total_train_steps == STEPS
    assert list(engines(small)) == list(before)
    changed = {key for key, _, _ in changes(cfg, small)}
    assert "fileroot" in changed
    kept = ("loss", "advantages", "eps_clip", "lr", "recompute_granularity", "ppo_n_minibatches")
    assert not [k for k in changed if k.endswith(kept)]
    if "gconfig.n_samples" in changed:
        assert small.train_dataset.reward.type == REWARD  # type: ignore[attr-defined]
        assert small.gconfig.max_new_tokens <= 8  # type: ignore[attr-defined]


def test_a_controller_is_rehearsed_on_this_machine(tmp_path: Path) -> None:
    said = ["trainer.mode=controller", "trainer.workers=16", "trainer.scheduler=ray"]
    cfg = load_config(
        str(ROOT / "configs" / "quickstart_grpo.yaml"), [*_model("quickstart"), *said]
    )
    plan = make_plan(cfg, cards=CARDS, ranks=2)
    small = shrink_config(
        cfg, plan.layouts, dict.fromkeys(engines(cfg), ""), fileroot=str(tmp_path)
    )
    assert (small.trainer.mode, small.trainer.workers) == ("controller", None)
    assert small.trainer.scheduler == "local"


def test_every_key_of_the_overlay_is_a_key_of_a_recipe() -> None:
    keys = {key.name for recipe in RECIPES.values() for key in all_keys(recipe)}
    sections = {name.rpartition(".")[0] for name in keys}
    of_engines = {f"actor.{key}" for key in OVERLAY["engine"]}
    of_data = {f"train_dataset.{key}" for key in (*OVERLAY["rows"], *OVERLAY["sums"])}
    of_servers = {f"server.{key}" for key in OVERLAY["server"]}
    used = {*OVERLAY["replace"], *OVERLAY["limit"], *of_engines, *of_data, *of_servers}
    used = {name.partition(".options.")[0] for name in used}
    assert not used - keys - sections


def _model(name: str) -> list[str]:
    key = "model" if name.endswith(("sft", "dpo", "rm")) else "actor"
    made = name.startswith(("quick", "script", "smol", "verifiers"))  # by another job
    teacher = ["teacher.path=qwen3-1.7b"] if name.endswith("distill") else []
    return [f"{key}.path=qwen3-1.7b", *teacher] if made else []


def test_a_recipe_that_cannot_be_rehearsed_says_why(tmp_path: Path) -> None:
    config = str(ROOT / "configs" / "llama3_70b_grpo.yaml")
    for overrides, words in (
        (["actor.path=nobody/knows"], "actor.path=nobody/knows: no config.json at"),
        (["actor.parallel.tp=7"], "parallel.tp=7 does not divide num_attention_heads=64"),
        (["actor.parallel.pp=3"], "does not divide num_hidden_layers=80"),
    ):
        with pytest.raises(ConfigError, match=words.split("[")[0]):
            make_plan(load_config(config, overrides), cards=CARDS, ranks=8)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "usage: megarl COMMAND"),
        ("rehearsal", "no such command; did you mean rehearse?"),
        ("--config x.yaml", "a command comes first; to train, megarl run --config"),
        ("rehearse", "required: CONFIG"),
        ("rehearse a.yaml b.yaml", "b.yaml: give key=value"),
        ("rehearse absent.yaml", "absent.yaml"),
        ("rehearse configs/gsm8k_grpo.yaml --ranks 0", "--ranks: 0: use a whole number"),
        ("rehearse configs/gsm8k_grpo.yaml --out tests", "tests: exists already"),
        ("rehearse configs/gsm8k_grpo.yaml actor.eps_clip=3", "actor.eps_clip=3"),
    ],
)
def test_wrong_commands_end_with_2(
    command: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    assert megarl(command.split()) == 2
    said = capsys.readouterr()
    assert words in said.out + said.err


def test_help_imports_no_torch() -> None:
    code = (
        "import contextlib, sys; from megarl.cli import main\n"
        "with contextlib.suppress(SystemExit): main(sys.argv[1:])\n"
        "print('torch' in sys.modules)"
    )
    for words in (["--help"], *([name, "--help"] for name in COMMANDS)):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
        assert done.stdout.endswith("False\n"), (words, done)
