"""Runs everything on this host: generation servers, then trainers, until the trainers are done.

    python -m megarl.launcher.local [script.py] --config X.yaml [--nproc N] [key=value ...]

    --check           check the configuration, models, data and code it names, then stop

`script` defaults to megarl/run.py. It is started N times (default: the fewest processes the
parallel layout fits) with torchrun's environment, the same command line, and the addresses of the
servers in MEGARL_LLM_SERVER_ADDRS and rollout.addresses; the working directory is on its import
path. Everything is checked before anything starts: a mistake prints what is wrong, without a
traceback, and the exit status is 2. Servers are started as `server.*` says, unless
rollout.addresses already names some; their logs are <run>/server_<i>.log. They take control calls
from this job alone, by the token MEGARL_JOB_TOKEN, which is made where there is none.

SIGINT, SIGTERM and SIGHUP are passed on to the trainers, which then have recover.grace seconds to
save a checkpoint and end, and servers 20 s more; a second signal ends all of them at once. A server
or a trainer that fails ends everything, even where other servers are left; recover.restarts has it
started again, to continue. (Servers named in rollout.addresses are not the launcher's: of several,
a lost one is left out.)
Nothing that was started outlives the launcher. The exit status is the trainers'; --help of
megarl.run lists the configuration keys.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from megarl.config.check import check_config, smallest_world_size
from megarl.config.command_line import CommandLine, parse_command_line
from megarl.config.earlier_run import check_run_dir
from megarl.config.errors import EXIT_CODE, ConfigError
from megarl.config.loader import run_dir
from megarl.config.recipes import BaseConfig, GRPOConfig
from megarl.config.secrets import masked_override
from megarl.config.servers import ADDRESSES_ENV
from megarl.config.transports import Requirements
from megarl.launcher.devices import Devices, check_devices, share_out, visible_gpus
from megarl.launcher.processes import (
    POLL_INTERVAL,
    TERM_TIMEOUT,
    Child,
    Reaper,
    Signals,
    signal_group,
    stop_all,
    wait_until,
)
from megarl.observability.logging import get_logger
from megarl.rollout.server_process import ServerProcess, free_port, log_tail, start_server
from megarl.trainer.named import (
    check_code,
    check_data,
    check_place,
    check_tokenizer,
    read_config,
    transport_needs,
)
from megarl.trainer.preflight import check_models, check_writable, fetch_hub_models
from megarl.utils.env import (
    set_loopback_default,
    set_nccl_default,
    set_threads_default,
    set_trainer_defaults,
)
from megarl.utils.http import in_thread
from megarl.utils.importing import add_working_directory
from megarl.utils.job_token import ensure_job_token

log = get_logger("launcher")

PACKAGE = Path(__file__).resolve().parents[1]
SERVER_FAILED = 3  # exit status: a server died or never became healthy
FAIL_GRACE = 5.0  # seconds the peers of a failed trainer get to say what happened


@dataclass(frozen=True, kw_only=True)
class Job:
    """Says what to start; all of it has been checked."""

    cfg: BaseConfig
    script: Path
    arguments: tuple[str, ...]  # of the script
    nproc: int
    servers: int
    devices: Devices


class ServerFailed(RuntimeError):
    """Says that a server died or never became healthy; the message shows the end of its log."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the launcher with the command line `argv` (None: this process's); returns the exit
    status."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print((__doc__ or "").strip())
        return 0
    add_working_directory()
    try:
        command = parse_command_line(argv, options=("config", "nproc"), switches=("check", "help"))
        only = "check" in command.switches
        job = plan(command)
        check_named(job, writes=not only)
    except ConfigError as e:
        print(e.report(), file=sys.stderr)
        return EXIT_CODE
    except KeyboardInterrupt:  # nothing has been started
        return 128 + signal.SIGINT
    if only:
        print(f"the configuration is sound, for {job.nproc} trainer process(es)")
        return 0
    return launch(job)


def check_named(job: Job, *, writes: bool) -> None:
    """Checks the run directory, the tokenizer, the data and the code that the configuration names;
    a process of its own imports the code. Raises ConfigError. With `writes` the directory is made.
    """
    own, path = job.script.parent == PACKAGE, import_path(job.script)
    check_place(job.cfg)
    if own:  # another script may have another
        check_tokenizer(job.cfg)
    rows = check_data(job.cfg, isolated=True, path=path)
    check_code(job.cfg, rows, isolated=True, path=path)
    if writes:
        check_writable(job.cfg)


def import_path(script: Path) -> list[str]:
    """Returns what `python script.py` puts in front of the import path, nothing for our own."""
    return [] if script.parent == PACKAGE else [str(script.resolve().parent)]


def plan(command: CommandLine) -> Job:
    """Reads and checks the command line; starts nothing. Raises ConfigError for what is wrong."""
    script = PACKAGE / "run.py"
    if command.words and command.words[0].endswith(".py"):
        script = Path(command.words.pop(0))
        if not script.is_file():
            raise ConfigError([f"{script}: no such script"])
    config = command.options.get("config")
    own = script.parent == PACKAGE  # another script may have keys of its own
    overrides = [*command.words, *command.overrides]
    cfg = read_config(config, overrides, foreign=not own, path=import_path(script))
    nproc = _nproc(command.options.get("nproc"), cfg)
    fetch_hub_models(cfg)
    check_config(cfg, nproc)
    check_models(cfg)
    check_run_dir(cfg)
    servers = 0
    needs = Requirements()
    if isinstance(cfg, GRPOConfig):
        needs = transport_needs(cfg, import_path(script))
    if isinstance(cfg, GRPOConfig) and not cfg.rollout.addresses:
        servers = cfg.server.count
    gpus = visible_gpus(os.environ)
    devices = share_out(
        gpus[:nproc] if needs.shares_devices else gpus,
        trainers=nproc,
        servers=servers,
        server_tp=cfg.server.tp if isinstance(cfg, GRPOConfig) else 1,
    )
    if isinstance(cfg, GRPOConfig):
        check_devices(cfg, devices, needs)
    return Job(
        cfg=cfg,
        script=script,
        arguments=(*(["--config", config] if config else []), *command.overrides),
        nproc=nproc,
        servers=servers,
        devices=devices,
    )


def _nproc(given: str | None, cfg: BaseConfig) -> int:
    if given is None:
        return smallest_world_size(cfg)
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError([f"--nproc {given}: a number of processes"])
    return int(given)


def launch(job: Job) -> int:
    """Runs the job to its end, starting it again as recover.restarts allows; returns the exit
    status."""
    ensure_job_token()  # every process it starts inherits it
    restarts = job.cfg.recover.restarts
    if isinstance(job.cfg, GRPOConfig) and job.cfg.rollout.max_head_offpolicyness > 0:
        # servers and trainers compute side by side: their threads divide the cores
        set_threads_default(os.environ, processes=job.nproc + job.servers)
    with Signals() as signals:
        while (status := run_once(job, signals)) not in (0, EXIT_CODE):
            if signals.received or not restarts:
                break
            restarts -= 1
            log.warning("status %d: starting again, %d restart(s) left", status, restarts)
    return status


def run_once(job: Job, signals: Signals) -> int:
    """Starts everything, waits for the end and ends everything; returns the exit status."""
    servers: list[ServerProcess] = []
    trainers: list[Child] = []
    with ExitStack() as stack:  # it ends things in reverse order
        reaper = Reaper()
        stack.callback(reaper.close)
        stack.callback(end_servers, servers, signals, reaper)
        stack.callback(end_trainers, trainers, signals, reaper)
        try:
            start_servers(job, servers, reaper)
            if not wait_for_servers(servers, signals, timeout=_start_timeout(job.cfg)):
                return 128 + signals.received[0]
            start_trainers(job, trainers, reaper, addresses=[s.address for s in servers])
            return watch(trainers, servers, signals, grace=job.cfg.recover.grace)
        except ServerFailed as e:
            log.error("%s", e)
            return SERVER_FAILED


def end_servers(servers: Sequence[ServerProcess], signals: Signals, reaper: Reaper) -> None:
    """Stops all servers at once. `stop` bounds its own waits; a second signal cuts them short."""
    stops = [in_thread(server.stop) for server in servers]
    wait_until(lambda: len(signals.received) > 1 or all(s.done() for s in stops), timeout=math.inf)
    for server, stop in zip(servers, stops, strict=True):
        if not stop.done():
            signal_group(server.pid, signal.SIGKILL)
        stop.result(2 * TERM_TIMEOUT)
        reaper.forget(server.pid)


def end_trainers(trainers: Sequence[Child], signals: Signals, reaper: Reaper) -> None:
    """Stops the trainers, which have FAIL_GRACE seconds before they are killed."""
    stop_all(trainers, signals, timeout=FAIL_GRACE)
    for trainer in trainers:
        reaper.forget(trainer.pid)


# servers


def start_servers(job: Job, servers: list[ServerProcess], reaper: Reaper) -> None:
    """Starts them all at once, appending to `servers` as they start."""
    if not job.servers:
        return
    cfg = job.cfg
    assert isinstance(cfg, GRPOConfig)
    for i in range(job.servers):
        gpus = job.devices.servers[i]
        server = start_server(
            cfg.server,
            model_path=cfg.actor.path,
            dtype=_dtype(cfg, on_gpu=gpus is not None),
            override_config=cfg.actor.override_config,
            log_path=run_dir(cfg) / f"server_{i}.log",
            env=server_env(gpus),
            wait=False,
            tether=reaper.tether,
        )
        servers.append(server)
        reaper.watch(server.pid)


def server_env(gpus: str | None) -> dict[str, str]:
    """Returns the variables of a server's environment that ours lacks or has otherwise. gpus: its
    CUDA_VISIBLE_DEVICES."""
    env = dict(os.environ)
    set_loopback_default(env)
    set_nccl_default(env)
    if gpus is not None or env.get("MEGARL_DEVICE") == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = gpus or ""
    return {k: v for k, v in env.items() if os.environ.get(k) != v}


def _dtype(cfg: GRPOConfig, *, on_gpu: bool) -> str:
    """Returns the trainer's compute dtype, as its "auto" resolves."""
    if cfg.actor.dtype != "auto":
        return cfg.actor.dtype
    return "bfloat16" if on_gpu else "float32"


def _start_timeout(cfg: BaseConfig) -> float:
    return cfg.server.start_timeout if isinstance(cfg, GRPOConfig) else 0.0


def wait_for_servers(servers: Sequence[ServerProcess], signals: Signals, *, timeout: float) -> bool:
    """Waits until all servers are healthy; returns False when a signal came first. Raises
    ServerFailed for one that dies, or is not healthy after `timeout` seconds."""
    waiting: list[Future[None]] = [in_thread(s.wait_healthy, timeout) for s in servers]
    while waiting:
        if signals.received:
            return False
        for future in [f for f in waiting if f.done()]:
            if (error := future.exception()) is not None:
                raise ServerFailed(str(error)) from error
            waiting.remove(future)
        time.sleep(POLL_INTERVAL)
    if servers:
        log.info("%d server(s) healthy: %s", len(servers), ", ".join(s.address for s in servers))
    return not signals.received


# trainers


def start_trainers(
    job: Job, trainers: list[Child], reaper: Reaper, *, addresses: Sequence[str]
) -> None:
    """Starts the trainers as torchrun does on one host, but without its agent: the exit status
    stays the trainers'. Appends to `trainers` as they start."""
    arguments = list(job.arguments)
    if addresses:
        arguments.append(f"rollout.addresses=[{','.join(addresses)}]")
    port = free_port()
    for rank in range(job.nproc):
        env = trainer_env(job, rank=rank, port=port, addresses=addresses)
        command = [sys.executable, str(job.script), *arguments]
        child = Child(f"trainer {rank}", command, env=env, tether=reaper.tether)
        trainers.append(child)
        reaper.watch(child.pid)
    shown = " ".join(masked_override(a) for a in arguments)
    log.info("%d trainer process(es): %s %s", job.nproc, job.script, shown)


def trainer_env(job: Job, *, rank: int, port: int, addresses: Sequence[str]) -> dict[str, str]:
    """Returns the environment of trainer `rank`: torchrun's variables, the servers' addresses, its
    GPUs and its import path."""
    env = dict(os.environ)
    env.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.nproc),
        LOCAL_WORLD_SIZE=str(job.nproc),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if addresses:
        env[ADDRESSES_ENV] = ",".join(addresses)
    if job.devices.trainers is not None:
        env["CUDA_VISIBLE_DEVICES"] = job.devices.trainers
    known = job.cfg.rollout.addresses if isinstance(job.cfg, GRPOConfig) else []
    set_trainer_defaults(env, servers=[*addresses, *known])
    path = [str(PACKAGE.parent), env.get("PYTHONPATH", ""), os.getcwd()]
    env["PYTHONPATH"] = os.pathsep.join(p for p in path if p)  # for scripts outside the package
    return env


# watching


def watch(
    trainers: Sequence[Child],
    servers: Sequence[ServerProcess],
    signals: Signals,
    *,
    grace: float,
) -> int:
    """Waits until the trainers are done or one of them fails; returns the exit status. After a
    signal they have `grace` seconds to end. Raises ServerFailed when a server dies."""
    while True:
        if signals.received:
            return _interrupted(trainers, signals, grace)
        states = [(t, t.poll()) for t in trainers]
        for trainer, status in states:
            if status:
                log.error("%s exited with status %d; ending the run", trainer.name, status)
                for obituary in _obituaries(servers):  # which may be why
                    log.error("%s", obituary)
                # its peers are failing too, and one of them may be about to print the cause
                wait_until(lambda: all(t.poll() is not None for t in trainers), timeout=FAIL_GRACE)
                return status
        if all(status == 0 for _, status in states):
            return 0
        for obituary in _obituaries(servers):
            raise ServerFailed(obituary)
        time.sleep(POLL_INTERVAL)


def _interrupted(trainers: Sequence[Child], signals: Signals, grace: float) -> int:
    """Passes the signal on; 0 if every trainer then ends well, else 128 + its number."""
    number = signals.received[0]
    log.warning(
        "signal %d: %d trainer process(es) have %g s (recover.grace) to save a checkpoint and end",
        number,
        len(trainers),
        grace,
    )
    stop_all(trainers, signals, first=number, timeout=grace)
    return 128 + number if any(t.poll() for t in trainers) else 0


def _obituaries(servers: Sequence[ServerProcess]) -> Iterator[str]:
    """Yields, for each server that has died, its status and the end of its log."""
    for server in servers:
        if (code := server.poll()) is not None:
            end = f"end of {server.log_path}:\n{log_tail(server.log_path)}"
            yield f"server {server.address} exited with {code}; {end}"


if __name__ == "__main__":
    sys.exit(main())
