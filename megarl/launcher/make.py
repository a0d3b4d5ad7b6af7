"""Makes the records of a job from its plan: what each process runs, where, and with what."""

from __future__ import annotations

import os
import re
import sys
from collections import ChainMap, Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from megarl.config.engine import TrainEngineConfig
from megarl.config.loader import run_dir
from megarl.config.recipe_engines import ADDRESSES_ENV, JUDGES_ENV, takes_turns, uses_block_fp8
from megarl.config.recipes import GRPOConfig, sources
from megarl.config.rollout import ServerConfig
from megarl.config.secrets import environment_names
from megarl.launcher.job import (
    CONTROLLER,
    DRIVER,
    JUDGE,
    MASTER,
    MASTER_MARKS,
    PACKAGE,
    REWARDS,
    SERVER,
    TRAINER,
    Job,
    Task,
    endpoint,
    forwarded,
)
from megarl.launcher.placement import Seat
from megarl.launcher.plan import MOVED, Plan, server_sections
from megarl.rollout.server_process import python_path, release_flags, server_command
from megarl.rpc.group import LOOPBACK, ROLLOUT, TRAINERS
from megarl.rpc.worker import WorkerStart, rank_env
from megarl.utils.env import (
    CONTROLS,
    set_loopback_default,
    set_memory_saver_defaults,
    set_nccl_default,
    set_sglang_defaults,
    set_trainer_defaults,
)
from megarl.utils.env import JOB_TOKEN as TOKEN

THREADS = "OMP_NUM_THREADS"
REWARD_RESTARTS = 3  # of each reward worker, after which its death ends the run
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def make_job(plan: Plan, env: Mapping[str, str], *, cluster: bool = False) -> Job:
    """Returns the job of a plan. env: what processes have besides what their tasks set. cluster:
    nodes have addresses of their own, and every process but rank 0 has a log of its own."""
    cfg, maker = plan.cfg, _Maker(plan, env, cluster)
    moved = re.findall(rf"{MOVED}\w+", " ".join(plan.arguments))
    read = list(dict.fromkeys([*environment_names(cfg), *moved]))
    patience = cfg.rollout.setup_timeout if isinstance(cfg, GRPOConfig) else 0.0
    return Job(
        name=f"{cfg.experiment_name}/{cfg.trial_name}",
        config=plan.config,
        directory=str(run_dir(cfg)),
        working_directory=os.getcwd(),
        pools=plan.placement.pools,
        gpus_per_node=plan.placement.gpus_per_node,
        interface=cfg.cluster.interface if cluster else "",
        tasks=(*maker.servers(), *maker.rewards(), *maker.trainers()),
        forwarded=tuple(
            sorted({*forwarded(env, [*cfg.cluster.forward_env, *read]), *moved, TOKEN})
        ),
        hidden=(*read, TOKEN),
        python=maker.python,
        start_timeout=patience,
        rendezvous_timeout=cfg.collective_timeout,
        grace=cfg.recover.grace,
        restarts=cfg.recover.restarts,
    )


class _Maker:
    """Makes the tasks of a plan."""

    def __init__(self, plan: Plan, env: Mapping[str, str], cluster: bool) -> None:
        self.plan, self.env, self.cluster = plan, env, cluster
        self.python = (plan.cfg.cluster.python if cluster else "") or sys.executable
        self.worker = (self.python, "-m", "megarl.rpc.worker")
        cfg, placed = plan.cfg, plan.placement
        self.run = run_dir(cfg)
        self.processes = {
            SERVER: Counter(s.node for key in placed.servers.values() for row in key for s in row),
            TRAINER: Counter(seat.node for seat in placed.trainers),
        }
        # servers and trainers of a synchronous run take turns with the cores
        if isinstance(cfg, GRPOConfig) and cfg.rollout.max_head_offpolicyness > 0:
            both = self.processes[SERVER] + self.processes[TRAINER]
            self.processes = {SERVER: both, TRAINER: both}
        self.addresses = {
            key: [f"@{{address:{endpoint(key, i)}}}" for i, _ in enumerate(seats)]
            for key, seats in {**placed.servers, REWARDS: placed.rewards}.items()
        }

    def servers(self) -> Iterable[Task]:
        for key, server in server_sections(self.plan.cfg).items():
            for index, seats in enumerate(self.plan.placement.servers[key]):
                for part, seat in enumerate(seats):
                    yield self._server(key, server, index, part, len(seats), seat)

    def _server(
        self, key: str, server: ServerConfig, index: int, part: int, parts: int, seat: Seat
    ) -> Task:
        name, init = endpoint(key, index, part), f"{endpoint(key, index)}.init"
        cfg, on_gpus = self.plan.cfg, seat.gpus is not None
        model, releases = TrainEngineConfig(), []  # a judge has a model of its own
        if key == SERVER and isinstance(cfg, GRPOConfig):
            model = cfg.actor
            if takes_turns(cfg):
                keeps = self.plan.needs.adapters
                releases = release_flags(server, on_gpus=on_gpus, keeps_weights=keeps)
        dtype = model.dtype if model.dtype != "auto" else "bfloat16" if on_gpus else "float32"
        command = server_command(
            server,
            model_path=model.path,
            override_config=model.override_config,
            dtype=dtype,
            host=f"@{{host:{name}}}",
            port=f"@{{port:{name}}}",
            with_key=True,
            python=self.python,
            routes=model.router_replay == "rollout",
            releases=releases,
        )
        if parts > 1:
            command += ["--nnodes", str(parts), "--node-rank", str(part)]
            command += ["--dist-init-addr", f"@{{address:{init}}}"]
        env = self._base(SERVER, seat, server.threads)
        set_nccl_default(env)
        if not self.cluster:
            set_loopback_default(env)
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
            env=dict(env.maps[0]),
            ports=(name, *((init,) if parts > 1 and part == 0 else ())),
            log=str(self.run / (f"{key}_{index}" + (f"_node{part}" if part else "") + ".log")),
            restarts=server.restarts,
        )

    def rewards(self) -> Iterable[Task]:
        cfg = self.plan.cfg
        if not isinstance(cfg, GRPOConfig):
            return
        path = [self._import_path(), *self.plan.import_path, *_folders(cfg)]
        for index, seat in enumerate(self.plan.placement.rewards):
            name = endpoint(REWARDS, index)
            command = [
                *(self.python, "-m", "megarl.rollout.rewards.node"),
                *("--host", f"@{{host:{name}}}", "--port", f"@{{port:{name}}}"),
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
                ports=(name,),
                log=str(self.run / f"rewards_{index}.log"),
                restarts=REWARD_RESTARTS if cfg.cluster.reward_pool is not None else 0,
            )

    def trainers(self) -> Iterable[Task]:
        plan = self.plan
        words = ["--checked"] if plan.config else list(plan.arguments)
        keys = {SERVER: "rollout.addresses", REWARDS: "rollout.reward_addresses"}
        words += [
            f"{k}=[{','.join(addresses)}]" for r, k in keys.items() if (addresses := self.at(r))
        ]
        if self.at(SERVER) and isinstance(plan.cfg, GRPOConfig) and takes_turns(plan.cfg):
            words.append("server.release_memory=true")
        script = (self.python, str(plan.script), *words)
        controlled = plan.cfg.trainer.mode == "controller"
        seats = plan.placement.trainers
        nodes = [seat.node for seat in seats]
        for rank, seat in enumerate(seats):
            env = rank_env(rank, nodes, *MASTER_MARKS)
            command, log = script, f"trainer_{rank}.log" if self.cluster and rank else ""
            if controlled:
                command, env = self.worker, env | self._serves(TRAINERS, rank, len(seats))
                log = f"{TRAINERS}_{rank}.log" if rank else ""
            ports = (MASTER,) if rank == 0 else ()
            yield self._trainer(TRAINER, rank, seat, command, env, log=log, ports=ports)
        if not controlled:
            return
        aside = Seat(node=nodes[0], gpus="")
        env = {"MEGARL_DEVICE": "cpu", **self._serves(ROLLOUT, 0, 1)}
        yield self._trainer(DRIVER, 0, aside, self.worker, env)
        groups = TRAINERS, ROLLOUT
        places = (f"{group}=@{{address:{_starter(group)}}}" for group in groups)
        yield self._trainer(
            CONTROLLER,
            0,
            aside,
            (*script, f"trainer.workers={plan.nproc}"),
            {CONTROLS: ",".join(places)},
            ports=tuple(map(_starter, groups)),
        )

    def _serves(self, group: str, index: int, count: int) -> dict[str, str]:
        """Returns what a worker reads of the controller's group that it is of."""
        return WorkerStart(
            starter=f"@{{address:{_starter(group)}}}",
            group=group,
            index=index,
            count=count,
            serve="megarl.controller.worker:serve",
            options={"group": group},
            directory=os.getcwd(),
            path=tuple(self.plan.import_path),
            launched=True,
        ).to_env()

    def _trainer(
        self,
        role: str,
        index: int,
        seat: Seat,
        command: tuple[str, ...],
        variables: Mapping[str, str],
        *,
        log: str = "",
        ports: tuple[str, ...] = (),
    ) -> Task:
        """Returns a process that is no server. variables: its own, beside the servers' addresses,
        its GPUs and its import path."""
        cfg = self.plan.cfg
        env = self._base(TRAINER, seat)
        env.update(variables)
        for key, name in ((SERVER, ADDRESSES_ENV), (JUDGE, JUDGES_ENV)):
            if addresses := self.at(key):
                env[name] = ",".join(addresses)
        listed = list(cfg.rollout.addresses) if isinstance(cfg, GRPOConfig) else []
        host = "elsewhere" if self.cluster else LOOPBACK
        set_trainer_defaults(
            env,
            servers=[*listed, *(f"{host}:1" for _ in self.at(SERVER))],
            block_fp8=uses_block_fp8(cfg),
        )
        env["PYTHONPATH"] = self._import_path()
        return Task(
            role=role,
            index=index,
            node=seat.node,
            gpus=seat.gpus,
            command=command,
            env=dict(env.maps[0]),
            ports=ports,
            log=str(self.run / "logs" / log) if log else "",
        )

    def at(self, role: str) -> list[str]:
        """Returns the addresses of a role's processes, [] where the launcher starts none."""
        return self.addresses.get(role, [])

    def _import_path(self) -> str:
        """Returns PYTHONPATH for scripts outside the package, and for the user's rewards."""
        return _path(str(PACKAGE.parent), self.env.get("PYTHONPATH"), os.getcwd())

    def _base(self, role: str, seat: Seat, threads: int = 0) -> ChainMap[str, str]:
        """Returns a task's variables before the launcher's: the nodes' interface, a process's GPUs,
        and its share of its node's cores, `threads` where that is not 0."""
        env = ChainMap({}, dict(self.env))
        if seat.gpus is not None or env.get("MEGARL_DEVICE") == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = seat.gpus or ""
        if self.cluster and (interface := self.plan.cfg.cluster.interface):
            for name in _INTERFACES:
                env.setdefault(name, interface)
        if threads:
            env[THREADS] = str(threads)
        elif (processes := self.processes[role][seat.node]) > 1:
            env.setdefault(THREADS, f"@{{cores:{processes}}}")
        return env


def _starter(group: str) -> str:
    """Returns the endpoint of the controller that the workers of a group link to."""
    return f"{CONTROLLER}.{group}"


def _folders(cfg: GRPOConfig) -> Iterable[str]:
    """Yields the folders of rewards that the configuration names by their files."""
    for data in sources(cfg).values():
        if (file := data.reward.type.partition(":")[0]).endswith(".py"):
            yield str(Path(file).resolve().parent)


def _path(*parts: str | None) -> str:
    return os.pathsep.join(p for p in parts if p)
