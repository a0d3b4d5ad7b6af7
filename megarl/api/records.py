"""Small records that cross the borders between subsystems."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from megarl.config.rollout import GenerationHyperparameters


@dataclass(frozen=True, kw_only=True)
class FinetuneSpec:
    """How long a training run is, so that schedules know their end."""

    total_train_epochs: int
    dataset_size: int
    train_batch_size: int
    updates_per_step: int = 1
    max_steps: int | None = None

    @property
    def steps_per_epoch(self) -> int:
        return max(1, self.dataset_size // self.train_batch_size)

    @property
    def total_train_steps(self) -> int:
        steps = self.total_train_epochs * self.steps_per_epoch
        return steps if self.max_steps is None else min(steps, self.max_steps)


@dataclass(frozen=True, kw_only=True)
class WeightUpdateMeta:
    """One weight update: `version` is what the servers will report afterwards.

    type: "distributed" ("nccl" is an alias) | "disk" | "colocated"; path: shared directory (disk);
    addresses: host:port of every server; alloc_mode: optional text for the log;
    comm_backend: "nccl" | "gloo", None picks by device.
    """

    type: str
    version: int
    addresses: tuple[str, ...] = ()
    path: str | None = None
    alloc_mode: str | None = None
    comm_backend: str | None = None
    bucket_bytes: int = 512 << 20
    flattened: bool = True
    verify: bool = False
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.type == "nccl":
            object.__setattr__(self, "type", "distributed")
        if self.type not in ("distributed", "disk", "colocated"):
            raise ValueError(
                f"WeightUpdateMeta.type={self.type!r}: use 'distributed', 'disk' or 'colocated'"
            )
        if self.type == "disk" and not self.path:
            raise ValueError("WeightUpdateMeta.type='disk' needs a path on shared storage")


@dataclass(frozen=True, kw_only=True)
class SaveLoadMeta:
    """weight_format: "hf": a Hugging Face model directory of the weights, adapters merged in;
    `tokenizer` and `base_model_path` say what stands beside them. "peft": a PEFT directory of the
    adapters alone. "dist": a training checkpoint in megatron-core's
    distributed format; with `with_optim` it also holds optimizer state, schedule position, random
    states and weight version, and loading it continues the training bit for bit.
    """

    path: str
    weight_format: str = "hf"
    with_optim: bool = False
    tokenizer: object | None = None
    base_model_path: str | None = None


@dataclass(kw_only=True)
class ModelRequest:
    """One sample to generate. `rid` is unique per attempt; `seed` overrides gconfig.seed."""

    rid: str
    input_ids: list[int]
    gconfig: GenerationHyperparameters
    seed: int | None = None


@dataclass(kw_only=True)
class ModelResponse:
    """Tokens with the logprob and the weight version that produced each of them."""

    input_tokens: list[int]
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    stop_reason: str = "length"
    latency: float = math.nan

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)
