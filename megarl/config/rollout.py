"""Configures generation: sampling parameters, the servers, the client and its staleness bound."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from megarl.config.base import (
    FRACTION_ABOVE_ZERO,
    NOT_NEGATIVE,
    POSITIVE,
    TIMEOUT,
    Bounds,
    Choices,
    SeamConfig,
)
from megarl.config.weight_sync import WeightSyncConfig

# those of rollout.tools.calls
CALL_FORMATS = ("hermes", "qwen", "qwen3_coder", "llama3", "deepseek", "glm")


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

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """Returns a copy with other values, as gconfig.new(n_samples=1)."""
        return replace(self, **changes)

    @classmethod
    def from_pretrained(cls, path: str | Path, **changes: Any) -> GenerationHyperparameters:
        """Returns the parameters that generation_config.json of a model directory recommends
        (temperature, top_p, top_k, greedy, further stop tokens), with `changes`; the defaults where
        there is no file."""
        file = Path(path) / "generation_config.json"
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        known = {k: found[k] for k in ("temperature", "top_p", "top_k") if found.get(k) is not None}
        if known.get("top_k") == 0:  # transformers' word for all
            del known["top_k"]
        ends = found.get("eos_token_id")
        if isinstance(ends, list):  # the first is the model's EOS
            known["stop_token_ids"] = ends[1:]
        if "do_sample" in found:
            known["greedy"] = not found["do_sample"]
        return cls(**(known | changes))


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
    options: dict[str, Any] = field(default_factory=dict)
    """options of the server by their names: server.options.attention_backend=triton is
    --attention-backend triton; true is the bare flag; false and null leave it out"""
    restarts: Annotated[int, NOT_NEGATIVE] = 0
    """a dead server is started again this many times while the run continues with the others
    (server.count=2 or more); 0 ends the run"""
    start_timeout: Annotated[float, TIMEOUT] = 600.0
    """seconds until a started server must be healthy"""

    def __post_init__(self) -> None:
        if isinstance(self.release_memory, bool):
            self.release_memory = "true" if self.release_memory else "false"

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
class GatewayConfig:
    """Configures the gateway: where it listens, and when a chat goes on from recorded tokens."""

    host: str = "127.0.0.1"
    """address on which the gateway listens"""
    port: Annotated[int, Bounds(ge=0, le=65535)] = 0
    """its port; 0 takes a free one"""
    advertise: str = ""
    """host name in the URLs that agents get; empty is `host`, or this machine's name where the
    gateway listens on every address"""
    reuse: bool = True
    """a chat that continues after an answer of the policy keeps the policy's tokens"""
    max_n: Annotated[int, Bounds(ge=1, le=128)] = 8
    """most answers that one request may ask for (`n`)"""
    max_answers: Annotated[int, POSITIVE] = 1024
    """most answers of one session; a request beyond them is refused"""
    rewards: Annotated[str, Choices("auto", "always", "never")] = "auto"
    """whether agents may send rewards to the gateway; auto: if their workflow has no reward
    function"""
    context_length: Annotated[int, POSITIVE] | None = None
    """prompt plus answer in tokens, beyond which a request is refused; null is the servers' own"""
    call_format: Annotated[str, Choices(*CALL_FORMATS, or_path=True)] = "hermes"
    """how the policy writes calls of tools; a path names a function, see docs/agents.md"""


@dataclass(kw_only=True)
class RolloutConfig:
    """Configures the generation client: servers, workflow, staleness bound, timeouts (s)."""

    addresses: list[str] = field(default_factory=list)
    """host:port of running servers; empty takes MEGARL_LLM_SERVER_ADDRS"""
    addresses_file: str = ""
    """file with a line host:port for each further server, read at every weight update: added
    servers join the run, removed ones leave it"""
    router: str = ""
    """host:port of SGLang's router for generation requests; the run registers its servers there;
    pauses and weights go to the servers' own addresses"""
    workflow: SeamConfig = field(
        default_factory=lambda: SeamConfig(type="megarl.rollout.workflows.rlvr:RLVRWorkflow")
    )
    """class that turns a row into samples"""
    backend: SeamConfig = field(
        default_factory=lambda: SeamConfig(type="megarl.rollout.client:RemoteSGLangEngine")
    )
    """class of the generation client, made with (rollout, weight_sync=..., seed=...)"""
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    """HTTP gateway through which agents reach the policy"""
    workers: Annotated[int, Bounds(ge=0, le=256)] = 0
    """processes that run episodes beside the driver; 0 runs them in the driver; the samples are the
    same"""
    max_concurrent_rollouts: Annotated[int, POSITIVE] | None = None
    """episodes in flight at once; null is the batch of one training step"""
    max_queue: Annotated[int, NOT_NEGATIVE] | None = None
    """requests that may wait in a server's queue: the number of episodes in flight grows while
    queues are empty, within the staleness bound, and shrinks while one is longer; null keeps it
    fixed"""
    max_head_offpolicyness: Annotated[int, NOT_NEGATIVE] = 0
    """largest trainer_version - min(versions of trained tokens); 0 is synchronous"""
    order: Annotated[str, Choices("submission", "completion")] = "submission"
    """which episodes make a batch: submission: the first submitted; completion: the first
    completed, unless a slower one would become too old; equal with max_head_offpolicyness=0"""
    kv_after_sync: Annotated[str, Choices("flush", "recompute", "keep")] = "flush"
    """the servers' KV caches at a weight update: flush empties them; recompute keeps them, but no
    request reads KV of other weights; keep lets running episodes continue with their KV of older
    weights"""
    request_timeout: Annotated[float, TIMEOUT] = 600.0
    """seconds one generation request may take; a longer one is aborted, and another continues with
    its tokens"""
    retry_timeout: Annotated[float, TIMEOUT] = 120.0
    """seconds for which a failed generation request is sent again, to all servers; then its rollout
    has failed"""
    affinity: Annotated[float, NOT_NEGATIVE] = 2.0
    """an episode stays with its server and the prefix cache there until its outstanding tokens
    exceed this many times those of the least loaded server; 0 always takes the least loaded"""
    setup_timeout: Annotated[float, TIMEOUT] = 120.0
    """seconds to wait for servers to answer /health"""
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


@dataclass(kw_only=True)
class GenerationConfig:
    """Configures servers that answer the validation sets of a supervised run.

    Rank 0 starts them on its machine, from the trained model's directory, unless rollout.addresses
    names running ones; every evaluation brings them the weights first."""

    loss: bool = True
    """evaluate by the loss on the validation sets' own answers, too"""
    gconfig: GenerationHyperparameters = field(
        default_factory=lambda: GenerationHyperparameters(greedy=True)
    )
    """sampling during evaluation"""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """generation client"""
    server: ServerConfig = field(default_factory=ServerConfig)
    """servers that rank 0 starts"""
    weight_sync: WeightSyncConfig = field(default_factory=lambda: WeightSyncConfig(type="disk"))
    """weights to the servers"""
