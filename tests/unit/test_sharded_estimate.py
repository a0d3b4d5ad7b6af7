"""Tables of servers that are not there, and estimates of a sync shard to shard."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

import tools.plan as tool
from megarl.models.hf_config import ModelConfig
from megarl.models.piece_table import build_piece_table
from megarl.parallel.layout import Layout
from megarl.planning.advice import Cluster
from megarl.planning.memory import server_weights
from megarl.planning.sync import (
    REQUESTS,
    Receivers,
    estimate_sharded,
    plan_sharded,
    server_tables,
)
from megarl.transfer.geometry import TargetTable
from tests.unit.family_configs import FAMILIES, config


def elements(table: TargetTable) -> dict[str, torch.Tensor]:
    """How often each element of each parameter is filled."""
    counts: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(20_000))
    for e in table.entries:
        for v in e.views:
            counts[e.param].as_strided(v.shape, v.strides, v.offset).add_(1)
    return counts


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 1), (4, 4), (4, 2)])
def test_a_servers_ranks_hold_the_model_between_them(architecture: str, tp: int, ep: int) -> None:
    m = config(architecture)
    shapes = {t.name: t.shape for t in build_piece_table(m, Layout()).tensors}
    held = {name: torch.zeros(shape) for name, shape in shapes.items()}
    tables = server_tables(m, tp, ep if m.moe else 1)
    assert len({t.digest for t in tables}) == tp == len(tables)
    for table in tables:
        for count in elements(table).values():
            last = int(count.nonzero().max())
            assert (count[: last + 1] == 1).all(), "a parameter without gaps, and nothing twice"
        for e in table.entries:
            held[e.tensor][tuple(slice(a, b) for a, b in zip(*e.box, strict=True))] += 1
    for name, count in held.items():
        repeated = 2 if tp == 4 and ("k_proj" in name or "v_proj" in name) else 1
        assert (count > 0).all() and (
            count.min() == count.max() == tp  # norms, routers, latents
            or count.max() <= (repeated if m.attention.kv_heads == 2 else 1)
        ), name


def test_one_rank_of_a_server_layer_by_layer() -> None:
    """Rank 3 of 4 of 4 heads, 2 of keys and values: q, k and v below each other."""
    (*_, last) = server_tables(config(), 4)
    found = {
        e.tensor.removeprefix("model.layers.0."): (e.param, e.start, e.stop, e.views[0].offset)
        for e in last.entries
        if "layers.0." in e.tensor
    }
    qkv = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert found["self_attn.q_proj.weight"] == (qkv, (6, 0), (8, 8), 0)
    assert found["self_attn.k_proj.weight"] == (qkv, (2, 0), (4, 8), 2 * 8)
    assert found["self_attn.v_proj.weight"] == (qkv, (2, 0), (4, 8), 4 * 8)
    assert found["mlp.up_proj.weight"][1:] == ((12, 0), (16, 8), 4 * 8)
    assert found["mlp.down_proj.weight"][1:] == ((0, 12), (8, 16), 0)


def test_a_table_weighs_what_the_planner_says_of_a_server() -> None:
    for name, tp in (("qwen3-1.7b", 2), ("llama-2-7b", 4), ("qwen3-1.7b", 16)):
        m = tool.read_model(name)
        numbers = [sum(e.numel for e in t.entries) for t in server_tables(m, tp)]
        assert 2 * max(numbers) == pytest.approx(server_weights(m, tp), rel=0.01)


@pytest.mark.parametrize(
    ("tp", "ep", "words"),
    [
        (3, 1, "4 attention heads do not divide over 3 ranks of a server"),
        (4, 3, "ep=3 does not divide the server's tp=4"),
        (8, 8, "4 attention heads do not divide over 8"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(tp: int, ep: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        server_tables(config("Qwen3MoeForCausalLM"), tp, ep)


def test_states_that_do_not_divide_are_refused() -> None:
    m = config("Qwen3NextForCausalLM", linear_num_key_heads=3, linear_num_value_heads=6)
    with pytest.raises(ValueError, match="3 linear_num_key_heads do not divide over 2 ranks"):
        server_tables(m, 2)


def llama() -> ModelConfig:
    return config(vocab_size=128, tie_word_embeddings=True)


def test_seconds_of_one_trainer_and_one_server() -> None:
    """Everything goes through one adapter: bytes over its rate, and the copies beside it."""
    m = llama()
    cluster = Cluster(
        nic=1e4, link_efficiency=0.5, latency=0.0, request=1.0, tensor_load=2.0, load=1e3
    )
    whole = Receivers(gpus=1, tp=1)
    plan = plan_sharded(m, Layout(), whole, server_ep=1, round_bytes=1 << 20)
    e = estimate_sharded(plan, cluster)
    tensors = build_piece_table(m, Layout()).tensors
    nbytes = 2 * sum(t.numel for t in tensors)
    assert (e.total, e.received, e.sent, e.largest) == (nbytes,) * 4
    assert (e.senders, e.messages, e.rounds) == (1, 1, 1)
    assert e.network_seconds == pytest.approx(nbytes / 5e3)
    assert e.copy_seconds == pytest.approx(nbytes / 1e3 + 2 * len(tensors))
    assert e.seconds == pytest.approx(REQUESTS + e.network_seconds + e.copy_seconds)
    # two servers from one trainer take twice as long, from two replicas as long as one
    pair = Receivers(gpus=2, tp=1)
    for layout, times in ((Layout(), 2), (Layout(dp=2), 1)):
        found = estimate_sharded(
            plan_sharded(m, layout, pair, server_ep=1, round_bytes=1 << 20), cluster
        )
        assert found.sent == times * nbytes and found.total == 2 * nbytes
        assert found.network_seconds == pytest.approx(times * e.network_seconds)


def test_small_rounds_hide_copies_and_cost_messages() -> None:
    m, receivers = llama(), Receivers(gpus=2, tp=2)
    cluster = Cluster(nic=1e4, link_efficiency=1.0, latency=0.5, request=0.0, tensor_load=0.0,
                      load=1e4)  # fmt: skip
    one, many = (
        estimate_sharded(
            plan_sharded(m, Layout(tp=2), receivers, server_ep=1, round_bytes=n), cluster
        )
        for n in (1 << 20, 500)
    )
    assert one.rounds == 1 < many.rounds and one.messages == one.senders == 1 < many.messages
    assert many.network_seconds - one.network_seconds >= 0.5 * (many.rounds - 1)
    assert one.seconds == pytest.approx(one.network_seconds + one.copy_seconds)
    assert many.seconds == pytest.approx(many.network_seconds + many.copy_seconds / many.rounds)


def test_a_configuration_in_the_models_place_names_the_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        tool.main(["configs/llama3_70b_grpo.yaml", "--train", "8x8"])
    assert "--config configs/llama3_70b_grpo.yaml" in capsys.readouterr().err


def test_the_tool_plans_it(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--train 1x8 --tp 2 --serve 1x8 --server-tp 2 --sharded"
    command = ["qwen3-1.7b", *options.split()]
    tool.main(command)
    said = capsys.readouterr().out
    for words in ("shard to shard: ", "a server GPU takes     1.7 GB in 7 messages",
                  "tables and plan took"):  # fmt: skip
        assert words in said
    with pytest.raises(SystemExit, match="ep=4 does not divide the server's tp=2"):
        tool.main([*command, "--server-ep", "4"])
