"""Checks generation: sampling, servers, the client, weight sync."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.config.check_actor import temperature_problems
from megarl.config.check_data import model_path_problems
from megarl.config.gateway import MATCHES
from megarl.config.recipes import GRPOConfig, held_out_key, held_out_sets
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig, ServerConfig
from megarl.config.servers import addresses_in
from megarl.config.transports import Requirements, built_in_transport, transport_name
from megarl.config.turns import turn_problems
from megarl.utils.env import is_here
from megarl.utils.http import split_address
from megarl.utils.job_token import ENV

LOWEST_TEMPERATURE = 0.001  # with less, sampling is argmax


def generation_problems(key: str, g: GenerationHyperparameters) -> Iterator[str]:
    """Yields the problems of one section of sampling parameters; `key` is its name."""
    if g.max_new_tokens > 0 and not 0 <= g.min_new_tokens <= g.max_new_tokens:
        yield (
            f"{key}.min_new_tokens={g.min_new_tokens}: must be from 0 to "
            f"{key}.max_new_tokens={g.max_new_tokens}"
        )
    if 0 <= g.temperature < LOWEST_TEMPERATURE and not (g.greedy and g.temperature == 0):
        yield (
            f"{key}.temperature={g.temperature}: must be >= {LOWEST_TEMPERATURE}; for argmax set "
            f"{key}.greedy=true"
        )
    if g.top_k != -1 and g.top_k < 1:
        yield f"{key}.top_k={g.top_k}: must be > 0, or -1 for all tokens"
    if any(not 0 <= t < 1 << 31 for t in g.stop_token_ids):
        yield f"{key}.stop_token_ids={g.stop_token_ids}: token ids start at 0"
    if "" in g.stop:
        yield f"{key}.stop={g.stop}: an empty text would end every answer at once; leave it out"


def rollout_problems(cfg: GRPOConfig) -> Iterator[str]:
    """Yields the problems of training samples, server addresses and a built-in transport."""
    r, sync = cfg.rollout, cfg.weight_sync
    if cfg.gconfig.greedy:  # else the temperature has been judged already
        yield from temperature_problems(cfg.gconfig.temperature, "gconfig.temperature")
    if cfg.episodes.entropy and not cfg.actor.recomputes:
        yield (
            "episodes.entropy=true: comes of the pass that recomputes logprobs; set "
            "actor.recompute_logprob=true"
        )
    yield from _address_problems(cfg)
    yield from _gateway_problems(r)
    yield from _in_flight_problems(cfg)
    if r.addresses_file:
        yield from _address_file_problems(r.addresses_file)
    embedded = cfg.server.type == "embedded" and cfg.server.count > 0
    yield from kv_problems(r.kv_after_sync, sync.pause_mode, embedded=embedded)
    yield from turn_problems(cfg)
    if (built_in := built_in_transport(sync.type)) is not None:
        yield from transport_problems(cfg, built_in.requirements)


def _address_problems(cfg: GRPOConfig) -> Iterator[str]:
    r = cfg.rollout
    for key in ("addresses", "reward_addresses"):
        for address in getattr(r, key):
            if not is_address(address):
                yield f"rollout.{key}: {address!r} is not host:port, like 127.0.0.1:30000"
    if r.router and not is_address(r.router):
        yield f"rollout.router: {r.router!r} is not host:port, like 127.0.0.1:30000"
    if r.router and cfg.actor.moe.router_replay == "rollout":
        yield (
            f"rollout.router={r.router}: it passes no request for routes on, which "
            "actor.moe.router_replay=rollout needs; leave one of the two out"
        )


def _gateway_problems(r: RolloutConfig) -> Iterator[str]:
    for match in r.gateway.match:
        if match not in MATCHES:
            yield f"rollout.gateway.match: {match!r} is none of {', '.join(MATCHES)}"
    if r.gateway.port and r.gateway.port + r.workers > 65535:
        yield (
            f"rollout.gateway.port={r.gateway.port}: the rollout.workers={r.workers} workers take "
            "the ports behind it, of which 65535 is the last; use a lower one, or 0 for free ones"
        )


def _in_flight_problems(cfg: GRPOConfig) -> Iterator[str]:
    r = cfg.rollout
    in_flight = r.max_concurrent_rollouts or cfg.train_dataset.batch_size * (
        r.max_head_offpolicyness + 1
    )
    if r.workers > in_flight:
        yield (
            f"rollout.workers={r.workers}: at most {in_flight} episodes are in flight, so the "
            "others would have none to run; use about one worker for each core that is free"
        )


def kv_problems(kv_after_sync: str, pause_mode: str, *, embedded: bool = False) -> Iterator[str]:
    """Yields why KV caches cannot be treated so at an update that pauses servers in this mode.
    embedded: the servers are megarl's own, whose cache ends with the request."""
    key = f"rollout.kv_after_sync={kv_after_sync}"
    pause = f"weight_sync.pause_mode={pause_mode}"
    if kv_after_sync != "keep" and pause_mode == "in_place":
        yield (
            f"{key}: with {pause} requests hold their KV through the update; use "
            "weight_sync.pause_mode=abort, or rollout.kv_after_sync=keep"
        )
    if kv_after_sync == "recompute" and pause_mode == "retract":
        yield (
            f"{key}: with {pause} requests wait inside the server under the version that they "
            "began with, and find the KV of their prompts again; use weight_sync.pause_mode=abort, "
            "or rollout.kv_after_sync=flush"
        )
    if kv_after_sync == "keep" and pause_mode == "retract":
        yield (
            f"{key}: {pause} takes KV away from requests in flight; use "
            "weight_sync.pause_mode=in_place or abort"
        )
    if kv_after_sync == "keep" and embedded and pause_mode not in ("in_place", "retract"):
        yield (
            f"{key}: the embedded server has no cache beyond a request, so with {pause} there is "
            "nothing to keep; use weight_sync.pause_mode=in_place, server.type=sglang, or "
            "rollout.kv_after_sync=flush"
        )


def _address_file_problems(file: str) -> Iterator[str]:
    key = f"rollout.addresses_file={file}"
    try:
        listed = addresses_in(file)
    except (OSError, UnicodeDecodeError) as e:
        yield f"{key}: cannot be read: {e}; make the file, it may be empty at first"
        return
    for address in listed:
        if not is_address(address):
            yield f"{key}: {address!r} is not host:port, like 127.0.0.1:30000"


def sender_problems(cfg: GRPOConfig, world_size: int | None) -> Iterator[str]:
    """Yields a line where weight_sync.senders exceeds the trainer processes."""
    senders = cfg.weight_sync.senders
    if senders is not None and world_size and senders > world_size:
        yield (
            f"weight_sync.senders={senders}: there are {world_size} trainer processes; use at most "
            "that many, or null for one on each pipeline stage"
        )


def transport_problems(cfg: GRPOConfig, needs: Requirements) -> Iterator[str]:
    """Yields the settings of `cfg` that do not go with a transport that has these needs."""
    r, key = cfg.rollout, f"weight_sync.type={cfg.weight_sync.type}"
    if needs.shares_devices and r.addresses and not any(map(is_here, r.addresses)):
        yield (
            f"{key}: none of rollout.addresses is on this machine; use "
            "weight_sync.type=distributed or disk"
        )
    if cfg.server.dp > 1 and (needs.adapters or not needs.directory):
        yield (
            f"{key}: SGLang takes no weights from a trainer's memory, nor adapters, with "
            f"server.dp={cfg.server.dp} (it asserts dp_size == 1); use weight_sync.type=disk, or "
            f"server.count={cfg.server.count * cfg.server.dp} with server.dp=1"
        )
    yield from _less_to_send_problems(cfg, needs)
    if problem := _sharded_problem(cfg):
        yield problem
    if needs.adapters:
        yield from _adapter_problems(cfg, key)


def _adapter_problems(cfg: GRPOConfig, key: str) -> Iterator[str]:
    server = cfg.server
    if cfg.actor.lora is None:
        yield f"{key}: sends LoRA adapters alone; set actor.lora, or weight_sync.type=distributed"
        return
    if cfg.weight_sync.pause_mode in ("retract", "in_place"):
        yield (
            f"{key}: requests kept by weight_sync.pause_mode={cfg.weight_sync.pause_mode} would go "
            "on with an adapter that is unloaded; use pause_mode=abort or drain"
        )
    if cfg.rollout.kv_after_sync == "keep":
        yield (
            f"{key}: servers keep KV by adapter, and every update brings a new one, so "
            "rollout.kv_after_sync=keep has nothing to keep; use kv_after_sync=flush or recompute"
        )
    if server.path and server.path != cfg.actor.path:
        yield f"{key}: servers must start from the model below the adapters; leave server.path out"
    if server.type == "sglang" and server.count > 0 and "--enable-lora" not in server.arguments:
        yield (
            f"{key}: SGLang has room for adapters where it is told to; set server.extra_args="
            f"[--enable-lora,--max-lora-rank,'{cfg.actor.lora.r}',--lora-target-modules,...]"
        )


def _less_to_send_problems(cfg: GRPOConfig, needs: Requirements) -> Iterator[str]:
    sync, sglang = cfg.weight_sync, cfg.server.type == "sglang" and cfg.server.count > 0
    fp8 = sync.quantization != "none"
    if not needs.less and (sync.delta or fp8):
        key = "delta=true" if sync.delta else f"quantization={sync.quantization}"
        yield f"weight_sync.{key}: goes with weight_sync.type=distributed, not with {sync.type}"
    if sync.delta and sglang and sync.sharded != "on":
        yield (
            f"weight_sync.delta=true: a stock SGLang server takes changes by slices, and "
            f"weight_sync.sharded={sync.sharded} may send whole tensors; use sharded=on, or "
            "server.type=embedded"
        )
    if fp8 and sglang and not cfg.server.path:
        yield (
            f"weight_sync.quantization={sync.quantization}: SGLang must start from weights of that "
            "layout; set server.path to the model's FP8 checkpoint"
        )


def _sharded_problem(cfg: GRPOConfig) -> str:
    """Returns why weight_sync.sharded=on cannot work, "" where it may."""
    sync, key = cfg.weight_sync, "weight_sync.sharded=on"
    if sync.sharded != "on":
        return ""
    if transport_name(sync.type) != "distributed":
        return f"{key}: goes with weight_sync.type=distributed, not with {sync.type}"
    if cfg.server.type != "sglang" and cfg.server.count > 0:
        return (
            f"{key}: server.type={cfg.server.type} takes whole tensors; use server.type=sglang or "
            "weight_sync.sharded=auto"
        )
    return ""


def is_address(text: str) -> bool:
    """Returns whether `text` is host:port with a port from 1 to 65535."""
    try:
        _, port = split_address(text)
    except ValueError:
        return False
    return 0 < port < 65536


def server_problems(cfg: GRPOConfig) -> Iterator[str]:
    """Yields the problems of the launcher's servers, and of their context length in tokens."""
    s = cfg.server
    if s.count == 0 and not (cfg.rollout.addresses or cfg.rollout.addresses_file):
        yield (
            "server.count=0: then rollout.addresses or rollout.addresses_file must name running "
            "servers, or let the launcher start one (server.count=1)"
        )
    yield from _process_problems(s, "server")
    if s.path:
        yield from model_path_problems("server.path", s.path, weights=True)
    yield from _context_problems(cfg)


def judge_problems(cfg: GRPOConfig) -> Iterator[str]:
    """Yields the problems of the judge's servers, and the data sets whose judge is nowhere."""
    s = cfg.judge
    if s is not None:
        if not s.path:
            yield "judge.path is empty: name the model that judges"
        else:
            yield from model_path_problems("judge.path", s.path, weights=True)
        if s.count == 0:
            yield "judge.count=0: then leave judge null, and name servers in the reward's base_url"
        yield from _process_problems(s, "judge")
        return
    for key, data in (("train_dataset", cfg.train_dataset), ("valid_dataset", cfg.valid_dataset)):
        if data is None:
            continue
        rewards: dict[str, dict[str, Any]]
        rewards = {f"{key}.reward": {"type": data.reward.type, "options": data.reward.options}}
        for name, part in dict(data.reward.options.get("parts") or {}).items():
            part = part if isinstance(part, dict) else {"type": part}
            rewards[f"{key}.reward.options.parts.{name}"] = part
        for where, reward in rewards.items():
            options = reward.get("options") or {}
            if reward.get("type") == "judge" and not options.get("base_url"):
                yield (
                    f"{where}=judge: nothing says which server judges; set its option base_url, or "
                    "have the launcher start one by judge.path"
                )


def _process_problems(s: ServerConfig, key: str) -> Iterator[str]:
    """Yields the problems of how servers run; `key` is their section."""
    attention = _named(s, "--enable-dp-attention", "--attn-dp-size")
    if s.python and not Path(s.python).is_file():
        yield f"{key}.python={s.python}: no such interpreter"
    for degree in ("tp", "dp"):
        if (value := getattr(s, degree)) > 1 and s.type == "embedded":
            said = f"{key}.{degree}={value}: the embedded server is one process"
            yield f"{said}; use {key}.type=sglang"
    if s.dp > 1 and attention:
        yield (
            f"{key}.dp={s.dp}: replicas do not go with {attention}, whose parts are within "
            f"{key}.tp; leave {key}.dp out and set {key}.options.dp_size"
        )
    if s.dp > 1 and s.nnodes not in (None, 1):
        yield f"{key}.nnodes={s.nnodes}: SGLang has replicas ({key}.dp={s.dp}) on one node alone"
    if not attention and (flag := _named(s, "--dp-size", "--dp", "--data-parallel-size")):
        yield f"{flag} among {key}.options and extra_args: set {key}.dp, by which GPUs are given"
    if _named(s, "--api-key"):
        yield (
            f"--api-key among {key}.options and extra_args: everybody on the machine reads command "
            f"lines; leave it out, and set {ENV} in the environment, which servers take for it"
        )


def _named(s: ServerConfig, *flags: str) -> str:
    """Returns the first of the flags that the server's arguments name, with or without =VALUE."""
    given = {a.split("=")[0] for a in s.arguments}
    return next((flag for flag in flags if flag in given), "")


def _context_problems(cfg: GRPOConfig) -> Iterator[str]:
    room = cfg.server.context_length
    pairs = [("gconfig", cfg.gconfig, "train_dataset", cfg.train_dataset)]
    for name, data in held_out_sets(cfg).items():
        pairs.append(("eval_gconfig", cfg.eval_gconfig, held_out_key(name), data))
    for gkey, g, dkey, data in pairs:
        if room <= g.max_new_tokens:
            yield (
                f"server.context_length={room}: leaves no room for a prompt beside "
                f"{gkey}.max_new_tokens={g.max_new_tokens}"
            )
        elif data.max_length is not None and room < data.max_length + g.max_new_tokens:
            yield (
                f"server.context_length={room}: smaller than {dkey}.max_length + "
                f"{gkey}.max_new_tokens = {data.max_length}+{g.max_new_tokens}"
            )
