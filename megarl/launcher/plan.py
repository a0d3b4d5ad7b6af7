"""Reads a launcher's command line and checks everything it names; starts nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megarl.config.command_line import CommandLine
from megarl.config.compose import Word, parse_overrides
from megarl.config.container import check_fileroot
from megarl.config.errors import ConfigError, raise_if_any
from megarl.config.loader import config_yaml, own_class
from megarl.config.presets import AllocationMode
from megarl.config.recipe_engines import needs_servers, settle_turns, takes_turns, trainer_processes
from megarl.config.recipes import BaseConfig, GRPOConfig
from megarl.config.rollout import Requirements, ServerConfig
from megarl.config.run import RewardPoolConfig
from megarl.config.script import fetch_hub_models
from megarl.config.secrets import masked_override
from megarl.launcher.job import JUDGE, PACKAGE, SERVER
from megarl.launcher.placement import Placement, Servers, place, place_here
from megarl.trainer.preflight import check_recipe
from megarl.trainer.user_code import read_config, transport_needs
from megarl.utils.env import uses_gpus, visible_gpus
from megarl.utils.extras import install_hint

ASK_TIMEOUT = 180.0  # seconds an interpreter may take to import torch
_ASK_NCCL = "import torch; print(*torch.cuda.nccl.version(), sep='.')"
_ASK_SGLANG = "from importlib.metadata import version; print(version('sglang'))"
MOVED = "MEGARL_SECRET_"  # variables with the secrets that were typed as overrides


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Says what a command line asks for; all of it has been checked."""

    cfg: BaseConfig
    script: Path
    arguments: tuple[str, ...]  # of the script
    nproc: int
    placement: Placement = field(default_factory=Placement)
    needs: Requirements = field(default_factory=Requirements)  # of the transport of weights
    # what trainers read in place of a file: models as they were named, of the hub or not. Empty
    # where the launcher has not seen all that they will
    config: str = ""

    @property
    def own(self) -> bool:
        """Returns whether the script is megarl/run.py; another may have keys of its own."""
        return self.script.parent == PACKAGE

    @property
    def import_path(self) -> list[str]:
        """Returns what `python script.py` puts in front of the import path, nothing for our own."""
        return _import_path(self.script)

    @property
    def colocated(self) -> bool:
        """Returns whether the configuration puts the servers on the trainers' devices."""
        mode = self.cfg.allocation_mode
        return self.needs.shares_devices or bool(mode and AllocationMode.from_str(mode).colocated)

    @property
    def reward_nodes(self) -> int:
        """Returns how many nodes the launcher starts reward workers on."""
        cfg, pool = self.cfg, self.cfg.cluster.reward_pool
        needed = isinstance(cfg, GRPOConfig) and not cfg.rollout.reward_addresses
        return RewardPoolConfig(**pool).n_nodes if needed and pool is not None else 0


def plan_here(command: CommandLine) -> Plan:
    """Returns the plan for this machine's GPUs. Raises ConfigError for what is wrong."""
    plan = _read(command)
    sections = server_sections(plan.cfg)
    nodes = {"cluster.n_nodes": plan.cfg.cluster.n_nodes}
    nodes |= {f"{key}.nnodes": server.nnodes for key, server in sections.items()}
    further = [f"{key}={count}" for key, count in nodes.items() if count not in (None, 1)]
    if plan.reward_nodes:
        further.append("cluster.reward_pool")
    why = "this launcher has one machine; leave it out, or use megarl.launcher.slurm or ray"
    raise_if_any(f"{key}: {why}" for key in further)
    gpus = len(visible_gpus(os.environ))
    if not gpus and os.environ.get("MEGARL_DEVICE") == "cuda":
        raise ConfigError("MEGARL_DEVICE=cuda: this machine has no GPU; set cpu, or unset it")
    placement = place_here(gpus, trainers=plan.nproc, servers=_wanted(plan))
    return _placed(plan, placement)


def plan_cluster(command: CommandLine) -> Plan:
    """Returns the plan for the nodes that `cluster` describes. Raises ConfigError for what is
    wrong."""
    plan = _read(command)
    placement = place(
        plan.cfg.cluster,
        trainers=plan.nproc,
        servers=_wanted(plan),
        reward_nodes=plan.reward_nodes,
        on_gpus=uses_gpus(os.environ),
    )
    return _placed(plan, placement)


def server_sections(cfg: BaseConfig) -> dict[str, ServerConfig]:
    """Returns the sections of servers that a launcher starts, by key, the policy's first."""
    if not isinstance(cfg, GRPOConfig):
        return {}
    return {SERVER: cfg.server} | ({JUDGE: cfg.judge} if cfg.judge else {})


def _read(command: CommandLine) -> Plan:
    """Returns the plan without its placement."""
    script = PACKAGE / "run.py"
    if command.words and command.words[0].endswith(".py"):
        script = Path(command.words.pop(0))
        if not script.is_file():
            raise ConfigError(f"{script}: no such script")
    config, own = command.options.get("config"), script.parent == PACKAGE
    typed = list(_without_secrets(command.overrides))
    overrides = [*command.words, *typed]
    cfg = read_config(config, overrides, foreign=not own, path=_import_path(script))
    nproc = _nproc(command.options.get("nproc"), cfg)
    if cfg.trainer.mode == "controller":
        cfg.trainer.workers = nproc
    whole = own and own_class(config, overrides) is None and not cfg.cluster.container
    text = config_yaml(cfg) if whole else ""
    fetch_hub_models(cfg, weights=command.switches.isdisjoint(("check", "dry-run")))
    check_fileroot(cfg)
    check_recipe(cfg, nproc, own_script=not own, launcher=True)
    rl = cfg if isinstance(cfg, GRPOConfig) else None
    return Plan(
        cfg=cfg,
        script=script,
        arguments=(*(["--config", config] if config else []), *typed),
        nproc=nproc,
        needs=transport_needs(rl, _import_path(script)) if rl else Requirements(),
        config=text,
    )


def _without_secrets(overrides: Sequence[str]) -> Iterator[str]:
    """Yields overrides whose secrets have moved to the environment, which processes of the job get:
    everybody on a machine reads command lines. Numbers, booleans and null stay, since a variable is
    text. Raises ConfigError for a secret within a section, or beside an interpolation."""
    problems: list[str] = []
    parsed = parse_overrides(overrides, problems)
    raise_if_any(problems)
    for override, (_, key, value) in zip(overrides, parsed, strict=True):
        plain = value.untyped() if isinstance(value, Word) else value
        if masked_override(override) == override or not isinstance(plain, str | dict | list):
            yield override
            continue
        if not isinstance(plain, str) or "${" in plain:
            fix = "set it alone, by its own key, or as ${oc.env:NAME}"
            raise ConfigError(f"{key}: holds a secret; {fix}")
        name = MOVED + re.sub(r"\W", "_", key).upper()
        os.environ[name] = plain
        yield f"{key}=${{oc.env:{name}}}"


def _import_path(script: Path) -> list[str]:
    return [] if script.parent == PACKAGE else [str(script.resolve().parent)]


def _nproc(given: str | None, cfg: BaseConfig) -> int:
    if given is None:
        return trainer_processes(cfg)
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"--nproc {given}: a number of processes")
    workers = cfg.trainer.workers
    if workers is not None and workers != int(given):
        raise ConfigError(f"--nproc {given} with trainer.workers={workers}: leave one out")
    return int(given)


def _wanted(plan: Plan) -> list[Servers]:
    """Returns the servers that the launcher starts."""
    cfg = plan.cfg
    if not isinstance(cfg, GRPOConfig):
        return []
    elsewhere = cfg.rollout.addresses or not needs_servers(cfg)
    return [
        Servers(
            key=key,
            count=0 if key == SERVER and elsewhere else server.count,
            gpus=server.gpus,
            nnodes=server.nnodes if server.dp == 1 else 1,  # SGLang's replicas share a node
            around=plan.nproc if key == SERVER and plan.colocated else 0,
        )
        for key, server in server_sections(cfg).items()
    ]


def _placed(plan: Plan, placement: Placement) -> Plan:
    cfg, scheduler = plan.cfg, plan.cfg.trainer.scheduler
    if cfg.trainer.mode == "controller" and scheduler != "local":
        fix = "leave it out, or start python -m megarl.run, with rollout.addresses"
        raise ConfigError(f"trainer.scheduler={scheduler}: the launcher places trainers; {fix}")
    if isinstance(cfg, GRPOConfig):
        started = bool(placement.servers[SERVER]) and needs_servers(cfg)
        settle_turns(cfg, shared=plan.own and started and (placement.shared or plan.colocated))
        check_devices(cfg, placement, plan.needs)
    return replace(plan, placement=placement)


def check_devices(cfg: GRPOConfig, placement: Placement, needs: Requirements) -> None:
    """Raises ConfigError where trainers and the launcher's servers cannot work as they are placed.
    needs: those of the transport of weights.
    """
    streamed = needs.process_group
    if placement.shared and streamed:
        why = "servers and trainers would share GPUs, and NCCL connects no two processes on one GPU"
        fix = "use weight_sync.type=colocated or disk, or a smaller --nproc or server.count"
        raise ConfigError(f"weight_sync.type={cfg.weight_sync.type}: {why}; {fix}")
    sglang = cfg.server.type == "sglang"
    bounded = any(a.startswith("--mem-fraction") for a in cfg.server.arguments)
    if placement.shared and sglang and not bounded and not takes_turns(cfg):
        why = "servers and trainers share GPUs, and SGLang keeps most of a GPU's memory"
        fix = "set server.options.mem_fraction_static=0.3, or server.release_memory=true"
        raise ConfigError(f"{why}; {fix}")
    if cfg.cluster.container:  # whose interpreters are not here
        return
    on_gpus = placement.trainers[0].gpus is not None and bool(placement.servers[SERVER])
    python = os.path.abspath(cfg.server.python) if cfg.server.python else sys.executable
    if on_gpus and streamed and sglang and python != os.path.abspath(sys.executable):
        check_nccl(sys.executable, cfg.server.python)


def check_sglang(plan: Plan) -> None:
    """Raises ConfigError naming each section whose SGLang servers would start on this machine by an
    interpreter that does not have SGLang."""
    raise_if_any(
        f"{key}.type=sglang: {python} does not have the package sglang; install it "
        f"({install_hint('sglang')}), name an interpreter that has it in {key}.python, or set "
        f"{key}.type=embedded"
        for key, server in server_sections(plan.cfg).items()
        if server.type == "sglang" and plan.placement.servers.get(key)
        if not plan.cfg.cluster.container
        if sglang_version(python := server.python or sys.executable) is None
    )


def check_nccl(trainers: str, servers: str) -> None:
    """Raises ConfigError unless torch has one NCCL version in both interpreters."""
    with ThreadPoolExecutor() as pool:
        version, other = pool.map(_nccl_version, (trainers, servers))
    if version != other:
        why = f"server.python={servers} has NCCL {other} and the trainers' {trainers} has NCCL"
        fix = "install one torch in both, or use weight_sync.type=disk"
        raise ConfigError(f"{why} {version}: only equal versions connect; {fix}")


def _nccl_version(python: str) -> str:
    try:
        return _printed(python, _ASK_NCCL)
    except (OSError, subprocess.SubprocessError, IndexError) as e:
        why = (str(getattr(e, "stderr", None) or e).strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"{python}: cannot tell the NCCL version of its torch: {why}") from e


def sglang_version(python: str) -> str | None:
    """Returns the version of SGLang that an interpreter has; None if it has none."""
    try:
        return _printed(python, _ASK_SGLANG)
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def _printed(python: str, code: str) -> str:
    """Returns the last line that `python -c code` prints."""
    how: Any = {"capture_output": True, "text": True, "timeout": ASK_TIMEOUT, "check": True}
    done = subprocess.run([python, "-c", code], stdin=subprocess.DEVNULL, **how)
    return str(done.stdout).strip().splitlines()[-1]
