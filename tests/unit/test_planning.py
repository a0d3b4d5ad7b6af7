"""Memory, traffic and advice of the planner, beside the piece table and published figures."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.loader import load_config
from megarl.models.hf_config import ModelConfig
from megarl.models.piece_table import build_piece_table, padded_vocab_size
from megarl.parallel.layout import Layout
from megarl.planning.advice import Cluster, best, candidates, estimate_step, even_split
from megarl.planning.job import expected_memory, find_shapes, other_models
from megarl.planning.memory import (
    StageMemory,
    Workload,
    chunks_in_flight,
    head_bytes,
    kv_bytes_per_token,
    layer_activations,
    model_bytes,
    parameters,
    server_weights,
    stage_activations,
    stage_numel,
    training_memory,
    turn_memory,
)
from megarl.planning.sync import Receivers, estimate_broadcast
from megarl.weight_sync.plan import plan_sync
from tests.unit.family_configs import FAMILIES, config
from tools import plan as tool

LAYOUTS = (
    Layout(),
    Layout(tp=2, pp=2, dp=2, sequence_parallel=True),
    Layout(tp=4, pp=2, vpp=2),
    Layout(tp=2, pp=4, ep=2, dp=2),
    Layout(tp=2, pp=2, dp=2, ep=4, split=(1, 3)),
    Layout(tp=4, ep=2, etp=2),
)


@pytest.mark.parametrize(
    "name, total, active",
    # Llama 3.1's own count of its safetensors; DeepSeek-V3 and Qwen3: model cards
    (
        ("llama-3.1-405b", 405_853_388_800, 405_853_388_800),
        ("meta-llama/Llama-3.1-70B-Instruct", 70_553_706_496, 70_553_706_496),
        ("Qwen/Qwen3-1.7B", 1_720_574_976, 1_720_574_976),
        ("smollm2-135m-instruct", 134_515_008, 134_515_008),
        ("deepseek-v3", 671e9, 37e9),
        ("qwen3-235b-a22b", 235e9, 22e9),
        ("Qwen/Qwen3-30B-A3B", 30.53e9, 3.3e9),
        # the model card says 80B and 3B; these are the closed forms of its config.json
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 79_674_391_296, 3_874_929_408),
        # the model card's 5.13B leave the embedding out of what a token meets
        ("openai/gpt-oss-120b", 116.83e9, 5.13e9 + 201088 * 2880),
    ),
)
def test_published_parameter_counts(name: str, total: float, active: float) -> None:
    have = parameters(tool.read_model(name))
    if isinstance(total, int):
        assert have == (total, active)
    assert have[0] == pytest.approx(total, rel=1e-3)
    assert have[1] == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("tie", (False, True))
def test_weights_are_the_piece_tables(architecture: str, tie: bool) -> None:
    m = config(architecture, tie_word_embeddings=tie)
    for layout in LAYOUTS:
        if m.moe is None and layout.ep * layout.etp > 1:
            continue
        table = build_piece_table(m, layout)
        stages = stage_numel(m, layout)
        for c in layout.all_coords:
            local = table.local_params(c).values()
            dense = sum(math.prod(p.shape) for p in local if p.place.tp is not None)
            expert = sum(math.prod(p.shape) for p in local if p.place.tp is None)
            assert (stages[c.pp].dense, stages[c.pp].expert) == (dense, expert)


@pytest.mark.parametrize(
    "name, layout",
    [
        ("llama-3.1-70b", Layout(tp=8, pp=4, dp=2)),
        ("qwen3-1.7b", Layout(tp=4, pp=2, dp=2)),
        ("qwen3-235b-a22b", Layout(tp=4, pp=2, ep=4, dp=2)),
    ],
)
def test_what_is_gathered_lies_where_the_piece_table_says(name: str, layout: Layout) -> None:
    m, cluster = replace(tool.read_model(name), num_layers=8), Cluster(gpus_per_node=4)
    near = far = total = 0
    for tensor in build_piece_table(m, layout).tensors:
        for piece in tensor.pieces:
            rank = piece.place.rank(layout)
            near += 2 * piece.numel * (0 < rank < 4)
            far += 2 * piece.numel * (rank >= 4)
            total += 2 * piece.numel
    e = estimate_broadcast(m, layout, Receivers(gpus=8, tp=4), cluster, 1 << 29)
    assert e.nbytes == total and e.buckets == math.ceil(total / (1 << 29))
    assert e.gather_nvlink == pytest.approx(near, rel=0.01)
    assert e.gather_nic == pytest.approx(far, rel=0.01)


@pytest.mark.parametrize("bucket_bytes", (1, 700, 5000))
def test_what_a_server_fuses_within_a_request_shares_a_bucket(bucket_bytes: int) -> None:
    m = config("DeepseekV3ForCausalLM", q_lora_rank=24)
    table = build_piece_table(m, Layout(tp=2, pp=2, dp=2, ep=4))
    plan = plan_sync(table, torch.bfloat16, bucket_bytes)
    bucket_of = {member.name: b.index for b in plan.buckets for member in b.members}
    assert bucket_of.keys() == table.by_name.keys()
    fused = ("q_a_proj", "kv_a_proj_with_mqa")
    for i in range(m.num_layers):
        names = [f"model.layers.{i}.self_attn.{part}.weight" for part in fused]
        assert bucket_of[names[0]] == bucket_of[names[1]]


def plain(layers: int = 8) -> ModelConfig:
    """A layer as in Korthikanti et al.: as many key/value heads as heads, 4 H wide."""
    return config(
        "Qwen2ForCausalLM", num_hidden_layers=layers, hidden_size=64, num_attention_heads=8,
        num_key_value_heads=8, head_dim=8, intermediate_size=256,
    )  # fmt: skip


@pytest.mark.parametrize("tp", (1, 2, 4, 8))
def test_activations_are_korthikantis(tp: int) -> None:
    """s b h (10 + 24/t), and (34)/t with sequence parallelism (their table 2, attention's scores
    not kept). Here no dropout masks (1 + 1 of the 10), 8/t for the gate, 4/t for rotated queries
    and keys, and the kernel's log-sum of 4 bytes per head."""
    m, tokens = plain(), 1000
    h, log_sums = m.hidden_size, 4 * m.attention.heads / tp
    for parallel, whole in ((False, 10 - 2), (True, (10 - 2) / tp)):
        have = layer_activations(m, Layout(tp=tp, sequence_parallel=parallel), 0, tokens)
        assert have == tokens * (h * (whole + (24 + 8 + 4) / tp) + log_sums)


def test_pipelines_keep_what_the_paper_says() -> None:
    """L layers on the first stage whatever pp, L (1 + (p - 1) / (p m)) when interleaved; with full
    recomputation 2 s b h of each, and the layer at work."""
    m, tokens = plain(16), 1 << 10
    work = Workload(batch_tokens=1 << 20, micro_batch_tokens=tokens)
    one = layer_activations(m, Layout(), 0, tokens)
    for pp in (1, 2, 4):
        first = stage_activations(m, Layout(pp=pp), work, 0)
        assert first == 16 * one
        assert stage_activations(m, Layout(pp=pp), work, pp - 1) == 16 * one // pp
    interleaved = stage_activations(m, Layout(pp=4, vpp=2), work, 0)
    assert interleaved == 16 * one * (1 + 3 / (4 * 2))
    full = Workload(batch_tokens=1 << 20, micro_batch_tokens=tokens, recompute="full")
    assert stage_activations(m, Layout(pp=2), full, 0) == 16 * 2 * tokens * m.hidden_size + one
    assert chunks_in_flight(Layout(pp=4), 0, micro_batches=2) == 2


@pytest.mark.parametrize("dp", (1, 4))
def test_bytes_per_parameter_are_megatron_cores(dp: int) -> None:
    """Its manual: 6 + 12/d with bf16 weights, fp32 gradients and a distributed optimizer."""
    m = plain()
    (stage,) = training_memory(m, Layout(dp=dp), Workload())
    states, per = stage.weights + stage.grads + stage.optimizer, 6 + 12 / dp
    assert states == pytest.approx(per * stage_numel(m, Layout())[0].total, rel=1e-5)
    assert stage.head > 0 == stage.others == stage.resting == stage.fp8


def test_servers_repeat_kv_heads_and_cache_what_they_keep() -> None:
    qwen, deepseek = (tool.read_model(n) for n in ("qwen3-235b-a22b", "deepseek-v3"))
    # the model card's 94 layers, 4 heads of 128 for keys and values
    assert kv_bytes_per_token(qwen, 4) == kv_bytes_per_token(qwen, 8) == 2 * 94 * 2 * 128
    assert kv_bytes_per_token(qwen, 1) == 2 * 94 * 2 * 128 * 4
    # DeepSeek-V3's report: a latent of 512 and a key of 64 per token and layer
    assert kv_bytes_per_token(deepseek, 8) == 2 * 61 * 576
    whole = 2 * parameters(qwen)[0]
    assert whole / 8 < server_weights(qwen, 8) < whole / 8 * 1.01
    assert server_weights(qwen, 1) == pytest.approx(whole, rel=1e-3)


def test_seconds_of_buckets() -> None:
    """Two stages of two ranks on nodes of two: half comes over the network, a quarter from rank 1.
    The next bucket is gathered while servers take the one before."""
    m = plain()
    total = 2 * parameters(m)[0]
    cluster = Cluster(
        gpus_per_node=2, nvlink=1e4, nic=1e3, link_efficiency=0.5, latency=0.0, request=1.0,
        tensor_load=0.0, load=1e4,
    )  # fmt: skip
    layout, receivers = Layout(tp=2, pp=2), Receivers(gpus=4, tp=2)
    one, many = (estimate_broadcast(m, layout, receivers, cluster, n) for n in (total, total // 9))
    assert (one.buckets, many.buckets) == (1, 10)
    assert one.gather_nic == pytest.approx(total / 2, rel=0.02)
    assert one.gather_nvlink == pytest.approx(total / 4, rel=0.02)
    assert one.gather_seconds == one.gather_nic / 500 + one.gather_nvlink / 5000
    assert one.broadcast_seconds == total / 500 and one.load_seconds == 1.0 + total / 1e4
    assert (one.broadcast_nvlink, one.broadcast_nic) == (2 * total, 2 * total)
    sending = many.broadcast_seconds + many.load_seconds
    assert one.seconds == one.gather_seconds + one.broadcast_seconds + one.load_seconds
    assert many.seconds == pytest.approx(sending + many.gather_seconds / 10)
    assert many.bottleneck == "broadcast" and many.bound == total / 1e3


def test_an_estimate_is_no_better_than_its_bound() -> None:
    m, layout = tool.read_model("llama-3.1-405b"), Layout(tp=8, pp=2, dp=4)
    e = estimate_broadcast(m, layout, Receivers(gpus=32, tp=16), Cluster(), 1 << 29)
    assert e.seconds > e.bound > e.sharded_bound > 0


def test_advice_fits_and_is_sorted() -> None:
    m = tool.read_model("qwen3-235b-a22b")
    cluster, work = Cluster(), Workload()
    found = list(candidates(m, 128, cluster, work))
    fit = best(found, cluster)
    assert fit and len(fit) < len(found)
    assert all(c.bytes <= cluster.gpu_bytes for c in fit)
    times = [c.step.seconds for c in fit]
    assert times == sorted(times) and times[0] > 0
    assert all(c.layout.world_size == 128 for c in found)
    assert not best(list(candidates(m, 8, cluster, work)), cluster)


def test_what_costs_time() -> None:
    m, cluster, work = tool.read_model("qwen3-235b-a22b"), Cluster(), Workload()

    def step(**degrees: Any) -> Any:
        return estimate_step(m, Layout(**degrees), cluster, work)

    base = step(tp=4, pp=2, dp=16, ep=8, sequence_parallel=True)
    assert step(tp=8, pp=2, dp=8, ep=8, sequence_parallel=True).tp > base.tp > 0
    assert step(tp=4, pp=2, dp=16, ep=64, sequence_parallel=True).ep > 2 * base.ep  # leaves a node
    assert step(tp=4, pp=2, vpp=47, dp=16, ep=8, sequence_parallel=True).bubble < base.bubble
    assert base.cp == 0.0 and step(tp=4, cp=2, pp=2, dp=8, ep=8, sequence_parallel=True).cp > 0
    assert even_split(61, 16) == (3,) + (4,) * 13 + (3, 3) and even_split(8, 4) is None


def test_the_memory_of_turns() -> None:
    """A frozen model's pass and activations are not there together, nor servers and optimizer."""
    sizes = dict(
        weights=2, grads=4, optimizer=12, fp8=1, activations=5, head=1, others=3, resting=2
    )
    first = StageMemory(**sizes)
    second = StageMemory(**(sizes | {"weights": 3, "activations": 0, "head": 0}))
    found = turn_memory([first, second], weights=8, kv_cache=60, buckets=1)
    assert found == {"generate": 68, "train": 2 + 4 + 12 + 1 + 3 + 5 + 1, "sync": 8 + 3 + 1}
    small = turn_memory([second], weights=8, kv_cache=60, buckets=1)
    assert small["train"] == 3 + 4 + 12 + 1 + 3 + 2  # the frozen model's pass


@pytest.mark.parametrize(("room", "kept"), [(-1, 8), (0, 32)])
def test_the_head_has_logits_in_two_bytes(room: int, kept: int) -> None:
    """Of a chunk, or of the whole micro-batch where they are few enough."""
    m, layout = plain(), Layout(tp=2)
    rows = padded_vocab_size(m.vocab_size, 2) // 2
    keep = 2 * 32 * rows + room
    work = Workload(micro_batch_tokens=32, head_chunk_tokens=8, head_keep_bytes=keep)
    hidden, weight = 2 * 2 * 32 * m.hidden_size, (4 + 2) * rows * m.hidden_size
    assert head_bytes(m, layout, work) == hidden + weight + 2 * kept * rows


def test_a_sync_between_turns_of_one_node_goes_over_nvlink(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["qwen3-30b-a3b", "--train", "1x8", "--ep", "8", "--serve", "1x8", "--server-tp=4"]
    tool.main(command)
    assert "bound by the broadcast" in capsys.readouterr().out
    tool.main([*command, "--turns"])
    assert "bound by the servers' loading" in capsys.readouterr().out


def test_what_precision_and_host_memory_change() -> None:
    m, layout = plain(), Layout(tp=2)
    plainly = training_memory(m, layout, Workload())[0]
    numel = stage_numel(m, layout)[0].total
    half = training_memory(m, layout, Workload(state_bytes=8, fp8=True))[0]
    assert plainly.optimizer == 12 * numel and half.optimizer == 8 * numel
    # embedding, head and norms are not multiplied in FP8
    table = build_piece_table(m, layout)
    c = next(iter(layout.all_coords))
    kept = {n: p for n, p in table.local_params(c).items() if re.search(r"\.linear_\w+\.weight", n)}
    assert half.fp8 == 2 * sum(math.prod(p.shape) for p in kept.values()) > 0
    frozen = model_bytes(m, layout, Workload(), trained=False)
    assert frozen == 2 * numel
    assert model_bytes(m, layout, Workload(), trained=False, average=True) == 6 * numel
    assert model_bytes(m, layout, Workload(fp8=True), trained=False) == frozen + half.fp8 // 2
    assert model_bytes(m, layout, Workload(), trained=True) == plainly.held == (2 + 4 + 12) * numel


@pytest.mark.parametrize(
    ("overrides", "beside"),
    [
        ([], (0, 0)),
        (["ref={}"], (1, 0)),
        (["ref={offload: true}"], (0, 1)),
        (["ref={ema: 0.9}"], (3, 0)),
        (["ref={}", "actor.lora.r=8"], (0, 0)),  # the actor without its adapters
        (["reward_model.path=qwen3-1.7b", "ref={}"], (2, 0)),
        (["reward_model={path: qwen3-1.7b, offload: true}", "ref={}"], (1, 1)),
        (["recipe=distill", "teacher.path=qwen3-1.7b"], (1, 0)),
        (["recipe=distill", "teacher.path=qwen3-1.7b", "ref={offload: true}"], (1, 1)),
        (["recipe=ppo", "critic.path=qwen3-1.7b", "critic.optimizer={}"], (9, 0)),
        (["ref={}", "weight_sync.type=colocated", "rollout.max_head_offpolicyness=0"], (0, 1)),
    ],
)
def test_models_beside_the_policy_are_counted(
    overrides: list[str], beside: tuple[int, int]
) -> None:
    """In weights of bf16: a critic has 18 bytes a parameter, a moving average 6."""
    path = str(tool.ROOT / "configs" / "gsm8k_grpo.yaml")
    cfg = load_config(path, ["actor.path=qwen3-1.7b", "actor.parallel={tp: 1}", *overrides])
    weights = 2 * parameters(tool.read_model("qwen3-1.7b"))[0]
    always, passing = other_models(cfg, 1, tool.read_model)
    assert (always / weights, passing / weights) == pytest.approx(beside, rel=0.01)


def test_what_a_recipe_takes_is_said_without_its_cluster() -> None:
    config = tool.ROOT / "configs" / "qwen3_30b_a3b_grpo.yaml"
    raw = find_shapes("qwen3-30b-a3b", tool.ROOT / "configs" / "models")
    lines = list(expected_memory(load_config(str(config)), {"Qwen/Qwen3-30B-A3B": raw}))
    assert len(lines) == 5 and "optimizer" in lines[0] and lines[1].startswith("  stage 0")
    assert "fits 80 GiB" in lines[2] and "in turn" in lines[3] and "fits 80 GiB" in lines[4]
    left_out = load_config(str(config), ["server.options.mem_fraction_static=null"])
    usual = list(expected_memory(left_out, {"Qwen/Qwen3-30B-A3B": raw}))
    assert "generate 56.0" in lines[3] and "generate 64.0" in usual[3]


def test_the_tool(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = "qwen3-235b-a22b --train 64x8 --tp 4 --pp 4 --ep 8 --serve 32x8 --server-tp 8 --turns"
    tool.main(command.split())
    said = capsys.readouterr().out
    for words in (
        "235.1B parameters, 22.2B of them per token", "dp32 tp4 pp4 ep8", "does NOT fit 80 GiB",
        "in turn, GiB per GPU: generate 68.0, train", "KV cache",
        "one weight sync: 470.2 GB in 876 buckets", "bound by", "advice: of",
        "planned in",
    ):  # fmt: skip
        assert words in said
    for words, wrong in (
        ("no config.json at", f"{tmp_path}/absent"),
        ("--train 8: give nodes", "deepseek-v3 --train 8"),
        ("choose tp from", "deepseek-v3 --tp 3"),
        ("--server-tp 3 does not divide", "llama-3.1-405b --tp 8 --serve 1x8 --server-tp 3"),
    ):
        with pytest.raises(SystemExit, match=words):
            tool.main(wrong.split())


@pytest.mark.parametrize(
    ("config", "train", "words"),
    [
        ("llama3_70b", "8x8", ("dp4 tp8 pp2", "16 servers of tp4", "141.1 GB")),
        ("qwen3_30b_a3b", "1x8", ("dp8 ep8", "2 servers of tp4", "61.1 GB")),
        ("qwen3_235b", "32x8", ("dp8 tp4 pp8 ep8", "16 servers of tp8", "470.2 GB")),
        ("deepseek_v3", "64x8", ("dp4 tp8 pp16 ep8", "[4, 4, 4,", "16 servers of tp16")),
    ],
)
def test_the_ready_recipes_fit(
    config: str, train: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--config", str(tool.ROOT / "configs" / f"{config}_grpo.yaml"), "--train", train]
    tool.main(command)
    said = capsys.readouterr().out
    assert "does NOT fit" not in said
    for part in (*words, "fits 80 GiB", "a step of", "one weight sync", "  estimate "):
        assert part in said
    tool.main([*command, "--recompute", "none", "--micro-batch-tokens", "262144"])
    assert "does NOT fit 80 GiB" in capsys.readouterr().out  # an option beats the recipe


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        *((f"deepseek-v3 --{name} {value}", f"--{name}: '{value}': must be a whole number > 0")
          for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "server-tp", "batch-tokens",
                       "micro-batch-tokens", "sequence", "bucket-mb", "top")
          for value in ("0", "two")),
        ("deepseek-v3 --nic-gbps nan", "--nic-gbps: 'nan': must be a number > 0"),
        ("deepseek-v3 --nic-gbps 0", "--nic-gbps: '0': must be a number > 0"),
        ("deepseek-v3 --server-memory 5", "'5': must be a fraction above 0, at most 1"),
        ("deepseek-v3 --train 0x8", "--train 0x8: give nodes and GPUs of a node"),
        ("deepseek-v3 --train 8x8 --pp 3", "3 does not divide the world size 64"),
        ("", "give a MODEL or --config X.yaml"),
        ("--config absent.yaml", "absent.yaml"),
        ("deepseek-v4", "no config.json at 'deepseek-v4'; give a directory, a file or one of"),
        ("EMPTY", "no config.json at"),
        ("EMPTY/bad.json", "bad.json is not a JSON file: Expecting"),
        ("EMPTY/latin.json", "latin.json is not a JSON file: 'utf-8' codec"),
        ("EMPTY/list.json", "list.json is not a model's config.json: it holds a list"),
    ],
)  # fmt: skip
def test_the_tool_refuses_nonsense_in_words(
    wrong: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.json").write_text("{no")
    (tmp_path / "latin.json").write_bytes('{"a": "ß"}'.encode("latin-1"))
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(SystemExit) as caught:
        tool.main(wrong.replace("EMPTY", str(tmp_path)).split())
    said = capsys.readouterr().err if caught.value.code == 2 else str(caught.value.code)
    assert words in said
