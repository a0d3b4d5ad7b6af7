"""Configures generation: sampling parameters, the servers, the client and its staleness bound, and
how new weights reach the servers.

TRANSPORTS is the one place that knows megarl's own transports by name. A user's own is a subclass
of `megarl.weight_sync.transports.Transport`, named by `weight_sync.type: pkg.module:name`, that
declares its `requirements` itself. No torch is imported here.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from megarl.config.base import (
    FRACTION_ABOVE_ZERO,
    NOT_NEGATIVE,
    POSITIVE,
    TIMEOUT,
    Bounds,
    Choices,
    Options,
    OptionsOf,
    SeamConfig,
    free,
    section,
)
from megarl.utils.importing import load_object


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Declares what a transport needs. Checks of configurations, the launcher and records read it.

    directory: WeightUpdateMeta.path, a directory that trainers and servers share.
    process_group: trainers and servers meet in one process group, so each process needs a GPU of
        its own and both sides the same NCCL.
    shares_devices: servers are on the trainers' machines and GPUs.
    adapters: LoRA adapters are sent without their base; requests name the adapter.
    less: it can send changes alone (`delta`) and FP8 (`quantization`).
    """

    directory: bool = False
    process_group: bool = False
    shares_devices: bool = False
    adapters: bool = False
    less: bool = False


class BuiltIn(NamedTuple):
    """Describes one of megarl's own transports. target: pkg.module:name of its class."""

    target: str
    requirements: Requirements


_PACKAGE = "megarl.weight_sync"
TRANSPORTS: Mapping[str, BuiltIn] = {
    "distributed": BuiltIn(
        f"{_PACKAGE}.broadcast:DistributedTransport", Requirements(process_group=True, less=True)
    ),
    "disk": BuiltIn(f"{_PACKAGE}.disk:DiskTransport", Requirements(directory=True)),
    "colocated": BuiltIn(
        f"{_PACKAGE}.colocated:ColocatedTransport", Requirements(shares_devices=True)
    ),
    "adapter": BuiltIn(
        f"{_PACKAGE}.disk:AdapterTransport", Requirements(directory=True, adapters=True)
    ),
}
ALIASES: Mapping[str, str] = {"nccl": "distributed"}  # the design documents' word


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """Gives the options of megarl's own transports (`weight_sync.options`).

    sharded: sends each server rank the slices that it keeps (distributed): "auto", where all
        servers can take them, whole tensors otherwise, and the log says why; True or "on", and
        anything else is an error; False or "off", whole tensors.
    delta: sends only what changed since the last update that the servers hold (distributed). It
        goes by slices, and needs host memory for a copy of the weights.
    quantization: "fp8_block" sends linear maps as block-wise FP8, e4m3 in blocks of 128 x 128 with
        scales (distributed), for servers of an FP8 checkpoint.
    """

    GONE: ClassVar = {
        "senders": "leave it out: one rank gathers and sends, a server takes one bucket at a time",
        "flattened": "leave it out: a bucket goes as one broadcast",
    }
    sharded: bool | Literal["auto", "on", "off"] = "auto"
    delta: bool = False
    quantization: Literal["none", "fp8_block"] = "none"


@dataclass(kw_only=True)
class WeightSyncConfig:
    """Configures the transport of weights, its checks, and its timeouts in seconds."""

    type: Annotated[str, Choices(*TRANSPORTS, *ALIASES, or_path=True)] = "distributed"
    """distributed: buckets over NCCL or gloo; disk: a shared HF directory; colocated: servers on
    the trainers' GPUs read the trainers' memory; adapter: with actor.lora, adapters alone through a
    shared PEFT directory"""
    options: Options = free()
    """options of the transport, such as one of your own; of distributed: sharded (each
    server rank gets only the slices that it stores: auto, true, false), delta (send only numbers
    that changed), quantization (none, fp8_block)"""
    bucket_mb: Annotated[int, POSITIVE] = 512
    """size of one streamed bucket in MiB; two exist at a time"""
    pause_mode: Annotated[str, Choices("abort", "drain", "retract", "in_place")] = "abort"
    """running requests at a sync: abort: the client sends them again with the tokens so far; drain:
    they end first; retract: they wait in the server, which recomputes their KV; in_place: they
    continue on the old weights' KV, and no cache is flushed"""
    verify: Annotated[str, Choices("off", "sample", "full")] = "sample"
    """compare the servers' fingerprints with the trainer's after a sync: sample: all tensors after
    the first sync, a few after later ones; full: all after each; off: never"""
    timeout: Annotated[float, TIMEOUT] = 600.0
    """seconds one sync may take before it is an error"""
    server_timeout: Annotated[float, TIMEOUT] = 30.0
    """seconds without an answer after which a server that delays a sync is dropped, until it
    answers again"""


def transport_name(type_: str) -> str:
    """Returns the name without aliases. Raises ValueError for a name that is neither known nor an
    import path."""
    name = ALIASES.get(type_, type_)
    if name not in TRANSPORTS and ":" not in name:
        known = ", ".join((*TRANSPORTS, *ALIASES))
        raise ValueError(f"{type_!r}: not one of {known}, and no pkg.module:name")
    return name


def built_in_transport(type_: str) -> BuiltIn | None:
    """Returns megarl's own transport of this name or alias, None for any other text."""
    return TRANSPORTS.get(ALIASES.get(type_, type_))


def transport_class(type_: str) -> Any:
    """Imports the transport's class. Raises ValueError where that fails, or it is no Transport."""
    name = transport_name(type_)
    built_in = built_in_transport(name)
    transport = load_object(built_in.target if built_in else name, what="transport")
    declared = getattr(transport, "requirements", None)
    if not inspect.isclass(transport) or not isinstance(declared, Requirements):
        why = f"a {type(transport).__name__} without `requirements`"
        fix = "expected a subclass of megarl.weight_sync.transports.Transport"
        raise ValueError(f"transport {name!r}: {why}; {fix}")
    return transport


def requirements_of(type_: str) -> Requirements:
    """Returns what a transport needs; a user's own is imported to read it. Raises ValueError where
    there is no such transport."""
    built_in = built_in_transport(type_)
    if built_in is not None:
        return built_in.requirements
    requirements: Requirements = transport_class(type_).requirements
    return requirements


@dataclass(kw_only=True)
class GenerationHyperparameters:
    """Sets how samples are drawn: their number, length in tokens, temperature and stops."""

    n_samples: Annotated[int, Bounds(gt=0, le=65536)] = 1
    """samples per prompt (the group size G)"""
    max_new_tokens: Annotated[int, POSITIVE] = 512
    """token bound of one response"""
    min_new_tokens: Annotated[int, NOT_NEGATIVE] = 0
    """no stop before this many tokens"""
    greedy: bool = False
    """take the argmax (temperature 0)"""
    temperature: Annotated[float, Bounds(ge=0, le=100)] = 1.0
    """divides logits before sampling and before logprobs"""
    top_p: Annotated[float, FRACTION_ABOVE_ZERO] = 1.0
    """nucleus bound"""
    top_k: int = -1
    """sample among the k most likely; -1 is all"""
    stop_token_ids: list[Annotated[int, Bounds(ge=0, lt=1 << 31)]] = field(default_factory=list)
    """extra stop tokens beside the model's EOS"""
    stop: list[str] = field(default_factory=list)
    """stop strings"""
    ignore_eos: bool = False
    """generate through EOS"""
    seed: int | None = None
    """seeded sampling: keys every token by (seed, step, prompt, sample, position)"""
    from_model: bool = False
    """take temperature, top_p, top_k, greedy and stop_token_ids from the trained model's
    generation_config.json; keys that are set win"""

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """Returns a copy with other values, as gconfig.new(n_samples=1)."""
        return replace(self, **changes)

    @classmethod
    def from_pretrained(cls, path: str | Path, **changes: Any) -> GenerationHyperparameters:
        """Returns the parameters that generation_config.json of a model directory recommends
        (temperature, top_p, top_k, greedy, further stop tokens), with `changes`. Raises OSError or
        ValueError if the model has no such file."""
        return cls(**(recommended_sampling(path) | changes))


def recommended_sampling(path: str | Path) -> dict[str, Any]:
    """Returns the keys of GenerationHyperparameters that a model's generation_config.json sets.

    path: a directory or a hub name. Raises OSError or ValueError if the model has no such file."""
    file = Path(path) / "generation_config.json"
    if not Path(path).is_dir():
        from huggingface_hub import hf_hub_download

        file = Path(hf_hub_download(str(path), file.name))
    recommended = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(recommended, dict):
        raise ValueError(f"{file}: must be keys and values")
    # top_k=0 is transformers' word for all
    known = {k: v for k in ("temperature", "top_p", "top_k") if (v := recommended.get(k))}
    ends = recommended.get("eos_token_id")
    if isinstance(ends, list):  # the first is the model's EOS
        known["stop_token_ids"] = ends[1:]
    if "do_sample" in recommended:
        known["greedy"] = not recommended["do_sample"]
    return known


@dataclass(kw_only=True)
class ServerConfig:
    """Configures the generation servers that the launcher starts."""

    type: Annotated[str, Choices("embedded", "sglang")] = "embedded"
    """embedded: megarl's own server (CPU, tests); sglang: the real one"""
    count: Annotated[int, NOT_NEGATIVE] = 1
    """servers the launcher starts (0 with rollout.addresses or addresses_file set)"""
    path: str = ""
    """HF model the servers start from; empty is the trained one"""
    dtype: Annotated[str, Choices("auto", "float32", "bfloat16")] = "auto"
    """auto is the trainer's"""
    context_length: Annotated[int, POSITIVE] = 2048
    """prompt plus response bound in tokens"""
    max_running_requests: Annotated[int, POSITIVE] = 256
    """sequences decoded at once by one server, or replica"""
    release_memory: Annotated[str, Choices("auto", "true", "false")] = "auto"
    """servers and trainers use the same devices in turn, each with its memory released while the
    other works; auto: if the launcher's servers share the trainers' devices and
    rollout.max_head_offpolicyness=0; true: also for servers of rollout.addresses that nobody else
    uses"""
    deterministic: bool = False
    """batch-invariant mode: same request, same bits"""
    tp: Annotated[int, POSITIVE] = 1
    """tensor-parallel degree of one server (sglang)"""
    dp: Annotated[int, POSITIVE] = 1
    """data-parallel replicas of tp inside one server (sglang's --dp-size), on more GPUs of its node
    behind one address; needs weight_sync.type=disk"""
    nnodes: Annotated[int, POSITIVE] | None = None
    """nodes that one server spans (sglang); null is as few as its tp needs"""
    threads: Annotated[int, NOT_NEGATIVE] = 0
    """CPU threads of one server; 0 shares the cores among the servers, and in an asynchronous
    run with the trainers"""
    python: str = ""
    """interpreter that runs the sglang server; empty is this one"""
    options: Options = free()
    """options of the server by their names: server.options.attention_backend=triton is
    --attention-backend triton; true is the bare flag; false and null leave it out"""
    restarts: Annotated[int, NOT_NEGATIVE] = 0
    """a dead server is started again this many times while the run continues with the others
    (server.count=2 or more); 0 ends the run"""

    def __post_init__(self) -> None:
        self.release_memory = str(self.release_memory).lower()  # scripts may give a boolean

    @property
    def gpus(self) -> int:
        """The GPUs of one server (on a CPU: processes)."""
        return self.tp * self.dp

    @property
    def arguments(self) -> list[str]:
        """The command-line arguments of `options`: {"a_b": 1, "c": True, "d": [2, 3],
        "e": {"f": 4}} is --a-b 1 --c --d 2 3 --e '{"f": 4}'."""
        flags: list[str] = []
        for name, value in self.options.items():
            if value is None or value is False:
                continue
            values = [] if value is True else value if isinstance(value, list) else [value]
            flags.append(f"--{name.replace('_', '-')}")
            flags += [json.dumps(v) if isinstance(v, dict) else str(v) for v in values]
        return flags


@dataclass(kw_only=True)
class RolloutConfig:
    """Configures the generation client: servers, workflow, staleness bound, timeouts (s)."""

    addresses: list[str] = field(default_factory=list)
    """host:port of running servers; empty takes MEGARL_LLM_SERVER_ADDRS"""
    addresses_file: str = ""
    """file with a line host:port for each further server, read at every weight update: added
    servers join the run, removed ones leave it"""
    workflow: SeamConfig = section(SeamConfig, type="megarl.rollout.workflows.rlvr:RLVRWorkflow")
    """class that turns a row into samples"""
    backend: SeamConfig = section(SeamConfig, type="megarl.rollout.client:RemoteSGLangEngine")
    """class of the generation client, made with (rollout, weight_sync=..., seed=...)"""
    gateway: Annotated[Options, OptionsOf("megarl.rollout.gateway.messages:GatewayConfig")] = free()
    """HTTP gateway through which agents reach the policy: host (127.0.0.1), port (0 takes a free
    one), advertise (host name in agents' URLs), reuse (a chat keeps the policy's own tokens),
    rewards (auto, always or never: whether agents may send them), call_format (how the policy
    writes tool calls)"""
    workers: Annotated[int, Bounds(ge=0, le=256)] = 0
    """processes that run episodes beside the driver; 0 runs them in the driver; the samples are the
    same"""
    max_concurrent_rollouts: Annotated[int, POSITIVE] | None = None
    """episodes in flight at once; null is the batch of one training step"""
    max_head_offpolicyness: Annotated[int, NOT_NEGATIVE] = 0
    """largest trainer_version - min(versions of trained tokens); 0 is synchronous"""
    order: Annotated[str, Choices("submission", "completion")] = "submission"
    """which episodes make a batch: submission: the first submitted; completion: the first
    completed, unless a slower one would become too old; equal with max_head_offpolicyness=0"""
    kv_after_sync: Annotated[str, Choices("flush", "keep")] = "flush"
    """the servers' KV caches at a weight update: flush empties them; keep lets running episodes
    continue with their KV of older weights"""
    request_timeout: Annotated[float, TIMEOUT] = 600.0
    """seconds one generation request may take; a longer one is aborted, and another continues with
    its tokens; a failed one is sent again, to all servers, for as long (at most 120 s), and then
    its rollout has failed"""
    affinity: Annotated[float, NOT_NEGATIVE] = 2.0
    """an episode stays with its server and the prefix cache there until its outstanding tokens
    exceed this many times those of the least loaded server; 0 always takes the least loaded"""
    setup_timeout: Annotated[float, TIMEOUT] = 600.0
    """seconds until all servers answer /health, whether the run starts them or not"""
    episode_timeout: Annotated[float, TIMEOUT] = 1800.0
    """seconds one episode may take, without pauses of generation; a longer one has failed, and
    another row replaces it"""
    reward_timeout: Annotated[float, TIMEOUT] = 60.0
    """seconds one reward may take; later is an error"""
    reward_workers: Annotated[int, POSITIVE] = 2
    """processes that compute rewards, here or at each reward address"""
    reward_addresses: list[str] = field(default_factory=list)
    """host:port of running reward workers (cluster.reward_pool starts them); empty computes
    rewards in processes beside rank 0"""
    failure_retries: Annotated[int, NOT_NEGATIVE] = 1
    """times that a rollout is run again after its environment, reward, tool or server failed"""
    min_rollouts: Annotated[int, POSITIVE] = 2
    """fewest rollouts of a group; a group with fewer after failures is replaced by another
    prompt's; use 1 if rollouts are not compared"""
    max_failure_rate: Annotated[float, FRACTION_ABOVE_ZERO] = 0.5
    """the run stops if a larger share of the latest rollouts failed; 1 never stops"""
    on_reward_error: Annotated[str, Choices("raise", "reject")] = "raise"
    """a reward that raises: stop the run, or reject the sample and count it"""

    @property
    def retry_timeout(self) -> float:
        """Returns the seconds for which a request that fails is tried again."""
        return min(self.request_timeout, 120.0)


@dataclass(kw_only=True)
class GenerationConfig:
    """Configures servers that answer the validation sets of a supervised run.

    Rank 0 starts them on its machine, from the trained model's directory, unless rollout.addresses
    names running ones; every evaluation brings them the weights first."""

    loss: bool = True
    """evaluate by the loss on the validation sets' own answers, too"""
    gconfig: GenerationHyperparameters = section(GenerationHyperparameters, greedy=True)
    """sampling during evaluation"""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """generation client"""
    server: ServerConfig = field(default_factory=ServerConfig)
    """servers that rank 0 starts"""
    weight_sync: WeightSyncConfig = section(WeightSyncConfig, type="disk")
    """weights to the servers"""
