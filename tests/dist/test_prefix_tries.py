"""An engine that computes shared prefixes once is Hugging Face's model trained by torch's AdamW on
every token of every sequence, within the invariance suite's tolerances (see invariance.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.engine.micro_batch import SHARED
from tests.dist.engine_jobs import SP, Tensors, make_engine, state
from tests.dist.invariance import FAMILIES, GRADIENTS, LAYOUTS, OUTPUTS, check, train, worst
from tests.dist.lora_files import ALL, lora
from tests.dist.losses import LOSSES
from tests.dist.reference import hf_model, hf_outputs, hf_steps
from tests.dist.test_router_replay import run_replay
from tests.dist.world import World
from tests.tiny import VOCAB, save_hf

MANY = 10**6  # tokens of a micro-batch; the trie of `batch` has NODES of its TOKENS
TOKENS, NODES = 98, 44
# name -> (family, layout, loss, budget of a micro-batch, settings)
CASES: dict[str, tuple[str, str, str, int, dict[str, Any]]] = {
    "one": ("qwen3", "dp1", "policy", MANY, {}),
    "cut": ("llama", "dp1", "gspo", 20, dict(recompute_granularity="full")),
    "tp2": ("llama", "tp2", "policy", 30, dict(recompute_granularity="selective")),
    "tp2sp": ("qwen3", "tp2sp", "policy", MANY, {}),
    "value": ("glm", "tp2sp", "critic", 30, {}),
    "pp2": ("qwen3", "pp2", "policy", 20, {}),
    "pp2vpp2": ("glm4", "pp2vpp2", "reward", 30, {}),
    "dp2": ("llama", "dp2", "dpo", MANY, {}),
    "dp2cut": ("qwen3", "dp2", "policy", 20, dict(recompute_granularity="full")),
    "moe": ("qwen3_moe", "ep2", "policy", 30, {}),
    "mla": ("deepseek_v3", "tp2ep2", "policy", MANY, {}),
}
FULL: dict[str, tuple[str, str, str, int, dict[str, Any]]] = {
    f"{family}-{layout}-{loss}-{budget}": (family, layout, loss, budget, {})
    for family in ("llama", "qwen3", "glm", "glm4")
    for layout in ("dp1", "dp2", "tp2", "tp2sp", "pp2", "pp2split", "pp2vpp2", "tp2pp2")
    for loss, budget in (("policy", 20), ("dpo", 30), ("critic", MANY))
} | {
    f"{family}-{layout}": (family, layout, "policy", 30, {})
    for family in ("qwen2_moe", "mixtral", "deepseek_v2", "glm4_moe", "kimi_k2")
    for layout in ("dp1", "ep2", "tp2ep2", "pp2", "tp2pp2")
}


def sequences() -> list[list[int]]:
    """Returns samples of a prompt, and turns of episodes; a sequence ends where others go on, and
    one comes twice."""
    g = torch.Generator().manual_seed(3)

    def new(n: int) -> list[int]:
        return torch.randint(3, VOCAB, (n,), generator=g).tolist()

    prompt, question = new(8), new(5)
    turn = question + new(4)
    last = turn + new(3)
    return [
        prompt + new(4), last + new(2), prompt + new(6), prompt + new(5), turn + new(4), last,
        question + new(3), last,
    ]  # fmt: skip


def batch(model: Any) -> Tensors:
    """Returns the sequences in four pairs, with what every loss needs."""
    rows, g = sequences(), torch.Generator().manual_seed(5)
    width = max(map(len, rows))
    mask = torch.arange(width) < torch.tensor([len(r) for r in rows])[:, None]
    b = {
        "input_ids": torch.tensor([[*r, *[0] * (width - len(r))] for r in rows]),
        "attention_mask": mask,
        "loss_mask": mask & (torch.arange(width) >= 3),
        "advantages": torch.linspace(-1.0, 1.5, len(rows)),
        "group_ids": torch.tensor([4, 0, 9, 9, 0, 7, 7, 4]),
        "chosen": torch.tensor([True, True, True, False, False, False, True, False]),
        "values": torch.randn(mask.shape, generator=g),
        "returns": torch.randn(mask.shape, generator=g),
    }
    if not hasattr(model, "score"):
        with torch.no_grad():
            logp = hf_outputs(model, b)["logprobs"]
        b["old_logp"] = b["ref_logp"] = logp + 0.1 * torch.randn(mask.shape, generator=g)
    return b


@pytest.mark.parametrize("name", CASES)
def test_training_on_tries_equals_training_on_sequences(
    name: str, worlds: Callable[[int], World], tmp_path: Path
) -> None:
    family, layout, loss, budget, settings = (CASES | FULL)[name]
    model = hf_model(family, tie=False, head=LOSSES[loss].head, **FAMILIES[family])
    save_hf(model, tmp_path, family)
    b = batch(model)
    processes, parallel = LAYOUTS[layout]
    ranks = worlds(processes).run(
        train, str(tmp_path), parallel, loss, b, max_tokens=budget, head=LOSSES[loss].head,
        share_prefixes=True, **settings,
    )  # fmt: skip
    for stats in ranks[0]["stats"]:
        computed = stats.weights[SHARED]
        assert stats[SHARED] == pytest.approx(TOKENS / computed)
        assert computed == NODES if (layout, budget) == ("dp1", MANY) else computed < TOKENS
    check(ranks, hf_steps(model, b, LOSSES[loss]))


@pytest.mark.full
@pytest.mark.parametrize("name", FULL)
def test_the_full_product(name: str, worlds: Callable[[int], World], tmp_path: Path) -> None:
    test_training_on_tries_equals_training_on_sequences(name, worlds, tmp_path)


def all_outputs(path: str, b: Tensors, share: bool, **over: Any) -> dict[str, Any]:
    """Returns what tp2 sp says of the batch in every way there is, and the gradients of a step
    about the ids that each row brings for itself."""
    engine = make_engine(path, SP, max_tokens=30, share_prefixes=share, lm_head_topk=3, **over)
    names = ("topk_ids", "logprobs", "topk_logprobs", "topk_tail", "greedy_match", "logits")
    out = engine.forward(b, outputs=names, temperature=0.8)
    given = torch.randint(0, VOCAB, (*b["input_ids"].shape, 2), generator=torch.manual_seed(0))
    stats = engine.backward_batch(
        b | {"given_ids": given}, about_given, LOSSES["policy"].weight,
        outputs=("given_tail", "logprobs", "given_logprobs"), keep=("given_tail", "given_logprobs"),
    )  # fmt: skip
    result = {"outputs": out | stats.kept, "loss": stats["loss"]}
    result["grads"] = state(engine, grads=True)
    engine.destroy()
    return result


def about_given(outputs: Tensors, b: Tensors) -> Any:
    mask = b["loss_mask"]
    terms = outputs["given_logprobs"].sum(-1) + 0.3 * outputs["given_tail"] + outputs["logprobs"]
    return (b["advantages"][:, None] * terms)[mask].sum(), {}


def test_every_output_and_adapters(worlds: Callable[[int], World], tmp_path: Path) -> None:
    model = hf_model("qwen3", tie=True)
    save_hf(model, tmp_path, "qwen3")
    b = batch(model)
    flat, trie = (
        worlds(2).run(all_outputs, str(tmp_path), b, share, lora=lora(ALL))[0]
        for share in (False, True)
    )
    assert flat["outputs"].keys() == trie["outputs"].keys()
    for name, value in flat["outputs"].items():
        torch.testing.assert_close(trie["outputs"][name], value, rtol=0, atol=OUTPUTS, msg=name)
    assert trie["loss"] == pytest.approx(flat["loss"], rel=OUTPUTS)
    assert worst(trie["grads"], flat["grads"]) < (GRADIENTS,)


def routes_of_server(b: Tensors, experts: int, shape: tuple[int, int]) -> torch.Tensor:
    """Returns routes [B,S,*shape] that are equal where prefixes are, but for two rows from position
    4 on; those of last tokens are unknown."""
    out = torch.zeros(*b["input_ids"].shape, *shape, dtype=torch.int8)
    for i, row in enumerate(sequences()):
        for t in range(len(row)):
            seed = hash((*row[: t + 1], i * (i in (2, 7) and t >= 4)))
            g = torch.Generator().manual_seed(seed % 2**32)
            out[i, t] = torch.rand(shape[0], experts, generator=g).topk(shape[1]).indices
        out[i, len(row) - 1] = -1
    return out


@pytest.mark.parametrize(("kind", "parallel"), [("qwen3_moe", SP | dict(ep=2))])
def test_rows_share_what_routes_that_are_replayed_let_them(
    kind: str, parallel: dict[str, Any], worlds: Callable[[int], World], tmp_path: Path
) -> None:
    model = hf_model(kind, tie=False)
    save_hf(model, tmp_path, kind)
    c = model.config
    b = batch(model)
    shape = (c.num_hidden_layers, c.num_experts_per_tok)
    b["routed_experts"] = routes_of_server(b, c.num_experts, shape)
    flat, trie = (
        worlds(2).run(run_replay, str(tmp_path), parallel, b, {**over, "max_tokens": 30})[0]
        for over in ({}, dict(share_prefixes=True))
    )
    for name in ("without", "logprobs"):
        torch.testing.assert_close(trie[name], flat[name], rtol=0, atol=OUTPUTS, msg=name)
    assert torch.equal(trie["routed_experts"], flat["routed_experts"])
    for mine, theirs, stats in zip(trie["grads"], flat["grads"], trie["stats"], strict=True):
        assert worst(mine, theirs) < (GRADIENTS,)
        assert NODES < stats.weights[SHARED] < TOKENS


def apart(b: Tensors) -> Tensors:
    """Returns the batch with rows that begin with different tokens, so that none shares a prefix,
    and are of no group."""
    ids = b["input_ids"].clone()
    ids[:, 0] = 3 + torch.arange(len(ids))
    return b | {"input_ids": ids, "group_ids": torch.arange(len(ids))}


@pytest.mark.parametrize("layout", ["dp2", "pp2", "cp2"])
def test_auto_shares_where_it_pays_and_leaves_the_rest_to_the_bit(
    layout: str, worlds: Callable[[int], World], tmp_path: Path
) -> None:
    model = hf_model("qwen3", tie=False, **FAMILIES["qwen3"])
    save_hf(model, tmp_path, "qwen3")
    processes, parallel = LAYOUTS[layout]
    shared, b = batch(model), apart(batch(model))

    def run(batch: Tensors, share: Any) -> list[dict[str, Any]]:
        how = dict(max_tokens=30, head="lm", share_prefixes=share)
        return worlds(processes).run(train, str(tmp_path), parallel, "policy", batch, **how)

    pays = run(shared, "auto")
    check(pays, hf_steps(model, shared, LOSSES["policy"]))
    assert all((SHARED in stats) == (layout != "cp2") for stats in pays[0]["stats"])
    auto, whole = run(b, "auto"), run(b, False)
    for ours, plain in zip(auto, whole, strict=True):
        assert not any(SHARED in stats for stats in ours["stats"])
        for name, weight in plain["weights"].items():
            assert torch.equal(ours["weights"][name], weight), name


@pytest.mark.parametrize("option", ["moe_aux_loss_coeff", "moe_z_loss_coeff"])
def test_auto_leaves_the_losses_of_routers_to_all_tokens(
    option: str, worlds: Callable[[int], World], tmp_path: Path
) -> None:
    model = hf_model("qwen3_moe", tie=False)
    save_hf(model, tmp_path, "qwen3_moe")
    b, how = batch(model), dict(options={option: 0.3}, max_tokens=MANY)
    auto, whole = (
        worlds(1).run(train, str(tmp_path), {}, "policy", b, share_prefixes=share, **how)[0]
        for share in ("auto", False)
    )
    assert not any(SHARED in stats for stats in auto["stats"])
    for name, grad in whole["grads"].items():
        assert torch.equal(auto["grads"][name], grad), name


def refused(path: str, parallel: dict[str, Any]) -> str:
    try:
        make_engine(path, parallel, share_prefixes=True).destroy()
    except ValueError as e:
        return str(e)
    return "accepted"


def test_what_tries_do_not_have_is_refused(worlds: Callable[[int], World], tmp_path: Path) -> None:
    model = hf_model("qwen2", tie=False, **FAMILIES["qwen2"])
    save_hf(model, tmp_path, "qwen2")
    for parallel, why in (({}, "sliding window of 5 tokens"), (dict(cp=2), "needs parallel.cp=1")):
        assert why in worlds(2).run(refused, str(tmp_path), parallel)[0]
