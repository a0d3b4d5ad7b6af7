"""What a job is: its placement on nodes, its records, and what --dry-run prints of them.

The files in golden/ are what is printed; `python -m tests.unit.test_launcher_job` writes them anew.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

from megarl.config.command_line import parse_command_line
from megarl.config.errors import ConfigError
from megarl.config.loader import checked_config
from megarl.config.run import ClusterConfig, PoolConfig
from megarl.launcher import local, plan
from megarl.launcher.command import show
from megarl.launcher.job import (
    CONTROLLER,
    DRIVER,
    JUDGE,
    REWARDS,
    SERVER,
    TRAINER,
    Job,
    endpoints,
    fill,
    forwarded,
)
from megarl.launcher.make import make_job
from megarl.launcher.node import OPTIONS, node_number
from megarl.launcher.placement import Placement, Seat, Servers, place, place_here
from megarl.launcher.plan import plan_cluster
from megarl.utils.env import CONTROLS
from tests.hf_stub import write_stub

GOLDEN = Path(__file__).parent / "golden"
MULTINODE = Path(__file__).parents[2] / "docs" / "clusters.md"
LLAMA_70B = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=8192, head_dim=128,
    intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
    vocab_size=128256, max_position_embeddings=8192, rms_norm_eps=1e-5, hidden_act="silu",
    tie_word_embeddings=False,
)  # fmt: skip
ENV = {"PATH": "/usr/bin", "WANDB_API_KEY": "hush", "HOSTNAME": "login", "MY_FLAG": "1"}
CASES = {
    "70b": ["allocation_mode=sglang.d8t8+megatron.d2t8p4", "weight_sync.options.delta=false"],
    "tp16": ["allocation_mode=sglang.d2t16+megatron.d1t8", "cluster.interface=ib0"],
}
POOLS = [
    "allocation_mode=sglang.d1+megatron.d2", "cluster.n_gpus_per_node=1", "recover.restarts=2",
    "cluster.server_pool.n_gpus_per_node=1", "cluster.container=registry/megarl:1",
    "cluster.container_mounts=[/data,/home/me:/me]",
]  # fmt: skip


# placement


def servers(count: int, gpus: int, key: str = SERVER, **more: int) -> Servers:
    return Servers(key=key, count=count, gpus=gpus, **more)


def nodes(placed: Placement) -> tuple[list[int], list[list[int]]]:
    return [s.node for s in placed.trainers], [[p.node for p in s] for s in placed.servers[SERVER]]


def test_trainers_fill_nodes_and_servers_follow() -> None:
    placed = place(ClusterConfig(n_gpus_per_node=2), trainers=4, servers=[servers(3, 1)])
    assert nodes(placed) == ([0, 0, 1, 1], [[2], [2], [3]])
    assert [p.gpus for s in placed.servers[SERVER] for p in s] == [
        "@{gpus:0}",
        "@{gpus:1}",
        "@{gpus:0}",
    ]
    assert placed.trainers[3].gpus == "@{gpus:0,1}" and not placed.shared


def test_one_node_has_room_for_both() -> None:
    placed = place(ClusterConfig(n_nodes=1), trainers=4, servers=[servers(2, 2)])
    assert nodes(placed) == ([0] * 4, [[0], [0]])
    assert [s[0].gpus for s in placed.servers[SERVER]] == ["@{gpus:4,5}", "@{gpus:6,7}"]


def test_a_server_of_16_gpus_takes_two_whole_nodes() -> None:
    placed = place(ClusterConfig(), trainers=4, servers=[servers(2, 16)])
    assert nodes(placed) == ([0] * 4, [[1, 2], [3, 4]])
    wide = place(ClusterConfig(), trainers=8, servers=[servers(1, 8, nnodes=2)])
    assert nodes(wide)[1] == [[1, 2]] and wide.servers[SERVER][0][1].gpus == "@{gpus:0,1,2,3}"


def test_colocated_servers_go_round_the_trainers_gpus() -> None:
    placed = place(ClusterConfig(n_gpus_per_node=4), trainers=8, servers=[servers(5, 2, around=8)])
    assert nodes(placed)[1] == [[0], [0], [1], [1], [0]] and placed.shared
    assert placed.servers[SERVER][4][0].gpus == "@{gpus:0,1}"
    assert len(placed.pools) == 2


def test_servers_on_nodes_of_another_kind() -> None:
    cluster = ClusterConfig(n_gpus_per_node=8, server_pool=PoolConfig(n_gpus_per_node=2))
    placed = place(cluster, trainers=4, servers=[servers(3, 1)])
    assert placed.pools == ("trainers", "servers", "servers")
    assert nodes(placed) == ([0] * 4, [[1], [1], [2]])


@pytest.mark.parametrize(
    ("cluster", "args", "says"),
    [
        ({"n_nodes": 2}, {"trainers": 8, "servers": [servers(2, 8)]}, "takes 3 node"),
        ({"n_nodes": 4}, {"trainers": 8, "servers": [servers(2, 8)]}, "takes 3 node"),
        ({"n_nodes": 1}, {"trainers": 8, "reward_nodes": 2}, "takes 3 node"),
        ({}, {"trainers": 12}, "do not fill nodes of cluster.n_gpus_per_node=8"),
        ({}, {"trainers": 8, "servers": [servers(1, 9)]}, r"server\.tp\*dp=9: does not divide"),
        ({}, {"trainers": 8, "servers": [servers(1, 16, nnodes=1)]}, "over 1 node"),
        (
            {"n_gpus_per_node": 4},
            {"trainers": 8, "servers": [servers(1, 3, around=8)]},
            "equal shares",
        ),
    ],
)
def test_what_does_not_fit_is_refused(cluster: dict, args: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        place(ClusterConfig(**cluster), **args)


# records


def make(folder: Path, *more: str, on_gpus: bool = True) -> Job:
    """The job of a 70B model on nodes of 8 GPUs, started from ENV."""
    model = write_stub(folder / "model")
    (model / "config.json").write_text(json.dumps(LLAMA_70B))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "uses_gpus", lambda env: on_gpus)
        patch.setattr("sys.executable", "/env/bin/python")
        patch.setattr("megarl.launcher.make.os.getcwd", lambda: "/work")
        patch.setattr("megarl.launcher.make.PACKAGE", Path("/code/megarl"))
        patch.setattr("megarl.launcher.plan.PACKAGE", Path("/code/megarl"))
        line = [
            f"actor.path={model}", "actor.optimizer.lr=1e-6", "gconfig.n_samples=2",
            f"fileroot={folder}/runs", "actor.attention=sdpa", "cluster.forward_env=[MY_*]", *more,
        ]  # fmt: skip
        return make_job(
            plan_cluster(parse_command_line(line, options=("nproc",))), ENV, cluster=True
        )


def text(folder: Path, *more: str, format: str = "table") -> str:
    shown = show(make(folder, *more), ENV, format)
    return shown.replace(str(folder), "/data") + "\n"


def test_70b_on_16_nodes(tmp_path: Path) -> None:
    job = make(tmp_path, *CASES["70b"])
    assert (len(job.pools), len(job.of(TRAINER)), len(job.of(SERVER))) == (16, 64, 8)
    rank = job.of(TRAINER)[42]
    assert (rank.node, rank.env["LOCAL_RANK"], rank.env["GROUP_RANK"]) == (5, "2", "5")
    assert rank.env["LOCAL_WORLD_SIZE"] == "8" and rank.env["WORLD_SIZE"] == "64"
    assert rank.log.endswith("/logs/trainer_42.log") and not job.of(TRAINER)[0].log
    assert Job.from_json(job.to_json()) == job


CONTROLLED = ["actor.parallel.tp=4", "server.count=2", "trainer.mode=controller"]


def test_a_launcher_starts_a_controller_its_trainers_and_a_driver(tmp_path: Path) -> None:
    job = make(tmp_path, *CONTROLLED)
    (controller,), trainers, (driver,) = map(job.of, (CONTROLLER, TRAINER, DRIVER))
    assert job.leaders == [controller] and job.workers == [*trainers, driver]
    assert controller.ports == ("controller.trainers", "controller.rollout")
    assert controller.env[CONTROLS] == (
        "trainers=@{address:controller.trainers},rollout=@{address:controller.rollout}"
    )
    assert "trainer.workers=4" in controller.command and "WORLD_SIZE" not in controller.env
    assert {t.gpus for t in trainers} == {"@{gpus:0,1,2,3}"} and len(trainers) == 4
    assert controller.env["CUDA_VISIBLE_DEVICES"] == driver.env["CUDA_VISIBLE_DEVICES"] == ""
    start = json.loads(trainers[3].env["MEGARL_WORKER"])
    assert (start["index"], start["count"], start["launched"]) == (3, 4, True)
    assert start["starter"] == "@{address:controller.trainers}"
    assert "1 controller" in text(tmp_path, *CONTROLLED)


def test_an_engine_is_refused_in_a_launched_controller(tmp_path: Path, monkeypatch) -> None:
    dist = pytest.importorskip("torch.distributed")  # missing in make stranger-313
    from megarl.parallel.worlds import init_distributed

    (controller,) = make(tmp_path, *CONTROLLED).of(CONTROLLER)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv(CONTROLS, controller.env[CONTROLS])
    with pytest.raises(ValueError, match="wrap the role in megarl"):
        init_distributed()
    assert not dist.is_initialized()


def test_a_controller_meets_trainers_of_two_nodes(tmp_path: Path) -> None:
    ways = ["trainer.mode=controller", "allocation_mode=sglang.d1+megatron.d2t8"]
    job = make(tmp_path, *ways)
    (controller,), trainers, (driver,) = map(job.of, (CONTROLLER, TRAINER, DRIVER))
    assert controller.node == driver.node == 0
    assert [t.node for t in trainers] == [0] * 8 + [1] * 8
    assert job.of(TRAINER, 0) == trainers[:8] and job.of(TRAINER, 1) == trainers[8:]
    last = trainers[15]
    assert (last.name, last.ports) == ("trainer 15", ())
    assert last.command[1:] == ("-m", "megarl.rpc.worker")
    assert last.log.endswith("/logs/trainers_15.log") and last.gpus == "@{gpus:0,1,2,3,4,5,6,7}"
    said = text(tmp_path, *ways)
    assert "trainer 0 to trainer 7, driver, controller" in said
    assert "trainer 8 to trainer 15" in said


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["trainer.scheduler=ray"], "trainer.scheduler=ray: "),
        (["trainer.workers=0"], "trainer.workers=0: must be > 0"),
        (["trainer.workers=3", "actor.parallel.tp=2"], "world size 3.*trainer.workers"),
        (["trainer.workers=2", "--nproc", "4"], "--nproc 4 with trainer.workers=2: leave one"),
    ],
)
def test_what_a_launched_controller_cannot_start(more: list, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        make(tmp_path, "trainer.mode=controller", *more)


def test_a_server_over_two_nodes(tmp_path: Path) -> None:
    first, second, *_ = make(tmp_path, *CASES["tp16"]).of(SERVER)
    assert (first.index, first.part, second.index, second.part) == (0, 0, 0, 1)
    assert first.command[-6:] == (
        "--nnodes", "2", "--node-rank", "0", "--dist-init-addr", "@{address:server.0.init}",
    )  # fmt: skip
    assert second.command[-3:] == ("1", "--dist-init-addr", "@{address:server.0.init}")
    assert first.ports == ("server.0", "server.0.init") and second.ports == ("server.0.1",)
    assert first.env["GLOO_SOCKET_IFNAME"] == first.env["NCCL_SOCKET_IFNAME"] == "ib0"


def test_the_replicas_of_a_server_have_gpus_of_its_node(tmp_path: Path) -> None:
    way = ["server.type=sglang", "server.tp=2", "weight_sync.type=disk", "server.count=3"]
    job = make(tmp_path, "actor.parallel.tp=8", *way, "server.dp=2")
    servers = [(s.node, s.gpus, (*s.command[-6:-4], *s.command[-2:])) for s in job.of(SERVER)]
    flags = ("--tp-size", "2", "--dp-size", "2")
    wanted = [(1, "@{gpus:0,1,2,3}", flags), (1, "@{gpus:4,5,6,7}", flags)]
    assert servers == [*wanted, (2, "@{gpus:0,1,2,3}", flags)]
    with pytest.raises(ConfigError, match=r"server\.tp\*dp=16: does not .* over 1 node"):
        make(tmp_path, "actor.parallel.tp=8", *way, "server.dp=8")


def test_reward_workers_are_on_nodes_without_gpus(tmp_path: Path) -> None:
    ways = ["allocation_mode=sglang.d1+megatron.d1t8", "cluster.reward_pool.n_nodes=2"]
    job = make(tmp_path, *ways, "rollout.reward_workers=32", "cluster.n_nodes=4")
    assert job.pools == ("nodes", "nodes", "rewards", "rewards")
    assert job.gpus_per_node == (8, 8, 0, 0)
    first, second = job.of(REWARDS)
    assert (first.restarts, job.of(SERVER)[0].restarts) == (3, 0)
    assert (first.node, first.gpus, second.node, second.ports) == (2, None, 3, ("rewards.1",))
    assert first.command[1:3] == ("-m", "megarl.rollout.rewards.node")
    assert first.command[-4:] == ("--workers", "32", "--timeout", "60")
    given = "rollout.reward_addresses=[@{address:rewards.0},@{address:rewards.1}]"
    assert all(trainer.command[-1] == given for trainer in job.of(TRAINER))
    assert "2 rewards" in text(tmp_path, *ways, "rollout.reward_workers=32")
    (tmp_path / "mine.py").write_text("def close(*args, **row):\n    return 0.0\n")
    named = make(tmp_path, *ways, f"train_dataset.reward={tmp_path / 'mine.py'}:close")
    assert named.of(REWARDS)[0].env["PYTHONPATH"].endswith(f":{tmp_path}")
    own = make(tmp_path, *ways, "rollout.reward_addresses=['10.0.0.1:7']")
    assert not own.of(REWARDS) and "rewards" not in own.pools


def test_a_judge_has_servers_and_gpus_of_its_own(tmp_path: Path) -> None:
    path = write_stub(tmp_path / "judging")
    ways = ["allocation_mode=sglang.d1t4+megatron.d1t8"]
    ways += [f"judge.path={path}", "judge.type=sglang", "judge.tp=2", "judge.count=2"]
    job = make(tmp_path, *ways, "judge.restarts=1")
    assert [(t.node, t.gpus) for t in job.of(SERVER)] == [(1, "@{gpus:0,1,2,3}")]
    judges = job.of(JUDGE)
    assert [(t.node, t.gpus) for t in judges] == [(1, "@{gpus:4,5}"), (1, "@{gpus:6,7}")]
    assert all(t.restarts == 1 and t.ports == (t.endpoint,) for t in judges)
    command = judges[1].command
    assert command[command.index("--model-path") + 1] == str(path) and "bfloat16" in command
    addresses = "@{address:judge.0},@{address:judge.1}"
    assert all(t.env["MEGARL_JUDGE_ADDRS"] == addresses for t in job.of(TRAINER))
    assert "1 server, 2 judge" in text(tmp_path, *ways)
    with pytest.raises(ConfigError, match=r"judge\.path=.*name the model that judges"):
        make(tmp_path, ways[0], "judge.count=1")
    with pytest.raises(ConfigError, match=r"judge\.tp=2: .*embedded server is one process"):
        make(tmp_path, *ways, "judge.type=embedded")


def test_the_judge_has_gpus_of_its_own_on_one_machine() -> None:
    both = [servers(2, 1), servers(1, 2, JUDGE)]
    placed = place_here(4, trainers=1, servers=both)
    assert [[s.gpus for s in seats] for seats in placed.servers[JUDGE]] == [["@{gpus:2,3}"]]
    assert [s.gpus for (s,) in placed.servers[SERVER]] == ["@{gpus:1}", "@{gpus:0}"]
    assert placed.shared and not place_here(5, trainers=1, servers=both).shared
    assert place_here(0, trainers=1, servers=both).servers[JUDGE] == ((Seat(node=0, gpus=None),),)
    with pytest.raises(ConfigError, match=r"judge\.count=2 of judge\.tp\*dp=2 need 5 GPUs"):
        place_here(4, trainers=1, servers=[servers(1, 1), servers(2, 2, JUDGE)])


@pytest.mark.parametrize("name", CASES)
def test_the_dry_run_is_as_in_the_golden_file(name: str, tmp_path: Path) -> None:
    assert text(tmp_path, *CASES[name]) == (GOLDEN / f"{name}.txt").read_text()


def test_a_node_reads_the_records_that_a_dry_run_prints(tmp_path: Path) -> None:
    job = make(tmp_path, *POOLS)
    assert Job.from_json(show(job, ENV, "json")) == job
    assert job.restarts == 2 and job.pools == ("trainers", "trainers", "servers")


def test_what_the_jobset_of_the_page_rests_on(tmp_path: Path) -> None:
    """Each pod runs one node's agent; one that fails starts the whole set again, never alone."""
    job = make(tmp_path, *CASES["70b"])
    (block,) = re.findall(r"```yml\n(apiVersion: jobset.*?)```", MULTINODE.read_text(), re.S)
    (replicated,) = yaml.safe_load(block)["spec"]["replicatedJobs"]
    of_job = replicated["template"]["spec"]
    pod = of_job["template"]["spec"]
    (container,) = pod["containers"]
    assert replicated["replicas"] == 1 and of_job["completionMode"] == "Indexed"
    assert of_job["parallelism"] == of_job["completions"] == len(job.pools)
    assert (of_job["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    assert pod["terminationGracePeriodSeconds"] > job.grace
    options = parse_command_line(container["args"], options=OPTIONS).options
    env = {"JOB_COMPLETION_INDEX": "15"}
    assert options.keys() < set(OPTIONS) and node_number(options, env, len(job.pools)) == 15
    (attempt,) = container["env"]
    assert options["attempt"] == f"1.$({attempt['name']})"
    assert attempt["valueFrom"]["fieldRef"]["fieldPath"].endswith("restart-attempt']")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == job.gpus_per_node[0]
    mounted = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert mounted.keys() == {v["name"] for v in pod["volumes"]}
    assert mounted["shared-memory"] == "/dev/shm"
    assert options["job"] == f"{mounted['records']}/job.json"


def test_secrets_are_masked_everywhere(tmp_path: Path) -> None:
    for format in ("table", "json"):
        shown = text(tmp_path, *POOLS, format=format)
        assert "hush" not in shown
    assert "WANDB_API_KEY=***" in text(tmp_path, *POOLS)
    with pytest.raises(ConfigError, match="--format xml: not one of table, json"):
        text(tmp_path, *POOLS, format="xml")
    with pytest.raises(ConfigError, match=r"--format jobset: .*JobSet .* reads json"):
        text(tmp_path, *POOLS, format="jobset")


def test_a_secret_typed_as_an_override_is_on_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, url = "train_dataset.options.api_key", "train_dataset.options.url"
    names = [f"MEGARL_SECRET_{k.replace('.', '_').upper()}" for k in (key, url)]
    for name in names:
        monkeypatch.setenv(name, "")  # so that it goes with the test
    given = [f"+{key}=s3cret-of-mine", f"+{url}=https://me:s3cret-of-mine@host/v1"]
    job = make(tmp_path, *CASES["70b"], *given)
    assert "s3cret-of-mine" not in job.to_json()
    assert os.environ[names[0]] == "s3cret-of-mine" and set(names) <= set(job.forwarded)
    env = dict(os.environ)
    assert "s3cret-of-mine" not in show(job, env) + show(job, env, "json")
    assert checked_config(job.config, []).train_dataset.options == {
        "api_key": "s3cret-of-mine",
        "url": "https://me:s3cret-of-mine@host/v1",
    }
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, *CASES["70b"], "+train_dataset.options.a={api_key: s3cret-of-mine}")
    assert "train_dataset.options.a" in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("api_key=null", None), ("stop_token=128001", 128001), ("api_key=true", True),
        ("api_key='it''s'", "it's"), ('api_key="a\\tb"', "a\tb"), ("api_key=a b # c", "a b # c"),
        ("api_key='128001'", "128001"), ("api_key=", ""), ("api_key=Word", "Word"),
        ("url=https://me:${oc.env:HOME}@host", f"https://me:{os.environ['HOME']}@host"),
    ],
)  # fmt: skip
def test_a_secret_means_in_the_trainers_what_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, value: Any
) -> None:
    name = typed.partition("=")[0]
    monkeypatch.setenv(f"MEGARL_SECRET_TRAIN_DATASET_OPTIONS_{name.upper()}", "")
    job = make(tmp_path, *CASES["70b"], f"+train_dataset.options.{typed}")
    assert checked_config(job.config, []).train_dataset.options == {name: value}


def test_trainers_read_what_was_checked_and_models_as_they_were_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_stub(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **kw: str(model))
    words = ["actor.path=org/model", "actor.optimizer.lr=1e-6", "gconfig.n_samples=2"]
    job = make_job(plan_cluster(parse_command_line([*words, f"fileroot={tmp_path}"])), ENV)
    read = checked_config(job.config, [])
    assert read.actor.path == "org/model" and read.actor.optimizer.lr == 1e-6
    assert job.of(SERVER)[0].command.count(str(model)) == 1
    assert job.of(TRAINER)[0].command[2] == "--checked"


def test_what_the_launcher_has_not_seen_whole_is_read_by_the_trainers(tmp_path: Path) -> None:
    model = write_stub(tmp_path / "model")
    words = [f"actor.path={model}", "actor.optimizer.lr=1e-6", "gconfig.n_samples=2"]
    words.append(f"fileroot={tmp_path}/runs")
    for more in (
        ["recipe=tests.unit.test_config:OwnConfig", "bonus=2"],
        ["cluster.container=image"],
    ):
        job = make_job(plan_cluster(parse_command_line([*words, *more])), ENV)
        assert job.config == "" and "--checked" not in job.of(TRAINER)[0].command


@pytest.mark.parametrize("value", ["https://bob:of-mine@${oc.env:HOME}/x", "hf_${oc.env:HOME}"])
def test_a_secret_beside_an_interpolation_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"options\.token: holds a secret; .*oc\.env:NAME"):
        make(tmp_path, *CASES["70b"], f"+train_dataset.options.token={value}")


@pytest.mark.parametrize("typed", ["seed={a", "+server.api_key='x"])
def test_an_override_that_is_no_yaml_is_refused(tmp_path: Path, typed: str) -> None:
    with pytest.raises(ConfigError, match="the value is not valid YAML"):
        make(tmp_path, *CASES["70b"], typed)


def test_the_environment_is_an_explicit_list() -> None:
    env = ENV | {"CUDA_VISIBLE_DEVICES": "3", "https_proxy": "p", "NCCL_DEBUG": "INFO"}
    assert forwarded(env) == {
        "PATH": "/usr/bin", "WANDB_API_KEY": "hush", "https_proxy": "p", "NCCL_DEBUG": "INFO",
    }  # fmt: skip
    assert forwarded(env, ["MY_*"])["MY_FLAG"] == "1"


def test_variables_that_the_configuration_reads_are_passed_on_and_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAM", "silent")
    monkeypatch.setitem(ENV, "TEAM", "silent")
    read = "stats_logger.wandb.options.entity=${oc.env:TEAM}"
    for format in ("table", "json"):
        shown = text(tmp_path, read, format=format)
        assert "TEAM" in shown and "silent" not in shown
    assert "TEAM" in make(tmp_path, read).forwarded


def test_marks() -> None:
    known = {"server.0": "10.0.0.1:77", "master": "10.0.0.2:88"}
    word = "a=[@{address:server.0}] @{host:master}@{port:master} ${x} {} @{gpus:0,1} @{cores:4}"
    assert endpoints([word]) == ["server.0", "master"]
    filled = fill(word, address=known.__getitem__, gpus=lambda n: f"<{n}>", cores=9)
    assert filled == "a=[10.0.0.1:77] 10.0.0.288 ${x} {} <0,1> 2"


def test_the_local_launcher_shows_its_job_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush")
    model = write_stub(tmp_path / "model")
    line = [
        f"actor.path={model}", "actor.optimizer.lr=1e-6", "gconfig.n_samples=2",
        f"fileroot={tmp_path}/runs", "actor.parallel.tp=2", "--dry-run",
    ]  # fmt: skip
    assert local.main(line) == 0
    shown = capsys.readouterr().out
    assert "1 server, 2 trainer" in shown and "hush" not in shown
    assert "trainer 1: node 0" in shown and "WORLD_SIZE=2" in shown and "server_0.log" in shown
    assert local.main([*line, "--format", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tasks"]) == 3
    assert local.main([*line, "cluster.n_nodes=2"]) == 2
    assert "use megarl.launcher.slurm" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


if __name__ == "__main__":
    for name, more in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            (GOLDEN / f"{name}.txt").write_text(text(Path(folder), *more))
