"""What brings weights into the embedded server's model, and where they land."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import PreTrainedModel

from megarl.server.protocol import ControlError
from megarl.server.updates import WeightUpdates
from megarl.server.weights import WeightStore, cut
from megarl.weight_sync.receiver import LOADER
from megarl.weight_sync.receiver.megarl_receiver.mailbox import Mailbox
from megarl.weight_sync.receiver.megarl_receiver.recording import digest_of, record
from megarl.wire import handles
from tests.tiny import tiny_hf


def untied() -> PreTrainedModel:
    return tiny_hf("qwen2", layers=1).eval()


def moe() -> PreTrainedModel:
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, moe_intermediate_size=32,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, num_experts=2,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


def hybrid() -> PreTrainedModel:
    return tiny_hf("qwen3_next")


@pytest.mark.parametrize(
    "make", (untied, moe, lambda: tiny_hf("qwen3", layers=1, tie=True), hybrid)
)
def test_a_recorded_load_says_where_every_element_lands(make: Any) -> None:
    """Experts are held fused, and each comes alone; a tied head follows its embedding."""
    model = make()
    store = WeightStore(model)
    values = {name: torch.randn(t.shape) for name, t in store.tensors.items()}
    values |= {head: values[embedding] for head, embedding in store.tied.items()}
    spec = [(name, tuple(t.shape), "float32") for name, t in values.items()]
    with torch.inference_mode():  # as in the scheduler's thread
        table = record(model, spec)
        for e in table.entries:
            box = tuple(slice(a, b) for a, b in zip(e.start, e.stop, strict=True))
            param = model.get_parameter(e.param)
            view = param.as_strided(tuple(e.shape), tuple(e.strides), e.offset)
            view.copy_(values[e.tensor][box].reshape(view.shape))
    assert not table.computed and not table.twice and not table.unfilled
    assert not {e.tensor for e in table.entries} & {*store.tied}
    for name, t in store.tensors.items():
        assert torch.equal(t, values[name]), name


def test_a_load_names_what_does_not_fit() -> None:
    store = WeightStore(untied())
    name = "model.norm.weight"
    with pytest.raises(ControlError, match=rf"{name}: shape \[3\], the model has"):
        store.load_checked([(name, torch.ones(3))])
    with pytest.raises(ControlError, match="nope: the model has no such parameter"):
        store.load_checked([("nope", torch.ones(3))])


def test_a_bucket_that_is_not_aligned_is_refused() -> None:
    specs = {"a": ((1,), torch.bfloat16), "b": ((1,), torch.float32)}
    with pytest.raises(ControlError, match=r"b: offset 2 .* no multiple of the itemsize"):
        cut(torch.zeros(6, dtype=torch.uint8), specs)


def test_what_is_no_command_of_slices_is_refused() -> None:
    updates = WeightUpdates(WeightStore(untied()), torch.device("cpu"), timeout=60)
    updates.begin(lambda: None)
    body = {"load_format": LOADER, "serialized_named_tensors": [handles.pack_empty("[]")]}
    with pytest.raises(ControlError):
        updates.from_tensor(body, lambda: None)
    assert not updates.store.torn


def test_slices_that_fail_before_they_come_leave_the_weights_whole() -> None:
    updates = WeightUpdates(WeightStore(untied()), torch.device("cpu"), timeout=60)
    box, obey = commanding(updates)
    box.put("plan/0/0", packed({"digest": "of other parameters", "rounds": []}))
    updates.begin(lambda: None)
    with pytest.raises(ControlError, match="parameters have changed since their table"):
        obey("receive")
    assert not updates.store.torn and not updates.unfit()


def test_slices_of_which_none_has_changed_mend_torn_weights() -> None:
    """Another update may have failed before it wrote; then the trainers have nothing to send."""
    updates = WeightUpdates(WeightStore(untied()), torch.device("cpu"), timeout=60)
    model, tensors = updates.store.model, updates.store.tensors
    box, obey = commanding(updates)
    box.put("spec", packed([(n, tuple(t.shape), "float32") for n, t in tensors.items()]))
    obey("record")
    box.put("plan/0/0", packed({"digest": digest_of(model), "rounds": []}))
    with pytest.raises(OSError), updates.store.writing(tensors):
        raise OSError
    assert updates.unfit()
    obey("receive")
    assert not updates.unfit()


def test_weights_of_which_only_some_rounds_have_come_are_not_generated_with() -> None:
    updates = WeightUpdates(WeightStore(untied()), torch.device("cpu"), timeout=60)
    model, tensors = updates.store.model, updates.store.tensors
    box, obey = commanding(updates, "rounds")
    box.put("spec", packed([(n, tuple(t.shape), "float32") for n, t in tensors.items()]))
    obey("record")
    box.put("plan/0/0", packed({"digest": digest_of(model), "rounds": [[[0, [0]]], []]}))
    memory = handles.allocate(max(t.nbytes for t in tensors.values()), torch.device("cpu"))
    memory.view(torch.float32).fill_(7.0)
    obey("take", memory, round=0, last=False)
    assert updates.unfit()
    obey("take", memory, round=1, last=True)
    assert not updates.unfit()
    assert [n for n, t in tensors.items() if bool((t == 7).all())] == [next(iter(tensors))]


def packed(value: Any) -> bytes:
    return zlib.compress(json.dumps(value).encode())


def commanding(updates: WeightUpdates, session: str = "s") -> tuple[Mailbox, Callable[..., None]]:
    """A trainer's mailbox, and what has the server obey a command."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = dict(host="127.0.0.1", port=store.port, session=session, address="s", server=0)

    def obey(do: str, memory: torch.Tensor | None = None, **fields: Any) -> None:
        command = where | dict(do=do, id=do, timeout=60.0, backend="gloo") | fields
        name = json.dumps(command)
        text = handles.pack_empty(name) if memory is None else handles.pack(name, memory)
        body = {"load_format": LOADER, "serialized_named_tensors": [text]}
        updates.from_tensor(body, lambda: None)

    return Mailbox(store, session, os.environ.get("MEGARL_JOB_TOKEN", "")), obey


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
    updates.begin(lambda: None)
    updates.interrupt("g")
    with pytest.raises(ControlError, match=f"{name} .*: the group is being left"):
        updates.from_distributed(body, lambda: None)
    assert not updates.store.torn
