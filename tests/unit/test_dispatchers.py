"""megatron-core's token dispatchers of DeepEP keep no tensor of a micro-batch either."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

TOKENS, HIDDEN, EXPERTS = 6, 8, 4


class Group:
    """Ranks, of which the others send and receive nothing."""

    def __init__(self, size: int) -> None:
        self.size = lambda: size


class Config(SimpleNamespace):
    """Settings of a TransformerConfig; all others are None."""

    def __getattr__(self, _: str) -> None:
        return None


def dispatch(x: torch.Tensor, indices: torch.Tensor, probs: torch.Tensor, *_: Any, **__: Any):
    return x, indices, probs, torch.bincount(indices.flatten(), minlength=EXPERTS), object()


def hybrid_dispatch(x: torch.Tensor, *_: Any, probs: torch.Tensor, **__: Any):
    return x, probs, None, torch.full((EXPERTS,), TOKENS), (x, probs)


def combine(x: torch.Tensor, *_: Any, **__: Any):
    return x, None


def tensors(part: Any) -> list[str]:
    return [name for name, value in vars(part).items() if torch.is_tensor(value)]


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_flex_dispatchers_keep_nothing(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.parallel import mcore  # noqa: F401  patches megatron-core

    from megatron.core.transformer.moe import token_dispatcher as dispatchers

    monkeypatch.setattr(dispatchers, "fused_dispatch", dispatch)
    monkeypatch.setattr(dispatchers, "fused_combine", combine)
    monkeypatch.setattr(dispatchers, "hybrid_ep_dispatch", hybrid_dispatch)
    monkeypatch.setattr(dispatchers, "hybrid_ep_combine", lambda x, *_, **__: x)
    monkeypatch.setattr(dispatchers, "set_deepep_num_sms", lambda _: None)
    config = Config(
        moe_flex_dispatcher_backend=backend,
        moe_router_topk=2,
        num_moe_experts=EXPERTS,
        moe_router_dtype="fp32",
        moe_permute_fusion=False,
        moe_pad_expert_input_to_capacity=False,
        moe_router_padding_for_quantization=False,
    )
    monkeypatch.setattr(dispatchers.utils, "get_pg_size", lambda group: group.size())
    groups = SimpleNamespace(ep=Group(2), expt_tp=Group(1), tp_ep=Group(2))
    dispatcher = dispatchers.MoEFlexTokenDispatcher(EXPERTS, list(range(EXPERTS)), config, groups)
    manager = dispatcher._comm_manager
    constructed = tensors(manager)
    dispatcher.ep_size, manager.num_experts = 1, EXPERTS  # all experts are this rank's

    inputs = torch.randn(TOKENS, 1, HIDDEN, requires_grad=True)
    probs = torch.rand(TOKENS, EXPERTS, requires_grad=True)
    routes = probs >= probs.topk(2).values[:, -1:]
    x, p = dispatcher.dispatch_preprocess(inputs, routes, probs * routes)
    x, p = dispatcher.token_dispatch(x, p)
    x, _, p = dispatcher.dispatch_postprocess(x, p)
    assert tensors(manager) != constructed
    x = dispatcher.token_combine(dispatcher.combine_preprocess(x))
    output = dispatcher.combine_postprocess(x)
    assert tensors(manager) == constructed and tensors(dispatcher) == []
    output.sum().backward()
    assert inputs.grad is not None and inputs.grad.abs().sum() > 0
