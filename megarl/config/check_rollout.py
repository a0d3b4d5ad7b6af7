"""Checks generation: sampling, servers, the client, weight sync."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megarl.config import rules
from megarl.config.check_data import model_path_problems
from megarl.config.dataset import DatasetConfig
from megarl.config.recipes import GRPOConfig, held_out_key, held_out_sets
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig, ServerConfig
from megarl.config.rules import rule_problems
from megarl.config.servers import addresses_in, turn_problems
from megarl.config.weight_sync import Requirements, WeightSyncConfig, built_in_transport
from megarl.utils.env import JOB_TOKEN, is_here
from megarl.utils.http import split_address


def generation_problems(key: str, g: GenerationHyperparameters) -> Iterator[str]:
    """Yields the problems of one section of sampling parameters; `key` is its name."""
    yield from rule_problems(rules.GENERATION, g, f"{key}.")
    if "" in g.stop:
        yield f"{key}.stop={g.stop}: an empty text would end every answer at once; leave it out"


def kv_problems(rollout: RolloutConfig, weight_sync: WeightSyncConfig) -> Iterator[str]:
    """Yields why servers cannot treat their KV caches so at an update; not what depends on the
    kind of server."""
    yield from rule_problems(rules.KV, SimpleNamespace(rollout=rollout, weight_sync=weight_sync))


def rollout_problems(cfg: GRPOConfig, world_size: int | None = None) -> Iterator[str]:
    """Yields the problems of sampling, servers, the client and a built-in transport. world_size:
    trainer processes, None where they are not known."""
    yield from generation_problems("gconfig", cfg.gconfig)
    yield from generation_problems("eval_gconfig", cfg.eval_gconfig)
    yield from _address_problems(cfg.rollout)
    yield from _worker_problems(cfg)
    yield from rule_problems(rules.KV, cfg)
    yield from turn_problems(cfg)
    yield from _server_problems(cfg.server, "server")
    room, trained = cfg.server.context_length, {"train_dataset": cfg.train_dataset}
    held_out = {held_out_key(name): data for name, data in held_out_sets(cfg).items()}
    yield from _context_problems(room, "gconfig", cfg.gconfig, trained)
    yield from _context_problems(room, "eval_gconfig", cfg.eval_gconfig, held_out)
    yield from _judge_problems(cfg)
    if (built_in := built_in_transport(cfg.weight_sync.type)) is not None:
        yield from transport_problems(cfg, built_in.requirements)
    senders = cfg.weight_sync.senders
    if senders is not None and world_size and senders > world_size:
        yield (
            f"weight_sync.senders={senders}: there are {world_size} trainer processes; use at most "
            "that many, or null for one on each pipeline stage"
        )


def _address_problems(r: RolloutConfig) -> Iterator[str]:
    listed = {"addresses": r.addresses, "reward_addresses": r.reward_addresses}
    listed["router"] = [r.router] if r.router else []
    if r.addresses_file:
        try:
            listed["addresses_file"] = addresses_in(r.addresses_file)
        except (OSError, UnicodeDecodeError) as e:
            yield (
                f"rollout.addresses_file={r.addresses_file}: cannot be read: {e}; make the file, "
                "it may be empty at first"
            )
    for key, addresses in listed.items():
        for address in addresses:
            if not _is_address(address):
                yield f"rollout.{key}: {address!r} is not host:port, like 127.0.0.1:30000"


def _is_address(text: str) -> bool:
    try:
        _, port = split_address(text)
    except ValueError:
        return False
    return 0 < port < 65536


def _worker_problems(cfg: GRPOConfig) -> Iterator[str]:
    r = cfg.rollout
    if r.gateway.port and r.gateway.port + r.workers > 65535:
        yield (
            f"rollout.gateway.port={r.gateway.port}: the rollout.workers={r.workers} workers take "
            "the ports behind it, of which 65535 is the last; use a lower one, or 0 for free ones"
        )
    batches = r.max_head_offpolicyness + 1
    in_flight = r.max_concurrent_rollouts or cfg.train_dataset.batch_size * batches
    if r.workers > in_flight:
        yield (
            f"rollout.workers={r.workers}: at most {in_flight} episodes are in flight, so the "
            "others would have none to run; use about one worker for each core that is free"
        )


def transport_problems(cfg: GRPOConfig, needs: Requirements) -> Iterator[str]:
    """Yields the settings of `cfg` that do not go with a transport that has these needs."""
    r, sync, server = cfg.rollout, cfg.weight_sync, cfg.server
    key = f"weight_sync.type={sync.type}"
    if needs.shares_devices and r.addresses and not any(map(is_here, r.addresses)):
        yield (
            f"{key}: none of rollout.addresses is on this machine; use "
            "weight_sync.type=distributed or disk"
        )
    if server.dp > 1 and (needs.adapters or not needs.directory):
        yield (
            f"{key}: SGLang takes no weights from a trainer's memory, nor adapters, with "
            f"server.dp={server.dp} (it asserts dp_size == 1); use weight_sync.type=disk, or "
            f"server.count={server.count * server.dp} with server.dp=1"
        )
    streamed = {"delta=true": sync.delta, "sharded=on": sync.sharded == "on"}
    streamed[f"quantization={sync.quantization}"] = sync.quantization != "none"
    for option in (option for option, used in streamed.items() if used and not needs.less):
        yield f"weight_sync.{option}: goes with weight_sync.type=distributed, not with {sync.type}"
    if needs.less:
        yield from rule_problems(rules.SYNC, cfg)
    if not needs.adapters:
        return
    yield from rule_problems(rules.ADAPTERS, cfg)
    if server.path and server.path != cfg.actor.path:
        yield f"{key}: servers must start from the model below the adapters; leave server.path out"
    stock = server.type == "sglang" and server.count > 0
    if cfg.actor.lora and stock and not _named(server, "--enable-lora"):
        yield (
            f"{key}: SGLang has room for adapters where it is told to; set server.options="
            f"{{enable_lora: true, max_lora_rank: {cfg.actor.lora.r}, lora_target_modules: [...]}}"
        )


def _judge_problems(cfg: GRPOConfig) -> Iterator[str]:
    """Yields the problems of the judge's servers, and the data sets whose judge is nowhere."""
    if cfg.judge is not None:
        if not cfg.judge.path:
            yield "judge.path is empty: name the model that judges"
        yield from _server_problems(cfg.judge, "judge")
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


def _server_problems(s: ServerConfig, key: str) -> Iterator[str]:
    """Yields the problems of how servers run; `key` is their section."""
    yield from rule_problems(rules.SERVER, s, f"{key}.")
    if s.path:
        yield from model_path_problems(f"{key}.path", s.path, weights=True)
    if s.python and not Path(s.python).is_file():
        yield f"{key}.python={s.python}: no such interpreter"
    attention = _named(s, "--enable-dp-attention", "--attn-dp-size")
    if s.dp > 1 and attention:
        yield (
            f"{key}.dp={s.dp}: replicas do not go with {attention}, whose parts are within "
            f"{key}.tp; leave {key}.dp out and set {key}.options.dp_size"
        )
    if not attention and (flag := _named(s, "--dp-size", "--dp", "--data-parallel-size")):
        yield f"{flag} among {key}.options: set {key}.dp, by which GPUs are given"
    if _named(s, "--api-key"):
        yield (
            f"--api-key among {key}.options: everybody on the machine reads command lines; leave "
            f"it out, and set {JOB_TOKEN} in the environment, which servers take for it"
        )


def _named(s: ServerConfig, *flags: str) -> str:
    """Returns the first of the flags that the server's arguments name, with or without =VALUE."""
    given = {a.split("=")[0] for a in s.arguments}
    return next((flag for flag in flags if flag in given), "")


def _context_problems(
    room: int, of: str, g: GenerationHyperparameters, data: Mapping[str, DatasetConfig]
) -> Iterator[str]:
    """Yields a line for each data set, by its key, whose prompts with their answers exceed `room`
    tokens; `of` is the section of the sampling parameters."""
    where, longest = f"server.context_length={room}", g.max_new_tokens
    for key, each in data.items():
        if room <= longest:
            yield f"{where}: leaves no room for a prompt beside {of}.max_new_tokens={longest}"
        elif each.max_length is not None and room < each.max_length + longest:
            yield (
                f"{where}: smaller than {key}.max_length + {of}.max_new_tokens = "
                f"{each.max_length}+{longest}"
            )
