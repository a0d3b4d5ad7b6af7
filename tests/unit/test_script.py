"""A script of the user's own: what it makes of its configuration, and which keys nobody reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from megarl import (
    ConfigError,
    Evaluator,
    GRPOConfig,
    MegatronActor,
    MegatronRef,
    RemoteSGLangEngine,
    RLVRWorkflow,
    SaveLoadMeta,
    SGLangEngine,
    WeightUpdateMeta,
    load_expr_config,
    load_hf_tokenizer,
    run_dir,
)
from megarl.config.check import check_config
from megarl.engine.checkpoint import check_meta
from megarl.utils.env import collective_timeout

ROOT = Path(__file__).resolve().parents[2]
tokenizer = SimpleNamespace(decode=lambda ids, **kw: "", chat_template=None)


@pytest.fixture(autouse=True)
def _as_before():
    yield
    load_expr_config([], GRPOConfig)


def script_config(*args: str) -> GRPOConfig:
    return load_expr_config([f"actor.path={ROOT}", *args], GRPOConfig)[0]


def test_a_section_is_no_place_for_weights(tmp_path: Path) -> None:
    config = script_config(f"fileroot={tmp_path}", "trial_name=t")
    for section in (config.saver, config.weight_sync, None, 3):
        with pytest.raises(TypeError, match="from_disk"):
            WeightUpdateMeta.from_disk(section)  # type: ignore[arg-type]
    assert WeightUpdateMeta.from_disk(config).path == str(run_dir(config) / "weights")
    assert WeightUpdateMeta.from_disk(tmp_path).path == str(tmp_path)
    assert WeightUpdateMeta.from_disk("w").path == "w"


def test_a_role_of_another_section_is_refused_with_the_one_that_is_meant() -> None:
    config = script_config("ref.dtype=float32")
    with pytest.raises(TypeError, match=r"RefConfig.*config\.actor.*MegatronRef"):
        MegatronActor(config.ref, temperature=1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"config\.ref"):
        MegatronRef(script_config().ref, temperature=1.0)  # type: ignore[arg-type]


def test_names_of_other_systems_are_answered_with_ours() -> None:
    with pytest.raises(ValueError, match=r"'dcp'.*'dist'"):
        check_meta(SaveLoadMeta(path="x", weight_format="dcp"), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tokenizer_path.*actor\.path"):
        load_hf_tokenizer("")


def test_collectives_are_bounded_as_the_configuration_says() -> None:
    script_config("collective_timeout=17")
    assert collective_timeout() == 17


def test_options_that_nothing_takes_are_refused_before_a_part_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LEVEL", "of-mine")
    with pytest.raises(ConfigError) as caught:
        script_config("actor.correction={weight: '${oc.env:LEVEL}', vetoe: 0.1}")
    weight, veto = caught.value.problems
    assert weight.startswith("actor.correction.weight=${oc.env:LEVEL}: must be")
    assert veto.startswith("actor.correction.vetoe=0.1: ") and "did you mean veto?" in veto


def test_a_model_on_the_hub_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **kw: str(tmp_path))
    config, _ = load_expr_config(["actor.path=Qwen/Qwen3-0.6B", "ref.path=a/b"], GRPOConfig)
    assert config.ref is not None and {config.actor.path, config.ref.path} == {str(tmp_path)}

    def unreachable(name: str, **kw: object) -> str:
        raise FileNotFoundError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ConfigError, match=r"actor\.path=Qwen/Qwen3-0\.6B"):
        load_expr_config(["actor.path=Qwen/Qwen3-0.6B"], GRPOConfig)


def test_a_client_pauses_as_weight_sync_says(servers) -> None:
    found = script_config(
        f"rollout.addresses=[{servers[0].address}]", "weight_sync.pause_mode=retract"
    )
    client = RemoteSGLangEngine.for_run(found)
    client.initialize()
    try:
        client.pause()
        assert servers[0].calls == [("/pause_generation", {"mode": "retract"})]
        client.resume()
    finally:
        client.destroy()


def test_a_client_drops_groups_without_a_signal_where_dynamic_sampling_is_on() -> None:
    assert RemoteSGLangEngine.for_run(script_config()).should_accept is None
    accept = RemoteSGLangEngine.for_run(script_config("algorithm=dapo")).should_accept
    assert accept is not None
    import torch

    assert not accept({"rewards": torch.tensor([1.0, 1.0])})
    assert accept({"rewards": torch.tensor([1.0, 0.0])})

    reward = "train_dataset.reward={type: weighted, options: {parts: {right: exact, short: {type: "
    reward += "overlong, options: {max_length: 9, buffer: 4}}, seen: {type: exact, weight: 0}}}}"
    for words, varied in (
        (["algorithm=dapo"], "right"),
        (["algorithm=dapo", "actor.dynamic_sampling=[short]"], "short"),
        (["algorithm=rloo", "actor.dynamic_sampling=true"], "right"),
    ):
        accept = RemoteSGLangEngine.for_run(script_config(reward, *words)).should_accept
        for name in ("right", "short", "seen"):  # the only part that differs, and so the sum does
            differing = dict.fromkeys(("reward_part/right", "reward_part/short"), torch.zeros(4))
            differing |= {f"reward_part/{name}": torch.tensor([0.0, -0.5, -1.0, 0.0])}
            group = differing | {"rewards": differing[f"reward_part/{name}"]}
            assert accept(group) == (name == varied), (words, name)
        cancels = {"reward_part/right": torch.tensor([0.0, 1.0]), "rewards": torch.ones(2)}
        assert not accept(cancels)
    with pytest.raises(ConfigError, match=r"dynamic_sampling.*rihgt.*right"):
        check_config(script_config(reward, "actor.dynamic_sampling=[rihgt]"))

    limited = script_config("algorithm=dapo", "actor.reward_clip=5", "actor.reward_bias=1")
    accept = RemoteSGLangEngine.for_run(limited).should_accept
    assert not accept({"rewards": torch.tensor([4.0, 7.0])})  # both count as 5
    assert accept({"rewards": torch.tensor([3.5, 7.0])})

    parts = ["+actor.advantages.options.parts={right: 1.0, form: 0.5}", "algorithm=gdpo"]
    of_gdpo = script_config(*parts, "actor.dynamic_sampling=true")
    accept = RemoteSGLangEngine.for_run(of_gdpo).should_accept
    alike, form = torch.ones(2), torch.tensor([0.0, 1.0])  # of two whose weighted sums are equal
    assert accept({"rewards": alike, "reward_part/right": 1.0 - form / 2, "reward_part/form": form})
    lacking = torch.tensor([1.0, torch.nan])  # a rollout without the part differs from none
    assert not accept({"rewards": form, "reward_part/right": alike, "reward_part/form": lacking})
    assert accept({"rewards": form})  # whose parts the advantages will ask for


class OwnClient(RemoteSGLangEngine):
    """A backend of a user's."""

    def __init__(self, config, *, weight_sync, seed, shade="grey", tokenizer=None):
        super().__init__(config, weight_sync=weight_sync, seed=seed, tokenizer=tokenizer)
        self.shade = shade


def test_for_run_makes_the_class_that_is_meant(tmp_path: Path) -> None:
    named = script_config(
        f"rollout.backend={__name__}:OwnClient", "+rollout.backend.options.shade=blue"
    )
    client = RemoteSGLangEngine.for_run(named)
    assert isinstance(client, OwnClient) and client.shade == "blue"
    assert isinstance(OwnClient.for_run(script_config()), OwnClient)
    own = SGLangEngine.for_run(script_config("server.count=2"))
    assert isinstance(own, SGLangEngine) and own.start_timeout == 2 * 600
    assert OwnClient.for_run(script_config(), tokenizer=tokenizer).config.addresses == []


def test_a_workflow_has_the_pool_and_the_options_of_its_configuration() -> None:
    keys = (
        "rollout.reward_timeout=3",
        "rollout.on_reward_error=reject",
        "rollout.reward_workers=1",
    )
    config = script_config(*keys, "train_dataset.type=arithmetic", "gconfig.n_samples=3")
    workflow = RLVRWorkflow.for_run(config, tokenizer)
    assert workflow.reward_pool.on_error == "reject" and workflow.gconfig.n_samples == 3
    assert workflow.reward_fn.__name__ == "exact_reward"
    assert RLVRWorkflow.for_run(config, tokenizer).reward_pool is workflow.reward_pool
    other = RLVRWorkflow.for_run(script_config(), tokenizer, reward_fn=len)
    assert other.reward_fn is len and other.reward_pool is not workflow.reward_pool
    with pytest.raises(ValueError, match=r"rollout\.workflow\.options\.turns=3"):
        RLVRWorkflow.for_run(script_config("+rollout.workflow.options.turns=3"), tokenizer)


SCRIPT = """
import sys
from dataclasses import dataclass
import megarl
from megarl import GRPOConfig, load_expr_config

@dataclass(kw_only=True)
class Own(GRPOConfig):
    shade: str = "grey"

config, _ = load_expr_config(sys.argv[1:], Own)
BODY
"""
SET = (
    *("shade=blue", "kl_ctl=0.1", "recover.mode=auto", "evaluator.freq_steps=3", "server.count=2"),
    *("weight_sync.pause_mode=drain", "rollout.reward_timeout=3", "rollout.request_timeout=9"),
    *("actor.dynamic_sampling=true", "actor.eps_clip=0.3", "saver.freq_steps=2", "seed=7"),
)


def stderr_of(tmp_path: Path, body: str, **env: str) -> str:
    """What a script that does `body` writes there."""
    (tmp_path / "own_script.py").write_text(SCRIPT.replace("BODY", body))
    command = [sys.executable, "own_script.py", f"fileroot={tmp_path}", *SET]
    done = subprocess.run(
        command, cwd=tmp_path, text=True, capture_output=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


def told(tmp_path: Path, body: str, **env: str) -> list[str]:
    """The keys that a script which does `body` is told of."""
    lines = stderr_of(tmp_path, body, **env).splitlines()
    names = {key.partition("=")[0] for key in SET}
    warned = [line for line in lines if "config" in line and "WARNING" in line]
    assert len(warned) <= 1
    return [
        name for name in sorted(names) if warned and f" {name}," in warned[0].replace(". ", ", ")
    ]


def test_keys_that_nobody_reads_are_named(tmp_path: Path) -> None:
    by_hand = "from megarl.observability.logging import get_logger; get_logger()\n"
    by_hand += "megarl.RemoteSGLangEngine(config.rollout); print(config.actor, config.seed)"
    assert told(tmp_path, by_hand) == [
        *("actor.dynamic_sampling", "evaluator.freq_steps", "kl_ctl", "recover.mode"),
        *("rollout.reward_timeout", "saver.freq_steps", "weight_sync.pause_mode"),
    ]
    assert told(tmp_path, by_hand, RANK="1") == []
    for_run = f"{by_hand}\nmegarl.RemoteSGLangEngine.for_run(config); print(config.kl_ctl)\n"
    for_run += "megarl.RLVRWorkflow.for_run(config, None, reward_fn=len)\n"
    for_run += "logger = megarl.StatsLogger.for_run(config)\n"
    for_run += "logger.commit(0, 0, 0, {'x': 1.0}); logger.commit(0, 1, 1, {'x': 1.0})"
    assert told(tmp_path, for_run) == ["evaluator.freq_steps", "recover.mode", "saver.freq_steps"]


def test_a_script_shows_the_users_warnings_and_not_torchdatas(tmp_path: Path) -> None:
    body = "import warnings\n"
    for where in ("torchdata.nodes", "mine"):
        body += f"warnings.warn_explicit('from {where}', UserWarning, 'f.py', 1, '{where}')\n"
    said = stderr_of(tmp_path, body)
    assert "from mine" in said and "from torchdata" not in said


def test_an_evaluator_reads_its_keys(tmp_path: Path) -> None:
    config = script_config(f"fileroot={tmp_path}", "evaluator.at_start=false")
    rollout = RemoteSGLangEngine.for_run(config)
    evaluator = Evaluator.for_run(config, rollout, tokenizer)
    assert evaluator.maybe_evaluate(step=0, epoch=0, epoch_ended=False) == {}
