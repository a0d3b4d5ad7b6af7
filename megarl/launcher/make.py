"""Makes the records of a job from its plan: what each process runs, where, and with what."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from megarl.config.engine import TrainEngineConfig
from megarl.config.loader import run_dir
from megarl.config.recipe_engines import uses_block_fp8
from megarl.config.recipes import GRPOConfig, sources
from megarl.config.rollout import ServerConfig
from megarl.config.secrets import environment_names
from megarl.config.servers import ADDRESSES_ENV, JUDGES_ENV
from megarl.config.turns import takes_turns
from megarl.launcher.job import (
    JUDGE,
    MASTER,
    REWARDS,
    SERVER,
    TRAINER,
    Job,
    Task,
    endpoint,
)
from megarl.launcher.placement import REWARD_POOL, SERVER_POOL, Seat
from megarl.launcher.plan import MOVED, Plan, server_sections
from megarl.rollout.server_process import python_path, release_flags, server_command
from megarl.rpc.nodes import LOOPBACK, MEETING, PACKAGE, TRAINERS, forwarded
from megarl.utils.env import (
    CONTROLS,
    set_loopback_default,
    set_memory_saver_defaults,
    set_nccl_default,
    set_sglang_defaults,
    set_trainer_defaults,
)
from megarl.utils.job_token import ENV as TOKEN

THREADS = "OMP_NUM_THREADS"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def make_job(plan: Plan, env: Mapping[str, str], *, cluster: bool = False) -> Job:
    """Returns the job of a plan. env: what processes have besides what their tasks set. cluster:
    nodes have addresses of their own, and every process but rank 0 has a log of its own."""
    cfg, maker = plan.cfg, _Maker(plan, env, cluster)
    moved = re.findall(rf"{MOVED}\w+", " ".join(plan.arguments))
    read = list(dict.fromkeys([*environment_names(cfg), *moved]))
    patience = max((s.start_timeout for s in server_sections(cfg).values()), default=0.0)
    return Job(
        name=f"{cfg.experiment_name}/{cfg.trial_name}",
        config=plan.config,
        directory=str(run_dir(cfg)),
        working_directory=os.getcwd(),
        pools=plan.placement.pools,
        gpus_per_node=tuple(_gpus_of(plan, pool) for pool in plan.placement.pools),
        interface=cfg.cluster.interface if cluster else "",
        tasks=(*maker.servers(), *maker.rewards(), *maker.trainers()),
        forwarded=tuple(
            sorted({*forwarded(env, [*cfg.cluster.forward_env, *read]), *moved, TOKEN})
        ),
        hidden=tuple(read),
        python=maker.python,
        container=cfg.cluster.container,
        container_mounts=tuple(cfg.cluster.container_mounts),
        start_timeout=patience,
        rendezvous_timeout=cfg.cluster.rendezvous_timeout,
        grace=cfg.recover.grace,
        restarts=cfg.recover.restarts,
    )


def server_env(gpus: str | None, env: Mapping[str, str], *, here: bool = True) -> dict[str, str]:
    """Returns the variables of a server's environment that `env` lacks or has otherwise. gpus: its
    CUDA_VISIBLE_DEVICES. here: all of the job is on this machine."""
    changed = dict(env)
    if here:
        set_loopback_default(changed)
    set_nccl_default(changed)
    if gpus is not None or env.get("MEGARL_DEVICE") == "cpu":
        changed["CUDA_VISIBLE_DEVICES"] = gpus or ""
    return _new(changed, env)


def _gpus_of(plan: Plan, pool: str) -> int:
    cluster, placed = plan.cfg.cluster, plan.placement
    if pool == REWARD_POOL or all(seat.gpus is None for seat in placed.trainers):
        return 0
    other = cluster.server_pool if pool == SERVER_POOL else None
    return other.n_gpus_per_node if other else cluster.n_gpus_per_node


def _new(env: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if before.get(k) != v}


class _Maker:
    """Makes the tasks of a plan."""

    def __init__(self, plan: Plan, env: Mapping[str, str], cluster: bool) -> None:
        self.plan, self.env, self.cluster = plan, env, cluster
        self.python = (plan.cfg.cluster.python if cluster else "") or sys.executable
        cfg, placed = plan.cfg, plan.placement
        self.run = run_dir(cfg)
        asynchronous = isinstance(cfg, GRPOConfig) and cfg.rollout.max_head_offpolicyness > 0
        seats = [s for servers in placed.servers.values() for server in servers for s in server]
        of_servers = Counter(s.node for s in seats)
        of_trainers = Counter(s.node for s in placed.trainers)
        # servers and trainers of a synchronous run take turns with the cores
        both = of_servers + of_trainers
        self.sharing = {
            SERVER: both if asynchronous else of_servers,
            TRAINER: both if asynchronous else of_trainers,
        }
        self.local_ranks = of_trainers

    def servers(self) -> Iterable[Task]:
        for key, server in server_sections(self.plan.cfg).items():
            for index, seats in enumerate(self.plan.placement.servers[key]):
                for part, seat in enumerate(seats):
                    yield self._server(key, server, index, part, len(seats), seat)

    def _server(
        self, key: str, server: ServerConfig, index: int, part: int, parts: int, seat: Seat
    ) -> Task:
        own, init = endpoint(key, index, part), f"{endpoint(key, index)}.init"
        cfg, on_gpus = self.plan.cfg, seat.gpus is not None
        model, releases = TrainEngineConfig(), []  # a judge has a model of its own
        if key == SERVER and isinstance(cfg, GRPOConfig):
            model = cfg.actor
            if takes_turns(cfg):
                keeps = self.plan.keeps_weights
                releases = release_flags(server, on_gpus=on_gpus, keeps_weights=keeps)
        dtype = model.dtype if model.dtype != "auto" else "bfloat16" if on_gpus else "float32"
        command = server_command(
            server,
            model_path=model.path,
            override_config=model.override_config,
            dtype=dtype,
            host=f"@{{host:{own}}}",
            port=f"@{{port:{own}}}",
            with_key=True,
            python=self.python,
            routes=model.moe.router_replay == "rollout",
            releases=releases,
        )
        if parts > 1:
            command += ["--nnodes", str(parts), "--node-rank", str(part)]
            command += ["--dist-init-addr", f"@{{address:{init}}}"]
        env = {**self.env, **self._common(), **self._threads(SERVER, seat.node, server.threads)}
        env |= server_env(seat.gpus, env, here=not self.cluster)
        if server.type == "sglang":
            set_sglang_defaults(env)
        if "--enable-memory-saver" in releases:
            set_memory_saver_defaults(env)
        env["PYTHONPATH"] = python_path(server, self.env.get("PYTHONPATH"), PACKAGE)
        return Task(
            role=key,
            index=index,
            part=part,
            node=seat.node,
            gpus=seat.gpus,
            command=tuple(command),
            env=_new(env, self.env),
            ports=(own, *((init,) if parts > 1 and part == 0 else ())),
            log=str(self.run / (f"{key}_{index}" + (f"_node{part}" if part else "") + ".log")),
            restarts=server.restarts,
        )

    def rewards(self) -> Iterable[Task]:
        cfg = self.plan.cfg
        if not isinstance(cfg, GRPOConfig):
            return
        path = [self._import_path(), *self.plan.import_path, *_folders(cfg)]
        for index, seat in enumerate(self.plan.placement.rewards):
            own = endpoint(REWARDS, index)
            command = [
                *(self.python, "-m", "megarl.launcher.rewards"),
                *("--host", f"@{{host:{own}}}", "--port", f"@{{port:{own}}}"),
                *("--workers", str(cfg.rollout.reward_workers)),
                *("--timeout", f"{cfg.rollout.reward_timeout:g}"),
            ]
            yield Task(
                role=REWARDS,
                index=index,
                node=seat.node,
                gpus=None,
                command=tuple(command),
                env={"PYTHONPATH": _path(*path), "CUDA_VISIBLE_DEVICES": ""},
                ports=(own,),
                log=str(self.run / f"rewards_{index}.log"),
                restarts=cfg.cluster.reward_pool.restarts if cfg.cluster.reward_pool else 0,
            )

    def trainers(self) -> Iterable[Task]:
        plan = self.plan
        addresses = [
            f"@{{address:{endpoint(SERVER, i)}}}"
            for i in range(len(plan.placement.servers.get(SERVER, ())))
        ]
        arguments = ["--checked"] if plan.config else list(plan.arguments)
        if addresses:
            arguments.append(f"rollout.addresses=[{','.join(addresses)}]")
            if isinstance(plan.cfg, GRPOConfig) and takes_turns(plan.cfg):
                arguments.append("server.release_memory=true")
        if rewards := [f"@{{address:{task.endpoint}}}" for task in self.rewards()]:
            arguments.append(f"rollout.reward_addresses=[{','.join(rewards)}]")
        controlled, apart = plan.cfg.trainer.mode == "controller", len(self.local_ranks) > 1
        if controlled:
            yield self._controller(arguments, addresses, meets=apart)
            if not apart:  # it starts them itself
                return
        first: dict[int, int] = {}  # rank on each node
        for rank, seat in enumerate(plan.placement.trainers):
            local = rank - first.setdefault(seat.node, rank)
            command = (self.python, str(plan.script), *arguments)
            log = f"trainer_{rank}.log" if self.cluster and rank else ""
            if controlled:
                meet = ("--meet", f"@{{address:{MASTER}}}", "--index", str(rank))
                command = (self.python, "-m", "megarl.rpc.worker", *meet)
                log = f"{TRAINERS}_{rank}.log"
            yield Task(
                role=TRAINER,
                index=rank,
                node=seat.node,
                gpus=seat.gpus,
                command=command,
                env=self._trainer_env(
                    self._rank_env(rank, local, len(first) - 1, seat), seat, addresses
                ),
                ports=(MASTER,) if rank == 0 and not controlled else (),
                log=str(self.run / "logs" / log) if log else "",
            )

    def _controller(self, arguments: list[str], addresses: list[str], *, meets: bool) -> Task:
        """Returns the process that has the GPUs of all trainers, and starts them; or meets them,
        where each is a process of the job."""
        seat, count = self.plan.placement.trainers[0], self.plan.nproc
        return Task(
            role=TRAINER,
            index=0,
            node=seat.node,
            gpus=seat.gpus,
            command=(
                *(self.python, str(self.plan.script), *arguments),
                f"trainer.workers={count}",
            ),
            env=self._trainer_env(
                {CONTROLS: "1", **({MEETING: f"@{{address:{MASTER}}}"} if meets else {})},
                seat,
                addresses,
            ),
            ports=(MASTER,) if meets else (),
            workers=count,
        )

    def _rank_env(self, rank: int, local: int, group: int, seat: Seat) -> dict[str, str]:
        """Returns what torchrun would set."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(self.plan.nproc),
            "LOCAL_WORLD_SIZE": str(self.local_ranks[seat.node]),
            "GROUP_RANK": str(group),
            "MASTER_ADDR": f"@{{host:{MASTER}}}",
            "MASTER_PORT": f"@{{port:{MASTER}}}",
        }

    def _trainer_env(
        self, own: Mapping[str, str], seat: Seat, addresses: list[str]
    ) -> dict[str, str]:
        """Returns `own`, the servers' addresses, its GPUs and its import path."""
        cfg = self.plan.cfg
        env = {**self.env, **self._common(), **self._threads(TRAINER, seat.node), **own}
        if addresses:
            env[ADDRESSES_ENV] = ",".join(addresses)
        if judges := self.plan.placement.servers.get(JUDGE):
            found = (f"@{{address:{endpoint(JUDGE, i)}}}" for i in range(len(judges)))
            env[JUDGES_ENV] = ",".join(found)
        if seat.gpus is not None:
            env["CUDA_VISIBLE_DEVICES"] = seat.gpus
        known = list(cfg.rollout.addresses) if isinstance(cfg, GRPOConfig) else []
        host = "elsewhere" if self.cluster else LOOPBACK
        set_trainer_defaults(
            env,
            servers=[*known, *(f"{host}:1" for _ in addresses)],
            block_fp8=uses_block_fp8(cfg),
        )
        env["PYTHONPATH"] = self._import_path()
        return _new(env, self.env)

    def _import_path(self) -> str:
        """Returns PYTHONPATH for scripts outside the package, and for the user's rewards."""
        return _path(str(PACKAGE.parent), self.env.get("PYTHONPATH"), os.getcwd())

    def _common(self) -> dict[str, str]:
        interface = self.plan.cfg.cluster.interface if self.cluster else ""
        return {k: interface for k in _INTERFACES if interface and k not in self.env}

    def _threads(self, role: str, node: int, own: int = 0) -> dict[str, str]:
        """Returns a process's share of its node's cores, `own` where that is not 0."""
        processes = self.sharing[role][node]
        if own:
            return {THREADS: str(own)}
        if THREADS in self.env or processes < 2:
            return {}
        return {THREADS: f"@{{cores:{processes}}}"}


def _folders(cfg: GRPOConfig) -> Iterable[str]:
    """Yields the folders of rewards that the configuration names by their files."""
    for data in sources(cfg).values():
        if (file := data.reward.type.partition(":")[0]).endswith(".py"):
            yield str(Path(file).resolve().parent)


def _path(*parts: str | None) -> str:
    return os.pathsep.join(p for p in parts if p)
