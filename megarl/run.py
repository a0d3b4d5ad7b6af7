"""Runs every recipe.

    torchrun --nproc-per-node N megarl/run.py --config X.yaml [key=value ...] [+new.key=value ...]
    python -m megarl.run --config X.yaml ...        (one process)

    --help [SECTION]  every key, or one section's (--help rollout), with type, default, choices and
                      meaning; --recipe NAME for one recipe's
    --print-config    the configuration after all overrides, as YAML
    --check           check the configuration, models, data and code it names, then stop: for
                      WORLD_SIZE processes where that is set, else for the fewest that fit

The configuration is parsed and checked before torch is imported; data and the code it names
(rewards, a workflow), which may lie in the working directory, before any process group exists. A
mistake prints what is wrong, without a traceback, and exits with status 2.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_HERE = Path(__file__).resolve().parent
if __package__ in (None, "") and sys.path and Path(sys.path[0]).resolve() == _HERE:
    # run as a file: our folder's names (config, data, ...) must not stand in front of others'
    sys.path[0] = str(_HERE.parent)

from megarl.config.command_line import CommandLine, parse_command_line
from megarl.config.errors import EXIT_CODE, ConfigError
from megarl.config.help import render_help, render_section
from megarl.config.recipe_engines import smallest_world_size, trainer_processes, uses_block_fp8
from megarl.config.recipes import RECIPES, TRAINERS, BaseConfig, GRPOConfig, OfflineConfig
from megarl.config.servers import ADDRESSES_ENV, needs_servers, server_addresses
from megarl.utils import stopping
from megarl.utils.env import quiet_libraries, set_trainer_defaults
from megarl.utils.files import DiskFull, full_disk_named
from megarl.utils.importing import add_working_directory, in_users_lines, load_object
from megarl.utils.stacks import dump_on_signal

FAILED = 1  # exit status of a run that an error ended
OTHERS_WAIT = 2.0  # seconds a rank stays quiet after a config error, so that rank 0 is heard


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line (None: sys.argv) and returns the exit status: 0, 1 for a full disk, 2 for
    a configuration error, 128 + the signal's number after a stop by signal. An error of the user's
    code is shown by the user's lines; others are raised."""
    add_working_directory()
    dump_on_signal()
    with stopping.listening(spokesman=_rank() == 0):
        return _start(argv) or stopping.status()


def _start(argv: Sequence[str] | None) -> int:
    try:
        command = parse_command_line(
            sys.argv[1:] if argv is None else argv,
            options=("config", "recipe"),
            switches=("help", "print-config", "check", "checked"),
        )
        if "help" in command.switches:
            with contextlib.suppress(BrokenPipeError):  # --help | head
                print(help_text(command), flush=True)
            return 0
        cfg = load(command)
        if "print-config" in command.switches:
            from megarl.config.loader import config_yaml

            _say(config_yaml(cfg))
            return 0
        only = "check" in command.switches
        world_size = _world_size(cfg, only)
        if "checked" in command.switches:
            prepare(cfg)
        else:
            check_all(cfg, world_size, only=only)
    except ConfigError as e:
        return _refuse(e.report(), EXIT_CODE)
    if only:
        under = " under one controller" if cfg.trainer.mode == "controller" else ""
        _say(f"the configuration is sound, for {world_size} trainer process(es){under}")
        return 0
    return _run_whole(cfg)


def _run_whole(cfg: BaseConfig) -> int:
    """Runs the recipe; returns the exit status."""
    from megarl.config.loader import run_dir

    try:
        with full_disk_named(f"the run in {run_dir(cfg)}", run_dir(cfg)):
            run(cfg)
    except DiskFull as e:  # every rank's, in the words of one
        return _refuse(str(e), FAILED)
    except ConfigError as e:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise  # the rank that says it might be another
        return _refuse(e.report(), EXIT_CODE)
    except Exception as e:
        shown = in_users_lines(e, run_dir(cfg) / "logs" / f"error_{_rank()}.txt")
        if shown is None:
            raise
        print(shown, file=sys.stderr, flush=True)
        return FAILED
    return 0


def help_text(command: CommandLine) -> str:
    """Returns the text of --help, with the keys of --recipe or of all recipes; where words name
    sections, only their keys."""
    recipe = command.options.get("recipe")
    recipes = [recipe] if recipe else tuple(RECIPES)
    if command.words:
        return "\n\n".join(render_section(word, recipes) for word in command.words)
    return f"{(__doc__ or '').strip()}\n\n{render_help(recipes)}"


def load(command: CommandLine) -> BaseConfig:
    """Returns the recipe of a command line, with --checked the one that a launcher has checked and
    put into the environment. --recipe NAME is short for recipe=NAME."""
    from megarl.config.loader import CHECKED, checked_config, load_config
    from megarl.config.script import fetch_hub_models

    if "checked" not in command.switches:
        recipe = [f"recipe={command.options['recipe']}"] if "recipe" in command.options else []
        overrides = [*recipe, *command.words, *command.overrides]
        return load_config(command.options.get("config"), overrides)
    if (text := os.environ.pop(CHECKED, None)) is None:
        raise ConfigError([f"--checked: {CHECKED} is not set; a launcher sets it, leave it out"])
    cfg = checked_config(text, command.overrides)
    fetch_hub_models(cfg)
    return cfg


def check_all(cfg: BaseConfig, world_size: int, *, only: bool) -> None:
    """Checks everything, as a launcher does, and sets what has to be set before torch is imported.
    only: nothing starts afterwards. Raises ConfigError."""
    from megarl.config.check import check_config
    from megarl.config.earlier_run import check_run_dir
    from megarl.config.script import fetch_hub_models
    from megarl.trainer.preflight import check_models, check_writable

    fetch_hub_models(cfg)
    check_config(cfg, world_size)
    check_models(cfg)
    if _rank() == 0:  # alone: by the time the others look, it may have begun to write
        check_run_dir(cfg)
    if not only and isinstance(cfg, GRPOConfig) and needs_servers(cfg) and not _servers(cfg):
        raise ConfigError(
            [
                "no generation server: name running ones in rollout.addresses=[host:port,...] or "
                f"{ADDRESSES_ENV}, or start with python -m megarl.launcher.local"
            ]
        )
    prepare(cfg)
    if _rank() == 0:  # the others would read and import the same
        check_named(cfg)
        if not only:
            check_writable(cfg)


def check_named(cfg: BaseConfig) -> None:
    """Checks the place, the tokenizer, the data and the code that the configuration names; code may
    import torch. Raises ConfigError."""
    from megarl.trainer.named import check_code, check_data, check_place, check_tokenizer

    check_place(cfg)
    check_tokenizer(cfg)
    check_code(cfg, check_data(cfg, renders=True))


def prepare(cfg: BaseConfig) -> None:
    """Sets what has to be set before torch is imported."""
    quiet_libraries()
    set_trainer_defaults(os.environ, servers=_servers(cfg), block_fp8=uses_block_fp8(cfg))


def run(cfg: BaseConfig) -> None:
    """Imports torch and runs the recipe's trainer, or the one that the configuration names."""
    own = next((path for recipe, path in TRAINERS.items() if isinstance(cfg, recipe)), "")
    named = cfg.trainer.type or own
    trainer = load_object(named, what="trainer") if named else None
    if isinstance(cfg, GRPOConfig):
        from megarl.trainer import rl

        if cfg.replay is not None:
            from megarl.trainer.replay import replaying

            trainer = replaying(trainer)
        if cfg.trainer.mode == "controller":
            from megarl.controlled import ControllerContext

            rl.run(cfg, trainer, context=ControllerContext)
        else:
            rl.run(cfg, trainer)
    else:
        from megarl.trainer import offline

        assert isinstance(cfg, OfflineConfig), type(cfg)
        offline.run(cfg, trainer)


def _servers(cfg: BaseConfig) -> list[str]:
    return server_addresses(cfg.rollout) if isinstance(cfg, GRPOConfig) else []


def _world_size(cfg: BaseConfig, only_checks: bool) -> int:
    """Returns torchrun's world size; without it 1, or in a mere check the smallest that fits. Of a
    controller the number of its trainers; raises ConfigError for one that torchrun starts."""
    if cfg.trainer.mode == "controller":
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise ConfigError(
                [
                    "trainer.mode=controller under torchrun: one process starts the trainers; run "
                    "python -m megarl.run, or a launcher, or set trainer.mode=spmd"
                ]
            )
        return trainer_processes(cfg)
    if only_checks and "WORLD_SIZE" not in os.environ:
        return smallest_world_size(cfg)
    return int(os.environ.get("WORLD_SIZE", "1"))


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _say(text: str) -> None:
    if _rank() == 0:
        print(text)


def _refuse(report: str, status: int) -> int:
    """Prints one report for all ranks, since torchrun ends every rank as soon as one has failed."""
    if _rank() == 0:
        print(report, file=sys.stderr, flush=True)
    else:
        time.sleep(OTHERS_WAIT)
    return status


if __name__ == "__main__":
    sys.exit(main())
