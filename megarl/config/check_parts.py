"""Checks the parts of a recipe by themselves, as far as torch is not needed: engines, their layouts
and optimizers, data, sampling, servers and transports. check.py calls these checks before anything
starts, and the parts call some for a script's settings.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megarl.config import rules
from megarl.config.algo import PPOActorConfig, PPOCriticConfig
from megarl.config.dataset import GENERATED, MIX, WITH_REWARD, DatasetConfig, SourceConfig
from megarl.config.engine import ALL_LINEAR, LoRAConfig, OptimizerConfig, ParallelConfig
from megarl.config.errors import ConfigError, raise_if_any
from megarl.config.recipe_engines import addresses_in, turn_problems
from megarl.config.recipes import (
    BaseConfig,
    DistillConfig,
    GRPOConfig,
    datasets,
    held_out_key,
    held_out_sets,
    sources,
    workflow_of,
)
from megarl.config.rollout import (
    GenerationHyperparameters,
    Requirements,
    RolloutConfig,
    ServerConfig,
    WeightSyncConfig,
    built_in_transport,
)
from megarl.config.rules import rule_problems
from megarl.config.schema import all_keys, show, value_problems
from megarl.utils.env import is_here
from megarl.utils.http import split_address
from megarl.utils.importing import is_import_path, load_object, option_problems

# options of weight_sync that choose what distributed sends
_LESS = {"delta": (True,), "sharded": (True, "on", False, "off"), "quantization": ("fp8_block",)}
_TAKES = {"bool": (bool,), "int": (int,), "float": (int, float)}  # by the type in a source
_PRECISE = "use_precision_aware_optimizer"
_STATE_DTYPES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
# fields of megatron-core's OptimizerConfig that keys of ours, the engine's dtype or megarl set
_SET_BY_KEYS = (
    *("optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps"),
    *("clip_grad", "bf16", "fp16", "params_dtype", "use_distributed_optimizer"),
    *("overlap_param_gather", "store_param_remainders"),
)


def check_parallel(parallel: ParallelConfig, world_size: int) -> None:
    """Raises ConfigError that names the degrees that do not fit `world_size`."""
    raise_if_any([*value_problems(parallel, "parallel."), *parallel_problems(parallel, world_size)])


def parallel_problems(
    p: ParallelConfig, world_size: int | None, key: str = "parallel"
) -> Iterator[str]:
    """Yields degrees that do not go together or do not divide `world_size` (None: not known); `key`
    is the section's name."""
    if min(p.tp, p.pp, p.vpp, p.cp, p.ep, p.etp) < 1:
        return  # which their bounds say
    for what, degrees, ranks in (
        ("tp*pp*cp", f"{p.tp}*{p.pp}*{p.cp}", p.dense_ranks),
        ("etp*ep*pp", f"{p.etp}*{p.ep}*{p.pp}", p.expert_ranks),
    ):
        if world_size is not None and world_size % ranks:
            why = f"{what} = {degrees} = {ranks} does not divide the world size {world_size}"
            fix = f"start a multiple of {ranks} processes (--nproc, trainer.workers)"
            yield f"{key}: {why}; {fix} or lower a degree"
    yield from rule_problems(rules.PARALLEL, p, f"{key}.")
    if p.pipeline_split is not None and p.pp > 1 and len(p.pipeline_split) != p.pp * p.vpp:
        fix = f"give one number per chunk of layers, for {key}.pp*vpp = {p.pp}*{p.vpp} chunks"
        yield f"{key}.pipeline_split={p.pipeline_split}: {fix}"


def lora_problems(key: str, cfg: LoRAConfig) -> Iterator[str]:
    """Yields problems of an engine's adapters, but for the module names: models.lora checks
    these."""
    yield from rule_problems(rules.LORA, cfg, f"{key}.")
    if ALL_LINEAR in cfg.target_modules and len(cfg.target_modules) > 1:
        yield f"{key}.target_modules={cfg.target_modules}: {ALL_LINEAR} stands alone"
    if cfg.adapter_path and not (Path(cfg.adapter_path) / "adapter_config.json").is_file():
        fix = "name a PEFT directory, or leave it empty"
        yield f"{key}.adapter_path={cfg.adapter_path}: no adapter_config.json there; {fix}"


def optimizer_problems(key: str, cfg: OptimizerConfig) -> Iterator[str]:
    """Yields optimizer options that need another option, and options that megatron-core lacks."""
    yield from rule_problems(rules.OPTIMIZER, cfg, f"{key}.")
    if cfg.warmup_steps > 1 and cfg.warmup_steps % 1:
        yield f"{key}.warmup_steps={cfg.warmup_steps}: write whole steps, or a fraction below 1"
    for name, value in cfg.options.items():
        declared = _fields_of_megatron()
        option = f"{key}.options.{name}={show(value)}"
        if name in _SET_BY_KEYS:
            yield f"{option}: a key of {key}, or the engine's dtype, sets it; leave it out"
        elif declared and name not in declared:
            near = difflib.get_close_matches(name, declared, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            yield f"{option}: megatron-core's OptimizerConfig has no such field{meant}"
        elif name in _STATE_DTYPES and value not in ("float32", "bfloat16", "float16"):
            yield f"{option}: not one of float32, bfloat16, float16"
        elif name in _STATE_DTYPES and value != "float32" and not cfg.options.get(_PRECISE):
            yield f"{option}: needs {key}.options.{_PRECISE}=true"
        elif type(value) not in _TAKES.get(declared.get(name, ""), (type(value),)):
            yield f"{option}: not of type {declared[name]}"


@cache
def _fields_of_megatron() -> dict[str, str]:
    """Returns the type of each field of megatron-core's OptimizerConfig as its source has it, since
    to import it takes seconds; nothing where it is not installed."""
    spec = find_spec("megatron")
    places = (spec.submodule_search_locations if spec else None) or ()
    files = [Path(p) / "core/optimizer/optimizer_config.py" for p in places]
    texts = (f.read_text(encoding="utf-8") for f in files if f.is_file())
    return {
        ast.unparse(node.target): ast.unparse(node.annotation)
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.AnnAssign)
    }


def actor_problems(cfg: PPOActorConfig) -> Iterator[str]:
    """Yields a line for each contradiction in the section `actor`."""
    yield from rule_problems(rules.ACTOR, cfg, "actor.")


def check_actor(cfg: PPOActorConfig, temperature: float) -> None:
    """Raises ConfigError, a ValueError, with everything that is wrong with an actor's settings."""
    sampled = f"temperature={temperature}: training needs sampled tokens; set it above 0"
    raise_if_any(
        [*section_problems(cfg, "actor."), *actor_problems(cfg), *([sampled] * (temperature <= 0))]
    )


def check_critic(cfg: PPOCriticConfig) -> None:
    """Raises ConfigError, a ValueError, with everything that is wrong with a critic's settings."""
    raise_if_any(section_problems(cfg, "critic."))


def section_problems(cfg: Any, key: str = "") -> list[str]:
    """Returns what is wrong with the values of a section and with its free options; `key` is its
    name, with a dot."""
    return [*value_problems(cfg, key), *free_problems(cfg, key)]


def free_problems(cfg: Any, key: str = "") -> Iterator[str]:
    """Yields what the free options of a section, or of a whole configuration, have that their
    targets do not take."""
    for free in all_keys(type(cfg), parent=cfg):
        if free.options_of is not None and free.default:
            target = load_object(free.options_of.target, what=free.name)
            problems = list(option_problems(target, free.default, key=key + free.name))
            try:
                if not problems:
                    target(**free.default)
            except ConfigError as e:
                problems = list(e.problems)
            yield from problems


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DATA_SUFFIXES = (".parquet", ".jsonl", ".json")
_PLAIN = re.compile(r"\w[\w-]*")
HUB = "hub://"


def data_problems(cfg: BaseConfig) -> Iterator[str]:
    """Yields the problems of a recipe's data sets and of its tokenizer."""
    yield from _training_problems("train_dataset", cfg.train_dataset)
    yield from _name_problems("valid_datasets", cfg.valid_datasets)
    for name, data in held_out_sets(cfg).items():
        key = held_out_key(name)
        yield from rule_problems(rules.HELD_OUT, data, f"{key}.")
        yield from _source_problems(key, data) if data.type != MIX else ()
    yield from _workflow_problems(cfg) if isinstance(cfg, GRPOConfig) else ()
    path = cfg.tokenizer_path
    if path and not Path(path).is_dir() and not looks_like_hub_name(path):
        yield f"tokenizer_path={path}: no such directory"
    if template := cfg.chat_template:
        try:
            Path(template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            why = e.strerror if isinstance(e, OSError) else "not UTF-8"
            yield f"chat_template={template}: {why}; name a Jinja file"


def _workflow_problems(cfg: GRPOConfig) -> Iterator[str]:
    for key, data in sources(cfg).items():
        try:
            workflow_of(cfg.rollout.workflow, data)
        except ValueError as e:
            yield f"{key}.{e}"


def _name_problems(key: str, names: Iterable[str]) -> Iterator[str]:
    """Yields a line for each name of a data set that cannot be part of a metric's name."""
    for name in names:
        if not _PLAIN.fullmatch(name):
            yield f"{key}.{name}: name data sets in letters, digits, '_' and '-'"


def _training_problems(key: str, cfg: DatasetConfig) -> Iterator[str]:
    yield from rule_problems(rules.DATASET, cfg, f"{key}.")
    if (cfg.type == MIX) != bool(cfg.parts):
        why = "type=mix draws from its parts, name each with type and weight; others have none"
        yield f"{key}.type={cfg.type} with {len(cfg.parts)} {key}.parts: {why}"
    elif not cfg.parts:
        yield from _source_problems(key, cfg)
    else:
        yield from _name_problems(f"{key}.parts", cfg.parts)
        plain = SourceConfig(type=MIX)
        for field in fields(SourceConfig):  # keys of the whole would do nothing
            if getattr(cfg, field.name) != getattr(plain, field.name):
                yield f"{key}.{field.name}: with type=mix set it in each of {key}.parts"
        for name, part in cfg.parts.items():
            if part.type == MIX:
                yield f"{key}.parts.{name}.type=mix: a part is of one type; name those of it here"
            yield from _source_problems(f"{key}.parts.{name}", part)


def _source_problems(key: str, cfg: SourceConfig) -> Iterator[str]:
    """Yields the problems of the path, the files and the split of a data set."""
    yield from rule_problems(rules.SOURCE, cfg, f"{key}.")
    for file in cfg.files:
        if not Path(file).is_file():
            yield f"{key}.files: {file}: no such file"
    if cfg.type in (*GENERATED, MIX) or is_import_path(cfg.type) or cfg.files:
        return
    if not cfg.path:
        why = f"{key}.type={cfg.type} needs a hub name (openai/gsm8k), a path or {key}.files"
        yield f"{key}.path is empty: {why}"
    elif not Path(cfg.path).exists() and not looks_like_hub_name(cfg.path):
        yield f"{key}.path={cfg.path}: no such file or directory"


def reward_problems(key: str, cfg: SourceConfig) -> Iterator[str]:
    """Yields a line where a data set for RL has no reward."""
    if isinstance(cfg, DatasetConfig) and cfg.parts:
        for name, part in cfg.parts.items():
            yield from reward_problems(f"{key}.parts.{name}", part)
    elif not cfg.reward.type and cfg.type not in WITH_REWARD:
        fix = "name pkg.module:function, or none where a reward model or the workflow judges"
        yield f"{key}.reward is empty: {key}.type={cfg.type} brings no reward; {fix}"


def looks_like_hub_name(path: str) -> bool:
    """Returns whether `path` reads as `name` or `owner/name` without a file suffix of ours, with
    hub:// before it or not."""
    path = path.removeprefix(HUB)
    return bool(_HUB_NAME.fullmatch(path)) and not path.endswith(_DATA_SUFFIXES)


def model_path_problems(key: str, path: str) -> Iterator[str]:
    """Yields the problems of a local HF directory, except missing weights (`check_weights`)."""
    folder = Path(path)
    if not path:
        yield f"{key} is empty: set it to a HF model directory"
    elif not folder.is_dir():
        hub = looks_like_hub_name(path) and "/" in path
        fix = f"; download it first: hf download {path} --local-dir DIR" if hub else ""
        yield f"{key}={path}: no such directory{fix}"
    elif not (folder / "config.json").is_file() and (folder / "adapter_config.json").is_file():
        fix = f"name its base model, and this in {key.removesuffix('path')}lora.adapter_path"
        yield f"{key}={path}: holds a PEFT adapter, not a model; {fix}"
    elif not (folder / "config.json").is_file():
        yield f"{key}={path}: has no config.json, so it is not a HF model directory"


def generation_problems(key: str, g: GenerationHyperparameters) -> Iterator[str]:
    """Yields the problems of one section of sampling parameters; `key` is its name."""
    yield from rule_problems(rules.GENERATION, g, f"{key}.")
    if "" in g.stop:
        yield f"{key}.stop={g.stop}: an empty text would end every answer at once; leave it out"


def kv_problems(rollout: RolloutConfig, weight_sync: WeightSyncConfig) -> Iterator[str]:
    """Yields why servers cannot treat their KV caches so at an update; not what depends on the
    kind of server."""
    yield from rule_problems(rules.KV, SimpleNamespace(rollout=rollout, weight_sync=weight_sync))


def rollout_problems(cfg: GRPOConfig) -> Iterator[str]:
    """Yields the problems of sampling, servers, the client and a built-in transport."""
    yield from generation_problems("gconfig", cfg.gconfig)
    yield from generation_problems("eval_gconfig", cfg.eval_gconfig)
    yield from _address_problems(cfg)
    yield from _worker_problems(cfg)
    yield from rule_problems(rules.KV, cfg)
    yield from turn_problems(cfg)
    yield from _server_problems(cfg.server, "server")
    yield from _context_problems(cfg)
    yield from _judge_problems(cfg)
    if (built_in := built_in_transport(cfg.weight_sync.type)) is not None:
        yield from transport_problems(cfg, built_in.requirements)
    yield from sync_problems(cfg.weight_sync)


def sync_problems(sync: WeightSyncConfig, key: str = "weight_sync") -> Iterator[str]:
    """Yields the options of a sync that its transport has no use for; `key` is its section."""
    built_in, options = built_in_transport(sync.type), sync.options
    for name, values in _LESS.items():
        if built_in and not built_in.requirements.less and options.get(name) in values:
            yield f"{key}.options.{name}={options[name]}: needs type=distributed"


def _address_problems(cfg: GRPOConfig) -> Iterator[str]:
    r = cfg.rollout
    listed = {f"rollout.{key}": getattr(r, key) for key in ("addresses", "reward_addresses")}
    if isinstance(cfg, DistillConfig):
        listed["teacher.addresses"] = cfg.teacher.addresses
    if r.addresses_file:
        try:
            listed["rollout.addresses_file"] = addresses_in(r.addresses_file)
        except (OSError, UnicodeDecodeError) as e:
            fix = "make the file, it may be empty at first"
            yield f"rollout.addresses_file={r.addresses_file}: cannot be read: {e}; {fix}"
    for key, addresses in listed.items():
        for address in addresses:
            try:
                is_address = 0 < split_address(address)[1] < 65536
            except ValueError:
                is_address = False
            if not is_address:
                yield f"{key}: {address!r} is not host:port, like 127.0.0.1:30000"


def _worker_problems(cfg: GRPOConfig) -> Iterator[str]:
    r = cfg.rollout
    port = r.gateway.get("port", 0)
    if isinstance(port, int) and 65535 - r.workers < port <= 65535:
        why = f"the rollout.workers={r.workers} workers take the ports behind it, up to 65535"
        yield f"rollout.gateway.port={port}: {why}; use a lower one, or 0 for free ones"
    batches = r.max_head_offpolicyness + 1
    in_flight = r.max_concurrent_rollouts or cfg.train_dataset.batch_size * batches
    if r.workers > in_flight:
        why = "the others would have none to run; use about one worker for each core that is free"
        yield f"rollout.workers={r.workers}: at most {in_flight} episodes are in flight, so {why}"


def transport_problems(cfg: GRPOConfig, needs: Requirements) -> Iterator[str]:
    """Yields the settings of `cfg` that do not go with a transport that has these needs."""
    r, sync, server = cfg.rollout, cfg.weight_sync, cfg.server
    key = f"weight_sync.type={sync.type}"
    if needs.shares_devices and r.addresses and not any(map(is_here, r.addresses)):
        fix = "use weight_sync.type=distributed or disk"
        yield f"{key}: none of rollout.addresses is on this machine; {fix}"
    if server.dp > 1 and (needs.adapters or not needs.directory):
        why = f"SGLang takes no adapters, and weights only from disk, with server.dp={server.dp}"
        fix = f"weight_sync.type=disk, or server.count={server.count * server.dp} with server.dp=1"
        yield f"{key}: {why}; use {fix}"
    if needs.less:
        yield from rule_problems(rules.SYNC, cfg)
    if not needs.adapters:
        return
    yield from rule_problems(rules.ADAPTERS, cfg)
    if server.path and server.path != cfg.actor.path:
        yield f"{key}: servers must start from the model below the adapters; leave server.path out"


def _judge_problems(cfg: GRPOConfig) -> Iterator[str]:
    """Yields the problems of the judge's servers, and the data sets whose judge is nowhere."""
    if cfg.judge is not None:
        yield from _server_problems(cfg.judge, "judge")
        return
    for key, data in sources(cfg).items():
        parts = data.reward.options.get("parts")
        own: dict[str, Any] = parts if isinstance(parts, dict) else {}
        rewards = {"": vars(data.reward)} | {f".options.parts.{n}": own[n] for n in own}
        for where, reward in rewards.items():
            reward = reward if isinstance(reward, dict) else {"type": reward}
            named = (reward.get("options") or {}).get("base_url")
            if reward.get("type") == "judge" and not named:
                fix = "set its option base_url, or have the launcher start one by judge.path"
                yield f"{key}.reward{where}=judge: nothing says which server judges; {fix}"


# options of servers -> the key of their section that gives them: the same, or another
_SAME = ("dtype", "context_length", "max_running_requests", "tp", "nnodes", "deterministic")
_OF_KEYS = {name: name for name in (*_SAME, "threads")} | {
    "model_path": "path",
    "tp_size": "tp",
    "tensor_parallel_size": "tp",
    "enable_deterministic_inference": "deterministic",
}


def _server_problems(s: ServerConfig, key: str) -> Iterator[str]:
    """Yields the problems of how servers run; `key` is their section."""
    yield from rule_problems(rules.SERVER, s, f"{key}.")
    for name, value in s.options.items():
        if value and (own := _OF_KEYS.get(name.replace("-", "_"))) is not None:
            yield f"{key}.options.{name}={show(value)}: the server has it of a key; set {key}.{own}"
    if s.path:
        yield from model_path_problems(f"{key}.path", s.path)
    if s.python and not Path(s.python).is_file():
        yield f"{key}.python={s.python}: no such interpreter"


def _context_problems(cfg: GRPOConfig) -> Iterator[str]:
    """Yields a line for each data set whose prompts with their answers exceed the servers' room."""
    room = cfg.server.context_length
    for key, data in datasets(cfg).items():
        of = "gconfig" if key == "train_dataset" else "eval_gconfig"
        longest = getattr(cfg, of).max_new_tokens
        if data.max_length is not None and longest < room < data.max_length + longest:
            need = f"{key}.max_length + {of}.max_new_tokens = {data.max_length}+{longest}"
            yield f"server.context_length={room}: smaller than {need}"
