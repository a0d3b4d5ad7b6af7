"""Routes on the wire, and what of them a sample keeps over several requests."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config.loader import load_config
from megarl.trainer.rollout_metrics import rollout_metrics
from megarl.utils.http import HttpError
from megarl.wire.routes import Routes, RouteShape, check_routes, decode, encode

SHAPE = RouteShape(layers=2, experts=8, top_k=2)
# SGLang 0.5.23, Qwen3-MoE of two layers: the first four positions of prompt 2 40 50 60 7 120
SGLANG = "AwAAAAAAAAAAAAAAAQAAAAAAAAADAAAAAQAAAAAAAAAAAAAAAwAAAAEAAAACAAAAAwAAAAAAAAABAAAAAgAAAA=="


def test_what_sglang_sends_is_read() -> None:
    found = decode(SGLANG, SHAPE)
    assert found.dtype == torch.int8
    assert found.tolist() == [
        [[3, 0], [0, 1]],
        [[0, 3], [1, 0]],
        [[0, 3], [1, 2]],
        [[3, 0], [1, 2]],
    ]
    assert encode(found) == SGLANG
    assert np.frombuffer(base64.b64decode(encode(found)), np.int32).tolist()[:4] == [3, 0, 0, 1]
    assert decode("", SHAPE).shape == (0, 2, 2)


@pytest.mark.parametrize(
    "experts, dtype", [(128, torch.int8), (129, torch.int16), (1 << 15, torch.int16)]
)
def test_numbers_are_as_small_as_they_can_be(experts: int, dtype: torch.dtype) -> None:
    shape = RouteShape(layers=1, experts=experts, top_k=1)
    last = torch.tensor([[[experts - 1]]])
    assert decode(encode(last), shape).dtype == shape.unknown(3).dtype == dtype
    assert torch.equal(decode(encode(last), shape).long(), last)
    assert (shape.unknown(3) == -1).all()


@pytest.mark.parametrize(
    "text, words",
    [
        (7, "not the base64 of int32 numbers, 2 in each of 2 layers"),
        ("?!", "not the base64"),
        (encode(torch.zeros(3, 1, 2)), "does the server run the model that is trained"),
        (encode(torch.full((1, 2, 2), 8)), "names the experts 8 to 8 of a model that has 8"),
        (encode(torch.full((1, 2, 2), -1)), "names the experts -1 to -1"),
    ],
)
def test_what_is_no_routing_is_refused(text: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode(text, SHAPE)


# ---- over several requests

ONE = RouteShape(layers=1, experts=100, top_k=1)


def meta(*numbers: int, **more: Any) -> dict[str, Any]:
    return {"routed_experts": encode(torch.tensor(numbers).reshape(-1, 1, 1))} | more


def known(routes: Routes) -> list[int]:
    return [int(n) for n in routes.known.flatten()]


def test_the_first_answer_that_knows_a_position_counts() -> None:
    routes = Routes(ONE, start=0, prompt_len=3)
    routes.absorb(meta(1, 2, 3, 4), sent=3, got=2, first=0)
    assert known(routes) == [1, 2, 3, 4] and routes.end == 4
    # an abort before the first token, and one in the queue
    routes.absorb({"completion_tokens": 0}, sent=5, got=0, first=4)
    assert routes.end == 4
    # a request for several samples, of which another knew less
    routes.absorb(meta(92, 93, 94, 5, 6), sent=5, got=2, first=1)
    assert known(routes) == [1, 2, 3, 4, 5, 6]


def test_routes_begin_where_a_turn_lacks_them() -> None:
    routes = Routes(ONE, start=2, prompt_len=4)
    assert routes.end == 2
    routes.absorb(meta(3, 4, 5), sent=4, got=2, first=2)
    assert known(routes) == [3, 4, 5] and routes.end == 5


def test_a_token_that_is_read_again_does_not_get_other_routes() -> None:
    """Tokens 3 and 4 came without routes; a later request reads them again."""
    routes = Routes(ONE, start=0, prompt_len=3)
    routes.absorb({"finish_reason": {}}, sent=3, got=2, first=0)
    assert known(routes) == [-1] * 4
    again = Routes(ONE, start=0, prompt_len=3)
    again.absorb(meta(1, 2, 3, 4, 5, 6), sent=5, got=2, first=0)
    assert known(again) == [1, 2, -1, -1, 5, 6]


def test_what_a_retraction_recomputed_under_newer_weights_is_unknown() -> None:
    spans = [{"version": "0", "start": 0, "end": 2}, {"version": "1", "start": 2, "end": 4}]
    retracted = Routes(ONE, start=0, prompt_len=2)
    said = meta(1, 2, 3, 4, 5, weight_versions=spans, num_retractions=1)
    retracted.absorb(said, sent=2, got=4, first=0)
    assert known(retracted) == [1, -1, -1, 4, 5]
    for same in ({"num_retractions": 0}, {"weight_versions": spans[:1]}):
        routes = Routes(ONE, start=0, prompt_len=2)
        routes.absorb(said | same, sent=2, got=4, first=0)
        assert known(routes) == [1, 2, 3, 4, 5]


def test_another_number_of_routes_than_of_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="has 3 positions, not the 4 from 0 to the last token but"):
        Routes(ONE, start=0, prompt_len=3).absorb(meta(1, 2, 3), sent=3, got=2, first=0)


# ---- servers that cannot


@pytest.mark.parametrize(
    "info, words",
    [
        ({}, "was started without --enable-return-routed-experts"),
        ({"enable_return_routed_experts": True, "pp_size": 2}, "its last pipeline stage alone"),
        (
            {"enable_return_routed_experts": True, "enable_hierarchical_cache": True},
            "the KV cache that it offloads",
        ),
        (
            {"enable_return_routed_experts": True, "disaggregation_mode": "decode"},
            "prompts that another server reads",
        ),
        (HttpError("h:1", "/server_info", "failed"), "says nothing of its flags"),
    ],
)
def test_a_server_that_cannot_is_named(info: Any, words: str) -> None:
    good = {"enable_return_routed_experts": True, "pp_size": 1, "disaggregation_mode": "null"}
    with pytest.raises(RuntimeError, match=f"router_replay=rollout .*: h:1 .*{words}") as error:
        check_routes({"h:1": info, "h:2": good})
    assert "h:2" not in str(error.value)


# ---- figures and configuration


def test_the_share_of_trained_tokens_whose_routes_are_known() -> None:
    """A token's routes are those of the position before it, where it was predicted."""
    routes = torch.zeros(2, 4, 3, 2, dtype=torch.int8)
    routes[0, 2], routes[0, 3], routes[1, 1, 2] = -1, -1, -1
    trained = torch.tensor([[False, True, True, True], [False, False, True, False]])
    batch = {
        "input_ids": torch.ones(2, 4, dtype=torch.int64),
        "attention_mask": torch.ones(2, 4, dtype=torch.bool),
        "loss_mask": trained,
        "rewards": torch.zeros(2),
        "group_ids": torch.zeros(2, dtype=torch.int64),
        "routed_experts": routes,
    }
    share = rollout_metrics(batch, version=0)["moe/routes_known"]
    assert share == pytest.approx((2 * 3 + 2) / (4 * 3))


def test_the_boolean_of_before_still_says_trainer() -> None:
    for given, meant in ((True, "trainer"), (False, "off"), ("rollout", "rollout")):
        text = str(given).lower()
        cfg = load_config(None, ["recipe=grpo", f"actor.router_replay={text}"])
        assert cfg.actor.router_replay == meant  # type: ignore[attr-defined]
