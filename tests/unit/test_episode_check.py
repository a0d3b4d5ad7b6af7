"""What workflows may return: a good batch, and one with each single fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.rollout.episode import ROUNDING, check_episode

VERSION, VOCAB = 3, 20


def good() -> dict[str, Any]:
    """Two samples of 5 positions, the second one with a token of padding; prompts of two tokens."""
    real = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]).bool()
    trained = real & (torch.arange(5) >= 2)
    return {
        "input_ids": torch.where(real, 7, 0),
        "attention_mask": real,
        "loss_mask": trained,
        "logprobs": torch.where(trained, -0.5, 0.0),
        "versions": torch.where(trained, 3, -1).int(),
        "rewards": torch.tensor([1.0, -2.5]),
    }


def check(batch: Any) -> None:
    check_episode(batch, version=VERSION, vocab_size=VOCAB)


def changed(key: str, place: tuple[int, ...], value: Any) -> dict[str, Any]:
    batch = good()
    batch[key][place] = value
    return batch


def test_good_batches_pass():
    check(good())
    check_episode(good(), version=VERSION)
    check(good() | {"truncated": torch.tensor([True, False]), "routes": torch.zeros(2, 5, 3, 4)})
    check({k: v[:1] for k, v in good().items()})
    check(good() | {"loss_mask": torch.zeros(2, 5).bool()})  # rows without a trained token
    check(changed("versions", (0, 3), 1))  # an update came between
    check(changed("logprobs", (0, 3), ROUNDING / 2))
    check(good() | {"versions": good()["versions"].long(), "rewards": torch.tensor([1, 0])})
    check(changed("input_ids", (1, 4), -1))  # padding is nobody's token


FAULTS = {
    "attention of nothing": (
        changed("attention_mask", (1,), torch.zeros(5).bool())
        | {"loss_mask": changed("loss_mask", (1,), False)["loss_mask"]},
        "attention_mask of sample 1, position 0 is False: a sample begins with a real token",
    ),
    "a hole": (
        changed("attention_mask", (0, 2), False) | {"loss_mask": torch.zeros(2, 5).bool()},
        "attention_mask of sample 0, position 3 is True: a real token stands after padding",
    ),
    "left padding": (
        changed("attention_mask", (0, 0), False),
        "attention_mask of sample 0, position 0 is False: a sample begins",
    ),
    "trained padding": (
        changed("loss_mask", (1, 4), True),
        "loss_mask of sample 1, position 4 is True: only padding stands there",
    ),
    "trained from nothing": (
        changed("loss_mask", (1, 0), True),
        "loss_mask of sample 1, position 0 is True: nothing comes before it",
    ),
    "not written": (
        changed("versions", (1, 2), -1),
        "versions of sample 1, position 2 is -1: loss_mask marks a token that no weights wrote",
    ),
    "of the future": (
        changed("versions", (0, 4), 4),
        "versions of sample 0, position 4 is 4: the newest weights are version 3",
    ),
    "NaN": (
        changed("logprobs", (0, 0), float("nan")),
        "logprobs of sample 0, position 0 is nan: must be a finite number",
    ),
    "no probability": (
        changed("logprobs", (1, 3), -float("inf")),
        "logprobs of sample 1, position 3 is -inf: must be a finite number",
    ),
    "a probability": (
        changed("logprobs", (0, 2), 0.5),
        "logprobs of sample 0, position 2 is 0.5: must not be above 0",
    ),
    "negative": (
        changed("input_ids", (0, 1), -1),
        "input_ids of sample 0, position 1 is -1: no token has such an id",
    ),
    "beyond": (
        changed("input_ids", (1, 3), 20),
        "input_ids of sample 1, position 3 is 20: the model's vocabulary has 20 tokens",
    ),
    "reward": (
        changed("rewards", (1,), float("nan")),
        "rewards of sample 1 is nan: must be a finite number",
    ),
    **{
        f"without {key}": (
            {k: v for k, v in good().items() if k != key},
            f"a batch without '{key}' \\(it has ",
        )
        for key in good()
    },
    **{
        f"{key} of another width": (
            good() | {key: good()[key][:, :4]},
            rf"{key} of torch.* and shape \(2, 4\): use \[n=2,S=5\]",
        )
        for key in ("attention_mask", "loss_mask", "logprobs", "versions")
    },
    "one dimension": (
        good() | {"input_ids": torch.ones(5).long()},
        r"input_ids of shape \(5,\): use \[n,S\]",
    ),
    "no sample": ({k: v[:0] for k, v in good().items()}, r"input_ids of shape \(0, 5\): use"),
    "rewards of another number": (
        good() | {"rewards": torch.ones(3)},
        r"rewards of torch.float32 and shape \(3,\): use \[n=2\] numbers",
    ),
    "one reward": (
        good() | {"rewards": torch.tensor(1.0)},
        r"rewards of torch.float32 and shape \(\): use",
    ),
    "rewards of tokens": (
        good() | {"rewards": torch.ones(2, 5)},
        r"rewards of torch.float32 and shape \(2, 5\): use \[n=2\]",
    ),
    "a key of one's own": (
        good() | {"turns": torch.ones(1)},
        r"turns of torch.float32 and shape \(1,\): use \[n=2,...\]",
    ),
    "several numbers of a sample": (
        good() | {"scores": torch.ones(2, 3)},
        r"'scores' of shape \(2, 3\): .* begins with \[B, S\] = \[2, 5\] .*several fields \[2\]",
    ),
    "ids as floats": (
        good() | {"input_ids": good()["input_ids"].float()},
        "input_ids of torch.float32 and .* integers",
    ),
    "a mask of integers": (
        good() | {"loss_mask": good()["loss_mask"].long()},
        "loss_mask of torch.int64 and .* booleans",
    ),
    "logprobs as integers": (
        good() | {"logprobs": good()["versions"].long()},
        "logprobs of torch.int64 and .* floating-point numbers",
    ),
    "versions as floats": (
        good() | {"versions": good()["versions"].float()},
        "versions of torch.float32 and .* integers",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_is_named(fault):
    batch, words = FAULTS[fault]
    with pytest.raises(ValueError, match=f"^{words}"):
        check(batch)


@pytest.mark.parametrize(
    "returned, words",
    [
        ([1], "list: use a padded batch"),
        ({"input_ids": [[1]]}, "a dict whose 'input_ids' is a list: use a padded batch"),
    ],
)
def test_what_is_no_batch(returned, words):
    with pytest.raises(TypeError, match=words):
        check(returned)
