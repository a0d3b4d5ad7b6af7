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

from megarl.config import recipe_engines
from megarl.config.command_line import CommandLine, parse_command_line
from megarl.config.errors import EXIT_CODE, ConfigError
from megarl.config.help import render_help, render_section
from megarl.config.recipes import RECIPES, TRAINERS, BaseConfig, GRPOConfig
from megarl.utils import stopping
from megarl.utils.env import quiet_libraries, set_trainer_defaults
from megarl.utils.files import DiskFull, full_disk_named
from megarl.utils.importing import add_working_directory, load_object
from megarl.utils.stacks import prepare_signals
from megarl.utils.user_errors import in_users_lines

FAILED = 1  # exit status of a run that an error ended
OTHERS_WAIT = 2.0  # seconds a rank stays quiet after a config error, so that rank 0 is heard


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line (None: sys.argv) and returns the exit status: 0, 1 for a full disk, 2 for
    a configuration error, 128 + the signal's number after a stop by signal. An error of the user's
    code is shown by the user's lines; others are raised."""
    add_working_directory()
    prepare_signals()
    with stopping.listening(spokesman=_rank() == 0):
        try:
            cfg = _checked(sys.argv[1:] if argv is None else argv)
        except ConfigError as e:
            return _refuse(e.report(), EXIT_CODE)
        return (0 if cfg is None else _run_whole(cfg)) or stopping.status()


def _checked(argv: Sequence[str]) -> BaseConfig | None:
    """Returns the configuration to run, after all checks; None where nothing is to run. Raises
    ConfigError."""
    command = parse_command_line(
        argv, options=("config", "recipe"), switches=("help", "print-config", "check", "checked")
    )
    if "help" in command.switches:
        with contextlib.suppress(BrokenPipeError):  # --help | head
            print(_help(command), flush=True)
        return None
    from megarl.config.loader import config_yaml
    from megarl.config.script import fetch_hub_models  # here, so that --help is instant

    cfg = _read(command)
    only = "check" in command.switches
    if "print-config" in command.switches:
        if _rank() == 0:
            print(config_yaml(cfg))
        return None
    world_size = _world_size(cfg, only)
    fetch_hub_models(cfg, weights=not only)
    if "checked" in command.switches or _rank() != 0:
        _prepare(cfg, only=only)
        return None if only else cfg
    # rank 0 checks for all; torchrun ends the others where it refuses
    from megarl.trainer.preflight import check_contents, check_recipe, check_weights, check_writable

    check_recipe(cfg, world_size)
    _prepare(cfg, only=only)
    check_contents(cfg)
    if only:
        under = " under one controller" if cfg.trainer.mode == "controller" else ""
        print(f"the configuration is sound, for {world_size} trainer process(es){under}")
        return None
    check_weights(cfg)
    check_writable(cfg)
    return cfg


def _prepare(cfg: BaseConfig, *, only: bool) -> None:
    """Sets what has to be set before torch is imported, by the run or by code that it names.
    Raises ConfigError where a run, not `only` its checks, has no servers."""
    quiet_libraries()
    servers: list[str] = []
    if isinstance(cfg, GRPOConfig):
        try:
            servers = recipe_engines.server_addresses(cfg.rollout)
        except OSError as e:
            raise ConfigError(f"rollout.addresses_file: cannot be read: {e}; make it") from e
        if not (only or servers) and recipe_engines.needs_servers(cfg):
            fix = f"name running ones, set {recipe_engines.ADDRESSES_ENV}, or use megarl launch"
            raise ConfigError(f"rollout.addresses=[]: no generation server; {fix}")
    set_trainer_defaults(os.environ, servers=servers, block_fp8=recipe_engines.uses_block_fp8(cfg))


def _read(command: CommandLine) -> BaseConfig:
    """Returns the recipe of a command line, with --checked the one that a launcher has checked and
    put into the environment. --recipe NAME is short for recipe=NAME."""
    from megarl.config.loader import CHECKED, checked_config, load_config

    if "checked" not in command.switches:
        recipe = [f"recipe={command.options['recipe']}"] if "recipe" in command.options else []
        overrides = [*recipe, *command.words, *command.overrides]
        return load_config(command.options.get("config"), overrides)
    if (text := os.environ.pop(CHECKED, None)) is None:
        raise ConfigError(f"--checked: {CHECKED} is not set; a launcher sets it, leave it out")
    return checked_config(text, command.overrides)


def _help(command: CommandLine) -> str:
    """Returns the text of --help, with the keys of --recipe or of all recipes; where words name
    sections, only their keys."""
    recipe = command.options.get("recipe")
    recipes = [recipe] if recipe else tuple(RECIPES)
    if command.words:
        return "\n\n".join(render_section(word, recipes) for word in command.words)
    return f"{(__doc__ or '').strip()}\n\n{render_help(recipes)}"


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


def run(cfg: BaseConfig) -> None:
    """Imports torch and runs the recipe's trainer, or the one that the configuration names."""
    own = next(path for recipe, path in TRAINERS.items() if isinstance(cfg, recipe))
    trainer = load_object(cfg.trainer.type or own, what="trainer")
    from megarl.trainer import loop

    if isinstance(cfg, GRPOConfig) and cfg.replay is not None:
        from megarl.trainer.replay import replaying

        trainer = replaying(trainer)
    loop.run(cfg, trainer)


def _world_size(cfg: BaseConfig, only_checks: bool) -> int:
    """Returns torchrun's world size; without it 1, or in a mere check the smallest that fits. Of a
    controller the number of its trainers; raises ConfigError for one that torchrun starts."""
    if cfg.trainer.mode == "controller":
        if os.environ.get("WORLD_SIZE", "1") != "1":
            why = "one process starts the trainers; use a launcher, or set trainer.mode=spmd"
            raise ConfigError(f"trainer.mode=controller under torchrun: {why}")
        return recipe_engines.trainer_processes(cfg)
    if only_checks and "WORLD_SIZE" not in os.environ:
        return recipe_engines.smallest_world_size(cfg)
    return int(os.environ.get("WORLD_SIZE", "1"))


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _refuse(report: str, status: int) -> int:
    """Prints one report for all ranks, since torchrun ends every rank as soon as one has failed."""
    if _rank() == 0:
        print(report, file=sys.stderr, flush=True)
    else:
        time.sleep(OTHERS_WAIT)
    return status


if __name__ == "__main__":
    sys.exit(main())
