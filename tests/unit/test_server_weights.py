"""Streamed weights are received where they stay, if nothing speaks against it."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from megarl.server.protocol import ControlError
from megarl.server.updates import WeightUpdates
from megarl.server.weights import Spec, WeightStore
from tests.tiny import tiny_hf


def untied() -> PreTrainedModel:
    return tiny_hf("qwen2", layers=1).eval()


def specs_of(store: WeightStore) -> dict[str, Spec]:
    """In another order than the model's."""
    return {n: (tuple(t.shape), t.dtype) for n, t in reversed(store.tensors.items())}


def cut(flat: torch.Tensor, specs: dict[str, Spec]) -> dict[str, torch.Tensor]:
    out, end = {}, 0
    for name, (shape, dtype) in specs.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        out[name] = flat[start:end].view(dtype).view(shape)
    return out


def random_bytes_of(store: WeightStore, specs: dict[str, Spec]) -> torch.Tensor:
    values = [torch.randn(shape).to(dtype) for shape, dtype in specs.values()]
    return torch.cat([v.flatten().view(torch.uint8) for v in values])


def test_the_first_bucket_becomes_the_parameters_and_the_next_goes_into_them() -> None:
    model = untied()
    store, ids = WeightStore(model), torch.tensor([[1, 2, 3]])
    specs = specs_of(store)
    assert store.span(specs) is None and store.can_adopt(specs)
    with torch.inference_mode():  # as in the scheduler's thread
        flat = random_bytes_of(store, specs)
        store.adopt(cut(flat, specs))
        before = model(ids).logits
        span = store.span(specs)
        assert span is not None and span.data_ptr() == flat.data_ptr()
        assert span.numel() == flat.numel()
        span.copy_(random_bytes_of(store, specs))
        store.load(cut(span, specs).items())
        after = model(ids).logits
    assert not torch.equal(before, after)
    for name, tensor in cut(flat, specs).items():
        assert torch.equal(dict(model.named_parameters())[name], tensor)
        assert torch.equal(store.tensors[name], tensor)
    part = dict(list(specs.items())[2:5])
    inner = store.span(part)
    assert inner is not None and inner.numel() == sum(store.tensors[n].nbytes for n in part)
    assert store.span(dict(reversed(part.items()))) is None


def test_what_must_be_copied() -> None:
    store = WeightStore(untied())
    name = "model.norm.weight"
    (shape, dtype) = specs_of(store)[name]
    assert (
        store.can_adopt({name: (shape, dtype)}) and store.span({name: (shape, dtype)}) is not None
    )
    half = {name: (shape, torch.bfloat16)}
    assert not store.can_adopt(half) and store.span(half) is None
    odd = untied()
    odd.model.norm.weight.data = torch.ones(3)  # no multiple of the allocator's alignment
    assert not WeightStore(odd).can_adopt({name: ((3,), torch.float32)})


def test_a_tied_head_is_its_embedding() -> None:
    model = tiny_hf("qwen3", layers=1, tie=True)
    store = WeightStore(model)
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    spec: Spec = (tuple(store.tensors[embedding].shape), torch.float32)
    assert head not in store.tensors and store.get(head) is store.get(embedding)
    assert store.span({head: spec}) is None and not store.can_adopt({head: spec})
    values = torch.randn(spec[0])
    store.adopt({embedding: values})
    assert store.get(head) is values
    weight = model.get_output_embeddings().weight
    assert isinstance(weight, torch.Tensor) and weight.data_ptr() == values.data_ptr()


def test_experts_are_fused_so_no_memory_becomes_theirs() -> None:
    """One expert's gate and up lie together, and can be received in place; two experts' cannot."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, moe_intermediate_size=32,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, num_experts=2,
    )  # fmt: skip
    store = WeightStore(transformers.Qwen3MoeForCausalLM(config))
    specs = {n: s for n, s in specs_of(store).items() if "experts.0" in n}
    assert len(specs) == 3 and not store.can_adopt(specs)
    assert all(store.place(name, spec) is store.tensors[name] for name, spec in specs.items())
    assert store.span(specs) is None
    halves = {n: specs[n] for n in sorted(specs) if "down" not in n}
    assert len(halves) == 2 and store.span(halves) is not None


def test_no_bucket_is_waited_for_in_a_group_that_is_being_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server may come to its next request, whose sender has given up, before it leaves."""
    updates = WeightUpdates(WeightStore(untied()), torch.device("cpu"), timeout=60)
    monkeypatch.setattr("megarl.server.updates.init_update_group", lambda **_: object())
    where = {"master_address": "h", "master_port": 1, "world_size": 2, "rank_offset": 1}
    updates.init_group(where | {"group_name": "g", "backend": "gloo"})
    name = "model.norm.weight"
    body = {
        "group_name": "g",
        "load_format": "flattened_bucket",
        "names": [name],
        "dtypes": ["float32"],
        "shapes": [[*updates.store.tensors[name].shape]],
    }
    updates.begin()
    updates.interrupt("g")
    with pytest.raises(ControlError, match=f"{name} .*: the group is being left"):
        updates.from_distributed(body, lambda: None)
    assert not updates.store.torn
