"""Defines small records that cross the borders between subsystems."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

from torch import Tensor

from megarl.config.errors import ConfigError
from megarl.config.loader import run_dir
from megarl.config.recipe_engines import listed_addresses
from megarl.config.recipes import BaseConfig
from megarl.config.rollout import (
    GenerationHyperparameters,
    SyncOptions,
    WeightSyncConfig,
    built_in_transport,
    requirements_of,
    transport_name,
)
from megarl.config.script import note_read
from megarl.utils.importing import option_problems


class Where(TypedDict):
    """Names a place in a run: steps and epochs count from 1; `epoch_ended` is True where the epoch
    ended with `step`."""

    step: int
    epoch: int
    epoch_ended: bool


@dataclass(frozen=True, kw_only=True)
class FinetuneSpec:
    """Says how long a training run is, so that schedules know their end. drop_last: no step is made
    of the last rows of an epoch where they fill no whole batch."""

    total_train_epochs: int
    dataset_size: int
    train_batch_size: int
    max_steps: int | None = None
    drop_last: bool = True

    @classmethod
    def for_run(cls, cfg: BaseConfig, *, dataset_size: int) -> FinetuneSpec:
        """Makes the spec of a recipe's or a script's configuration, for so many rows of data."""
        note_read(cfg, "total_train_epochs", "total_train_steps")
        return cls(
            total_train_epochs=cfg.total_train_epochs,
            dataset_size=dataset_size,
            train_batch_size=cfg.train_dataset.batch_size,
            max_steps=cfg.total_train_steps,
            drop_last=cfg.train_dataset.drop_last,
        )

    @property
    def steps_per_epoch(self) -> int:
        """Returns the training steps of one epoch, at least 1."""
        whole, rest = divmod(self.dataset_size, self.train_batch_size)
        return max(1, whole if self.drop_last else whole + bool(rest))

    @property
    def total_train_steps(self) -> int:
        """Returns the steps of the whole run, at most `max_steps`."""
        steps = self.total_train_epochs * self.steps_per_epoch
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def where(self, step: int) -> Where:
        """Returns where a run is after `step` steps, as Saver, Frequency and Recovery take it."""
        per_epoch = self.steps_per_epoch
        return {"step": step, "epoch": -(-step // per_epoch), "epoch_ended": step % per_epoch == 0}


@dataclass(frozen=True, kw_only=True)
class WeightUpdateMeta(SyncOptions):
    """Describes one weight update. Raises ValueError for fields that do not go together.

    version: the number that the servers will report afterwards, higher than the update before; None
        is the next one, so that one meta serves a whole run.
    type: a name in config.transports ("distributed", of which "nccl" is an alias, "disk",
        "colocated", "adapter"), or pkg.module:name of a Transport of your own.
    options: keyword arguments of a Transport of your own.
    path: a directory that trainers and servers share (disk, adapter).
    addresses: host:port of every server.
    alloc_mode: kept for scripts that give it, without effect: the engine knows its layout.
    comm_backend: "nccl" | "gloo"; None picks by device.
    verify: "off" | "sample": compares fingerprints of a few tensors, others for every version, with
        the servers' afterwards | "full": of all. True and False stand for "full" and "off".
    first: of a run's updates: with "sample" it compares all tensors, which shows whether the two
        sides fit at all.
    flush_cache: empties the servers' KV caches with the update; False leaves the KV of earlier
        weights there (rollout.kv_after_sync).
    timeout: seconds that the whole update may take.
    server_timeout: seconds after which a server without a sign of life counts as lost.
    """

    type: str
    version: int | None = None
    addresses: tuple[str, ...] = ()
    path: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    alloc_mode: object = None
    comm_backend: str | None = None
    bucket_bytes: int = 512 << 20
    verify: bool | Literal["off", "sample", "full"] = "off"
    first: bool = False
    flush_cache: bool = True
    timeout: float = 600.0
    server_timeout: float = 30.0

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "type", transport_name(self.type))
            needs = requirements_of(self.type)
        except ValueError as e:
            raise ValueError(f"WeightUpdateMeta.type={e}") from e
        if needs.directory and not self.path:
            raise ValueError(f"WeightUpdateMeta.type={self.type!r} needs a path on shared storage")
        if problems := [*option_problems(WeightUpdateMeta, vars(self), key="WeightUpdateMeta")]:
            raise ConfigError(problems)
        for name, word in (("verify", "full"), ("sharded", "on")):
            if isinstance(value := getattr(self, name), bool):
                object.__setattr__(self, name, word if value else "off")
        if self.delta and self.quantization != "none":
            raise ValueError("WeightUpdateMeta.delta: changes of quantized weights are not sent")
        if self.delta and self.sharded == "off":
            raise ValueError("WeightUpdateMeta.delta: changes go by slices; leave `sharded` out")
        if not needs.less and (self.delta or self.quantization != "none"):
            raise ValueError(
                f"type={self.type!r} sends whole weights; for delta, quantization use 'distributed'"
            )

    @classmethod
    def from_disk(
        cls, path: str | Path | BaseConfig, *, addresses: Sequence[str] = (), **fields: Any
    ) -> WeightUpdateMeta:
        """Makes an update through a directory on shared storage.

        path: the directory, or the run's configuration for <run>/weights; addresses: host:port of
        the servers, the environment's MEGARL_LLM_SERVER_ADDRS where empty; fields: any other
        field. Raises TypeError for another `path`, such as a section of the configuration, which
        does not know the run's directory.
        """
        if not isinstance(path, str | Path | BaseConfig):
            raise TypeError(
                f"WeightUpdateMeta.from_disk({type(path).__name__}): give the whole configuration, "
                "from_disk(config), for <run>/weights, or a directory, from_disk('/shared/weights')"
            )
        where = run_dir(path) / "weights" if isinstance(path, BaseConfig) else path
        servers = tuple(addresses) or tuple(listed_addresses())
        return cls(type="disk", path=str(where), addresses=servers, **fields)

    @classmethod
    def from_megatron(
        cls,
        alloc_mode: object = None,
        engine: object = None,
        *,
        addresses: Sequence[str] = (),
        **fields: Any,
    ) -> WeightUpdateMeta:
        """Makes an update that streams buckets over NCCL, on CPU over gloo.

        `alloc_mode` and `engine` stand where other systems have them, and have no effect: the
        engine that uploads knows its layout and its parameters. `addresses` and `fields` are those
        of `from_disk`.
        """
        servers = tuple(addresses) or tuple(listed_addresses())
        return cls(type="distributed", alloc_mode=alloc_mode, addresses=servers, **fields)

    from_megatron_nccl = from_megatron

    @classmethod
    def from_config(
        cls, config: WeightSyncConfig, *, path: str | Path, addresses: Sequence[str], **fields: Any
    ) -> WeightUpdateMeta:
        """Makes the update that the `weight_sync` section describes; `path` is used by the types
        that write files."""
        ours = built_in_transport(config.type) is not None
        options = config.options if ours else {"options": config.options}
        return cls(
            type=config.type,
            path=str(path),
            addresses=tuple(addresses) or tuple(listed_addresses()),
            bucket_bytes=config.bucket_mb << 20,
            timeout=config.timeout,
            server_timeout=config.server_timeout,
            **({"verify": config.verify} | options | fields),
        )

    @property
    def compares_all(self) -> bool:
        """Returns whether all tensors are compared after this update, not only some or none."""
        return self.verify == "full" or (self.verify == "sample" and self.first)

    @property
    def number(self) -> int:
        """Returns the version. Raises ValueError where it is still None (see `settled`)."""
        if self.version is None:
            raise ValueError("WeightUpdateMeta.version=None: give the version, as `settled` does")
        return self.version

    @property
    def adapter(self) -> str | None:
        """Returns the name of the adapter that requests must ask for afterwards; None for a
        transport of whole weights."""
        named = requirements_of(self.type).adapters
        return f"{ADAPTER_PREFIX}{self.number}" if named else None

    def settled(self, current: int, last: int | None) -> WeightUpdateMeta:
        """Returns this update with its version. The uploading engine and the waiting client both
        ask here, so that they count alike.

        current: the version of the caller; last: that of its update before, None where there was
        none. Raises ValueError for a version that is not above `last`.
        """
        if self.version is None:
            return replace(self, version=max(current, current if last is None else last) + 1)
        if last is not None and self.version <= last:
            raise ValueError(
                f"WeightUpdateMeta.version={self.version}: the update before was version {last}, "
                "and samples of a version that does not rise look stale for ever; give a higher "
                "one, or None for the next"
            )
        return self


# of the names under which servers hold adapters that came from updates
ADAPTER_PREFIX = "megarl-v"
# what a server reports as its weight version before its first update
INITIAL_VERSION = "default"


class ServersLost(RuntimeError):
    """Names the generation servers that ended or fell silent in a weight update; `servers` is
    {address: reason}.

    The others may hold a mixture of versions until an update of them alone succeeds.
    """

    def __init__(self, message: str, servers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.servers = dict(servers)

    def __reduce__(self) -> Any:  # what an exception has of its own names the message alone
        return type(self), (str(self), self.servers)


@dataclass(frozen=True, kw_only=True)
class SaveLoadMeta:
    """Says where and in which format a model is saved or loaded.

    weight_format: "hf" is a Hugging Face model directory of the weights, adapters merged in;
    `tokenizer` and `base_model_path` say which tokenizer and config files stand beside them. "peft"
    is a PEFT directory of the adapters alone. "dist" is a training checkpoint in megatron-core's
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
    """Asks for one sample, from token ids or, with a client that has a tokenizer, from text, whose
    ids it then gets as its own; where it has ids, `text` is not read. `input_ids` may be the
    mapping that a tokenizer returns, of one sequence.

    `rid` is unique per attempt; `seed` overrides gconfig.seed. `routes_from`: the first position
    whose routes the answer is to have, where the client asks servers for them.
    """

    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    input_ids: list[int] = field(default_factory=list)
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    seed: int | None = None
    text: str = ""
    routes_from: int = 0

    def __post_init__(self) -> None:
        given: Any = self.input_ids
        if isinstance(given, Mapping):  # transformers 5's apply_chat_template returns one
            self.input_ids = list(given["input_ids"])


@dataclass(kw_only=True)
class ModelResponse:
    """Holds tokens with the logprob and the weight version that produced each of them.

    `latency` is in seconds; `completion` is the output as text where the client has a tokenizer,
    else empty, and `raw_completion` the same with its special tokens. `routed_experts` [n, L, k]
    are the experts that the server's routers chose for the tokens of input and output from position
    `routes_from` on, -1 where unknown. Those of the last token come with a later answer, that the
    server reads it for. None where nobody asked for them.
    """

    input_tokens: list[int]
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_versions: list[int] = field(default_factory=list)
    stop_reason: str = "length"
    latency: float = math.nan
    completion: str = ""
    raw_completion: str = ""
    routed_experts: Tensor | None = field(default=None, compare=False, repr=False)
    routes_from: int = 0

    @property
    def input_len(self) -> int:
        """Returns the number of prompt tokens."""
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        """Returns the number of generated tokens."""
        return len(self.output_tokens)
