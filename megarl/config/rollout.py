"""Configures generation: sampling parameters, the servers, the client and its staleness bound."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.config.base import SeamConfig, arg, seam
from megarl.config.bounds import FRACTION_ABOVE_ZERO, NOT_NEGATIVE, POSITIVE, TIMEOUT, Bounds
from megarl.config.gateway import GatewayConfig


@dataclass(kw_only=True)
class GenerationHyperparameters:
    """Sets how samples are drawn: their number, length in tokens, temperature and stops."""

    n_samples: int = arg(
        1, bounds=Bounds(gt=0, le=65536), help="samples per prompt (the group size G)"
    )
    max_new_tokens: int = arg(512, bounds=POSITIVE, help="token bound of one response")
    min_new_tokens: int = arg(0, help="no stop before this many tokens")
    greedy: bool = arg(False, help="take the argmax (temperature 0)")
    temperature: float = arg(
        1.0, bounds=Bounds(ge=0, le=100), help="divides logits before sampling and before logprobs"
    )
    top_p: float = arg(1.0, bounds=FRACTION_ABOVE_ZERO, help="nucleus bound")
    top_k: int = arg(-1, help="sample among the k most likely; -1 is all")
    stop_token_ids: list[int] = arg(factory=list, help="extra stop tokens beside the model's EOS")
    stop: list[str] = arg(factory=list, help="stop strings")
    ignore_eos: bool = arg(False, help="generate through EOS")
    seed: int | None = arg(
        None, help="seeded sampling: keys every token by (seed, step, prompt, sample, position)"
    )

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

    type: str = arg(
        "embedded",
        help="embedded: megarl's own server (CPU, tests); sglang: the real one",
        choices=("embedded", "sglang"),
    )
    count: int = arg(
        1,
        bounds=NOT_NEGATIVE,
        help="servers the launcher starts (0 with rollout.addresses or addresses_file set)",
    )
    path: str = arg("", help="HF model the servers start from; empty is the trained one")
    dtype: str = arg("auto", help="auto is the trainer's", choices=("auto", "float32", "bfloat16"))
    context_length: int = arg(2048, bounds=POSITIVE, help="prompt plus response bound in tokens")
    max_running_requests: int = arg(
        256, bounds=POSITIVE, help="sequences decoded at once by one server, or replica"
    )
    release_memory: str = arg(
        "auto",
        help="servers and trainers use the same devices in turn: while one side works, the other "
        "has released its memory; auto: where the launcher's servers share the trainers' devices "
        "and rollout.max_head_offpolicyness=0; true also for servers of rollout.addresses that "
        "nobody else uses",
        choices=("auto", "true", "false"),
    )
    enforce_eager: bool = arg(False, help="no CUDA graphs (sglang), which saves their memory")
    deterministic: bool = arg(False, help="batch-invariant mode: same request, same bits")
    tp: int = arg(1, bounds=POSITIVE, help="tensor-parallel degree of one server (sglang)")
    dp: int = arg(
        1,
        bounds=POSITIVE,
        help="data-parallel replicas of tp inside one server (sglang's --dp-size), on further GPUs "
        "of its node behind one address; weights reach them by weight_sync.type=disk alone",
    )
    nnodes: int | None = arg(
        None,
        bounds=POSITIVE,
        help="nodes that one server spans (sglang); null is as few as its tp needs",
    )
    threads: int = arg(
        0,
        bounds=NOT_NEGATIVE,
        help="CPU threads of one server; 0 shares the cores among the servers, and in an "
        "asynchronous run with the trainers",
    )
    python: str = arg("", help="interpreter that runs the sglang server; empty is this one")
    options: dict[str, Any] = arg(
        factory=dict,
        help="any option of the server, by its name: +server.options.attention_backend=triton is "
        "--attention-backend triton; true is the bare flag, false and null leave it out",
    )
    extra_args: list[str] = arg(factory=list, help="more command-line arguments for the server")
    restarts: int = arg(
        0,
        bounds=NOT_NEGATIVE,
        help="a server that dies is started again this many times while the run goes on with the "
        "others (server.count=2 or more); 0 ends the run",
    )
    start_timeout: float = arg(
        600.0, bounds=TIMEOUT, help="seconds until a started server must be healthy"
    )

    def __post_init__(self) -> None:
        if isinstance(self.release_memory, bool):
            self.release_memory = "true" if self.release_memory else "false"

    @property
    def gpus(self) -> int:
        """The GPUs of one server (on a CPU: processes)."""
        return self.tp * self.dp

    @property
    def arguments(self) -> list[str]:
        """The command-line arguments of `options` and `extra_args`: {"a_b": 1, "c": True,
        "d": [2, 3], "e": {"f": 4}} is --a-b 1 --c --d 2 3 --e '{"f": 4}'.
        """
        flags: list[str] = []
        for name, value in self.options.items():
            if value is None or value is False:
                continue
            values = [] if value is True else value if isinstance(value, list) else [value]
            flags.append(f"--{name.replace('_', '-')}")
            flags += [json.dumps(v) if isinstance(v, dict) else str(v) for v in values]
        return [*flags, *self.extra_args]


@dataclass(kw_only=True)
class RolloutConfig:
    """Configures the generation client: servers, workflow, staleness bound, timeouts (s)."""

    addresses: list[str] = arg(
        factory=list, help="host:port of running servers; empty takes MEGARL_LLM_SERVER_ADDRS"
    )
    addresses_file: str = arg(
        "",
        help="file with a line host:port for each further server, read at every weight update: a "
        "server that is added joins the run, one that is removed leaves it",
    )
    router: str = arg(
        "",
        help="host:port of SGLang's router, through which requests reach the servers: the run "
        "makes them its workers. Pauses and weights go to the servers' own addresses",
    )
    workflow: SeamConfig = seam(
        "megarl.rollout.workflows.rlvr:RLVRWorkflow", help="class that turns a row into samples"
    )
    backend: SeamConfig = seam(
        "megarl.rollout.client:RemoteSGLangEngine",
        help="class of the generation client, made with (rollout, weight_sync=..., seed=...)",
    )
    gateway: GatewayConfig = arg(
        factory=GatewayConfig, help="HTTP gateway through which agents reach the policy"
    )
    workers: int = arg(
        0,
        bounds=Bounds(ge=0, le=256),
        help="processes that run episodes, beside the driver, which keeps their order and books; 0 "
        "runs them in the driver itself. The samples are the same",
    )
    max_concurrent_rollouts: int | None = arg(
        None,
        bounds=POSITIVE,
        help="episodes in flight at once; null is the batch of one training step",
    )
    max_queue: int | None = arg(
        None,
        bounds=NOT_NEGATIVE,
        help="requests that may wait in a server's queue: episodes in flight grow from a batch, as "
        "far as the staleness bound lets them, while queues are empty, and shrink where one is "
        "longer; null does not look",
    )
    max_head_offpolicyness: int = arg(
        0,
        bounds=NOT_NEGATIVE,
        help="largest trainer_version - min(versions of trained tokens); 0 is synchronous",
    )
    order: str = arg(
        "submission",
        help="which episodes make a batch: the first submitted, or the first completed as far as "
        "no other grows too stale by it; the same where max_head_offpolicyness=0",
        choices=("submission", "completion"),
    )
    kv_after_sync: str = arg(
        "flush",
        help="the servers' KV caches at a weight update: flush empties them; recompute leaves "
        "them, but no request reads KV of other weights than its own; keep lets episodes in flight "
        "go on with theirs, of older weights",
        choices=("flush", "recompute", "keep"),
    )
    request_timeout: float = arg(
        600.0,
        bounds=TIMEOUT,
        help="seconds one generation request may take; a longer one is aborted, and another goes "
        "on with its tokens",
    )
    retry_timeout: float = arg(
        120.0,
        bounds=TIMEOUT,
        help="seconds for which a generation request that fails is tried again, on all servers; "
        "then the rollout has failed, or no server is left",
    )
    affinity: float = arg(
        2.0,
        bounds=NOT_NEGATIVE,
        help="an episode stays with its server, and the prefix cache there, until it is lost or "
        "overloaded: until its outstanding tokens exceed this many times those that the least "
        "loaded server would have with the request; 0 always takes the least loaded",
    )
    setup_timeout: float = arg(
        120.0, bounds=TIMEOUT, help="seconds to wait for servers to answer /health"
    )
    meeting_timeout: float = arg(
        600.0,
        bounds=TIMEOUT,
        help="seconds within which all ranks come to a call that every rank makes (prepare_batch, "
        "rollout_batch, an update's result()); what rank 0 does then has its own timeouts",
    )
    episode_timeout: float = arg(
        1800.0,
        bounds=TIMEOUT,
        help="seconds one whole episode may take, without pauses of generation; one that takes "
        "longer counts as failed, and another row takes its place",
    )
    reward_timeout: float = arg(
        60.0, bounds=TIMEOUT, help="seconds one reward may take; later is an error"
    )
    reward_workers: int = arg(
        2, bounds=POSITIVE, help="processes that compute rewards, here or at each reward address"
    )
    reward_addresses: list[str] = arg(
        factory=list,
        help="host:port of running reward workers (cluster.reward_pool starts them); empty "
        "computes rewards in processes beside rank 0",
    )
    failure_retries: int = arg(
        1,
        bounds=NOT_NEGATIVE,
        help="times that rollouts are made anew whose environment, reward, tool or server failed",
    )
    min_rollouts: int = arg(
        2,
        bounds=POSITIVE,
        help="a group in which failures leave fewer rollouts is replaced by another prompt's; use "
        "1 where rollouts of a group are not compared",
    )
    max_failure_rate: float = arg(
        0.5,
        bounds=FRACTION_ABOVE_ZERO,
        help="the run stops where a larger part of the latest rollouts failed; 1 never stops",
    )
    on_reward_error: str = arg(
        "raise",
        help="a reward that raises: stop the run, or reject the sample and count it",
        choices=("raise", "reject"),
    )
