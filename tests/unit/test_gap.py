"""`megarl gap`: no gap between programs that compute the same model, and every injected bug named
by its layer and part. The trainer, the server and transformers really run, in this process."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from megarl.api.records import SaveLoadMeta
from megarl.cli import main
from megarl.cli.gap import Sample
from megarl.cli.gap import compare as comparing
from megarl.cli.gap.compare import (
    CHOICE,
    Gap,
    Runs,
    compare,
    first_bug,
    run_all,
    served,
    sides,
    start_server,
    trained,
)
from megarl.config.earlier_run import CONFIG_FILE, MARKER, RECOVER_DIR
from megarl.config.engine import TrainEngineConfig
from megarl.config.loader import load_config, save_config
from megarl.engine import MegatronEngine
from megarl.engine.probe import (
    ATTENTION,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    MLP,
    MLP_NORM,
    MLP_POST_NORM,
    ROUTER,
)
from megarl.models.hf_config import read_hf_config
from megarl.observability.episodes import append_record, pack
from megarl.server import kv_cache
from megarl.utils.files import seal
from tests.tiny import GLM_KINDS, KINDS, MLA_KINDS, MOE_KINDS, VOCAB, save_tiny

DENSE, MOE, BIASED = "qwen2", "qwen3_moe", "deepseek_v3"


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    torch.set_num_threads(1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def make_samples() -> list[Sample]:
    g = torch.Generator().manual_seed(0)
    lengths = ((40, 25), (24, 12), (33, 20))
    return [Sample(torch.randint(3, VOCAB, (n,), generator=g).tolist(), p) for n, p in lengths]


@dataclass(frozen=True)
class Case:
    path: str
    runs: Runs


def run_tiny(path: Path, dtype: str = "float32") -> Case:
    engine = TrainEngineConfig(path=str(path), dtype=dtype)
    runs = run_all(engine, make_samples())
    assert runs is not None
    return Case(str(path), runs)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Returns cases(kind): the runs of a tiny model in float32."""
    made: dict[str, Case] = {}

    def of(kind: str) -> Case:
        if kind not in made:
            made[kind] = run_tiny(save_tiny(tmp_path_factory.mktemp(kind), kind))
        return made[kind]

    return of


def with_bug(case: Case, inject: Any) -> Runs:
    """Runs a server into whose model `inject` puts a bug."""
    samples = make_samples()
    runner = start_server(case.path, torch.float32, samples)
    inject(runner.model)
    second = served(runner, samples, case.runs.first, read_hf_config(case.path).moe)
    return replace(case.runs, second=second)


def named(runs: Runs) -> tuple[int, str] | None:
    bug = first_bug(compare(runs))
    return bug and tuple(bug.part)


OFTEN = (DENSE, MOE, BIASED, "glm4")
SELDOM = [
    pytest.param(kind, marks=pytest.mark.full)
    for kind in (*KINDS, *MOE_KINDS, *MLA_KINDS, *GLM_KINDS)
    if kind not in OFTEN
]


def check_rounding(runs: Runs) -> Gap:
    """Asserts that nothing was found, and that no part came near its bound; returns the head's."""
    gaps = compare(runs)
    assert first_bug(gaps) is None
    assert max(gap.times for gap in gaps if gap.part.name != CHOICE) < 0.5
    return next(gap for gap in gaps if gap.part.name == HEAD)


@pytest.mark.parametrize("kind", [*OFTEN, *SELDOM])
def test_no_gap_in_float32(cases, kind):
    runs = cases(kind).runs
    head = check_rounding(runs)
    assert head.worst < 1e-5 and len(runs.exact[head.part]) == 40
    assert all(gap.mean == 0 for gap in compare(runs) if gap.part.name == CHOICE)


@pytest.mark.parametrize(
    "kind", [DENSE, MOE, *SELDOM, *(pytest.param(k, marks=pytest.mark.full) for k in OFTEN[2:])]
)
def test_no_gap_in_bfloat16(kind, tmp_path):
    path = save_tiny(tmp_path, kind, dtype=torch.bfloat16)
    head = check_rounding(run_tiny(path, "bfloat16").runs)
    assert 1e-4 < head.mean < 0.1, "bfloat16 rounds"


def add(tensor: torch.Tensor, index: Any, value: float) -> None:
    tensor[index] += value


def wrong_rope(model: Any) -> None:
    """Rotates by another base in layer 1."""
    config = type(model.config)(**model.config.to_dict())
    config.rope_parameters = {"rope_type": "default", "rope_theta": 20000.0}
    rotary, attention = (
        type(model.base_model.rotary_emb)(config),
        model.base_model.layers[1].self_attn,
    )
    plain = attention.forward

    def forward(hidden_states: Any, position_embeddings: Any, **kw: Any) -> Any:
        angles = rotary(hidden_states, kw["position_ids"])
        return plain(hidden_states=hidden_states, position_embeddings=angles, **kw)

    attention.forward = forward


def wrong_eps(model: Any) -> None:
    norm = model.base_model.layers[2].post_attention_layernorm
    norm.forward = lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight, 1e-5)


def swap_experts(model: Any) -> None:
    weights = model.base_model.layers[2].mlp.experts.gate_up_proj
    weights[[0, 3]] = weights[[3, 0]]


def no_choice_bias(model: Any) -> None:
    model.base_model.layers[2].mlp.gate.e_score_correction_bias.zero_()


BUGS = {
    "an element of a weight": (
        DENSE,
        lambda m: add(m.base_model.layers[2].mlp.down_proj.weight, (3, 5), 1e-3),
        (2, MLP),
    ),
    "rope base": (DENSE, wrong_rope, (1, ATTENTION)),
    "eps": (DENSE, wrong_eps, (2, MLP_NORM)),
    "a missing bias": (
        DENSE,
        lambda m: m.base_model.layers[3].self_attn.q_proj.bias.zero_(),
        (3, ATTENTION),
    ),
    "an embedding": (
        DENSE,
        lambda m: add(m.base_model.embed_tokens.weight, make_samples()[0].ids[3], 1e-4),
        (-1, EMBEDDING),
    ),
    "the final norm": (DENSE, lambda m: m.base_model.norm.weight.mul_(1.001), (4, FINAL_NORM)),
    "the head": (DENSE, lambda m: m.lm_head.weight.mul_(1.001), (4, HEAD)),
    "a norm of an output": (
        "glm4",
        lambda m: m.base_model.layers[1].post_mlp_layernorm.weight.mul_(1.001),
        (1, MLP_POST_NORM),
    ),
    "swapped experts": (MOE, swap_experts, (2, MLP)),
    "a router's weight": (
        MOE,
        lambda m: add(m.base_model.layers[3].mlp.gate.weight, (1, 7), 1e-3),
        (3, ROUTER),
    ),
    "a bias of the choice": (BIASED, no_choice_bias, (2, CHOICE)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_an_injected_bug_is_named(cases, bug):
    kind, inject, where = BUGS[bug]
    runs = with_bug(cases(kind), inject)
    assert named(runs) == where
    trainer, server = sides(first_bug(compare(runs)).part, runs)
    assert trainer <= 1 < server, "transformers disagrees with the server alone"


def test_a_bug_of_the_trainer_is_the_trainers(cases):
    case, samples = cases(DENSE), make_samples()
    engine = MegatronEngine(TrainEngineConfig(path=case.path, dtype="float32"))
    engine.initialize()
    engine.state.params["decoder.layers.1.self_attention.linear_proj.weight"][4, 2] += 1e-3
    broken = trained(engine, samples)
    engine.destroy()
    runs = replace(case.runs, first=broken)
    assert named(runs) == (1, ATTENTION)
    trainer, server = sides(first_bug(compare(runs)).part, runs)
    assert server <= 1 < trainer


def test_what_only_decoding_does_wrong_is_found(cases, monkeypatch):
    """A server whose cache loses the newest key agrees on prompts, and in a pass of its own."""
    plain = kv_cache.Decode.attend

    def short(self: kv_cache.Decode, layer: int, heads: kv_cache.Heads) -> torch.Tensor:
        plain(self, layer, heads)
        keys, values = self.cache.keys[layer, self.rows], self.cache.values[layer, self.rows]
        older = torch.arange(keys.shape[2]) < self.positions[:, None]
        out = functional.scaled_dot_product_attention(
            heads.q,
            keys,
            values,
            attn_mask=older[:, None, None],
            scale=heads.scale,
            enable_gqa=True,
        )
        return out.transpose(1, 2)

    case, samples = cases(DENSE), make_samples()
    runner = start_server(case.path, torch.float32, samples)
    monkeypatch.setattr(kv_cache.Decode, "attend", short)
    runs = replace(case.runs, second=served(runner, samples, case.runs.first, None))
    assert named(runs) == (0, ATTENTION)
    assert first_bug(compare(runs)).token >= samples[0].prompt
    assert named(replace(case.runs, second=case.runs.rounded)) is None


def test_a_program_that_gives_nan_has_a_gap(cases):
    case = cases(DENSE)
    parts = dict(case.runs.second)
    part = next(p for p in parts if p == (1, MLP))
    parts[part] = parts[part] * torch.nan
    assert named(replace(case.runs, second=parts)) == (1, MLP)


def test_the_command_says_where_and_exits_with_one(tmp_path, capsys):
    path = save_tiny(tmp_path / "model", "llama", layers=2)
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([sample.ids for sample in make_samples()]))
    assert main(["gap", str(path), "--tokens", str(ids)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "on 97 tokens" in said and "compute the same model" in said
    assert main(["gap", str(path), "--tokens", str(ids), "--against", "hf"]) == 0
    assert "trainer and transformers" in " ".join(capsys.readouterr().out.split())


def test_the_command_names_a_bug_and_exits_with_one(tmp_path, capsys, monkeypatch):
    path = save_tiny(tmp_path, MOE, layers=3)

    def start(*args: Any) -> Any:
        runner = start_server(*args)
        swap_experts(runner.model)
        return runner

    monkeypatch.setattr(comparing, "start_server", start)
    assert main(["gap", str(path), "--length", "64", "actor.dtype=float32"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "random tokens" in said
    assert "layer 2, MLP: the first gap that is more than rounding." in said
    assert "disagrees with the server alone" in said


def test_a_run_is_compared_as_its_newest_checkpoint_is_on_what_it_recorded(tmp_path, capsys):
    model = save_tiny(tmp_path / "model", "llama", layers=2)
    run = tmp_path / "exp" / "trial"
    cfg = load_config(None, [f"actor.path={model}", "actor.dtype=float32", "recipe=grpo"])
    save_config(cfg, run / CONFIG_FILE)
    engine = MegatronEngine(TrainEngineConfig(path=str(model), dtype="float32"))
    engine.initialize()
    weight = engine.state.params["decoder.layers.1.mlp.linear_fc2.weight"]
    weight.mul_(2)  # the checkpoint's weights are not those of the model directory
    step = run / RECOVER_DIR / "step_000002"
    engine.save(SaveLoadMeta(path=str(step / "actor"), weight_format="dist"))
    engine.destroy()
    (step / MARKER).write_text(json.dumps(seal({"models": {"actor": {}}})))
    record_episode(run, make_samples()[:2])

    assert main(["gap", str(run)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "step_000002/actor" in said and "64 tokens, episode 2.7" in said
    assert "of 27 tokens of answers" in said  # tokens that were trained
    mlp = [
        run_all(cfg.actor, make_samples(), checkpoint=at).exact[1, MLP]
        for at in (None, step / "actor")
    ]
    torch.testing.assert_close(mlp[1], 2 * mlp[0])
    assert not list(run.glob(".gap*")), "what the server read is gone"
    assert main(["gap", str(run), "--episode", "2.8"]) == 2
    assert "recorded are 2.7" in capsys.readouterr().err


def record_episode(run: Path, samples: list[Sample]) -> None:
    rows = [{"rollout": k, "length": len(s.ids)} for k, s in enumerate(samples)]
    ids = np.concatenate([np.array(s.ids, "<i4") for s in samples])
    mask = np.concatenate([np.arange(len(s.ids)) >= s.prompt for s in samples]).astype("|u1")
    line = {"episode": 7, "tokens": len(ids)}
    append_record(run, 2, line, pack({"rows": rows}, {"ids": ids, "mask": mask}))


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ([], "required: MODEL_OR_RUN"),
        (["--budget", "{model}"], "--budget: leave it out"),
        (["{tmp}"], "neither a model's config.json nor a run's config.yaml"),
        (["{model}", "--against", "vllm"], "invalid choice: 'vllm'"),
        (["{model}", "--length", "0"], "--length: 0"),
        (["{model}", "--episode", "1.2"], "it goes with a run"),
        (["{model}", "--tokens", "{tmp}/none"], "No such file"),
        (["{model}", "--tokens", "{model}/config.json"], "give at least two token ids"),
        (["{model}", "--tokens", "{ids}"], "the token id 999, the model's vocab_size is 130"),
        (["{model}", "actor.parallel.tp=2"], "world"),
        (["{model}", "actor.fp8=blockwise"], "use actor.fp8=none"),
    ],
)
def test_wrong_command_lines_say_so(args, why, tmp_path, capsys):
    model = save_tiny(tmp_path / "model", "llama", layers=1)
    ids = tmp_path / "ids.json"
    ids.write_text("[3, 999]")
    named = [arg.format(tmp=tmp_path, model=model, ids=ids) for arg in args]
    assert main(["gap", *named]) == 2
    assert why in capsys.readouterr().err
