"""Checks a recipe, before any process group or server exists: its rules, its models, the place of
its run, its data and its code.

No check imports torch, except where the user's code does.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megarl.config.check import check_config
from megarl.config.container import View
from megarl.config.earlier_run import check_run_dir
from megarl.config.errors import ConfigError, raise_if_any
from megarl.config.loader import run_dir
from megarl.config.recipe_engines import engines, model_override, model_path, saved_engines
from megarl.config.recipes import BaseConfig, DistillConfig, GRPOConfig
from megarl.models.hf_config import ModelConfig, check_layout, read_hf_config
from megarl.models.lora import check_lora
from megarl.trainer.named import check_code, check_data, check_place, check_tokenizer
from megarl.utils.env import attention_problems
from megarl.utils.http import HttpError, as_object, call_json

PROBE_BYTES = 1 << 20


def check_recipe(
    cfg: BaseConfig, world_size: int, *, own_script: bool = False, launcher: bool = False
) -> None:
    """Checks the rules, the models and the run directory of a recipe for `world_size` trainers.
    Raises ConfigError for the first of them that is wrong, with all its problems.

    own_script: a script of the user's runs it, which may have metrics and phases of its own.
    launcher: a launcher asks, so that paths may be those of a container.
    """
    view = View(cfg, inside=not launcher)
    view.check(lambda seen: check_config(seen, world_size, own_script=own_script))
    view.check(check_models)
    view.check(lambda seen: check_run_dir(cfg, seen))


def check_contents(cfg: BaseConfig, *, path: Sequence[str] = (), launcher: bool = False) -> None:
    """Checks the place of a run, its tokenizer, its data and its code, after `check_recipe`; the
    code may import torch. Raises ConfigError as that does, and writes nothing.

    path: the folder of the user's script, where one runs the recipe and makes its workflow.
    launcher: a launcher asks, so that code is imported in a process of its own.
    """
    view, ours = View(cfg, inside=not launcher), not path
    check_place(view.seen)
    if ours:
        view.check(check_tokenizer)
    data = view.check(lambda seen: check_data(seen, isolated=launcher, path=path, renders=ours))
    row_keys = data or {}
    view.check(lambda seen: check_code(seen, row_keys, isolated=launcher, path=path, recipe=ours))


def _stop_token_problems(cfg: GRPOConfig, vocab_size: int) -> Iterator[str]:
    for key, g in (("gconfig", cfg.gconfig), ("eval_gconfig", cfg.eval_gconfig)):
        if any(t >= vocab_size for t in g.stop_token_ids):
            yield f"{key}.stop_token_ids={g.stop_token_ids}: the model's vocab_size is {vocab_size}"


def check_writable(cfg: BaseConfig) -> None:
    """Makes the run directory. Raises ConfigError where it cannot take even a small file."""
    directory = run_dir(cfg)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())  # quotas and network file systems speak up here
    except OSError as e:
        why = f"cannot be written to: {e}; make room there, or set another fileroot"
        raise ConfigError([f"the run directory {directory} {why}"]) from e


def check_models(cfg: BaseConfig) -> None:
    """Raises ConfigError naming every engine whose model is unsupported, does not fit its layout or
    has a smaller vocabulary than the tokenizer, and every environment variable that keeps any model
    from being built."""
    problems = attention_problems(os.environ)
    tokenizer = cfg.tokenizer_path or model_path(cfg, next(iter(engines(cfg))))
    token, largest = largest_token(Path(tokenizer))
    models: dict[str, ModelConfig] = {}
    for name, engine in engines(cfg).items():
        try:
            path, override = model_path(cfg, name), model_override(cfg, name)
            models[name] = model = read_hf_config(
                path, head=engine.head, override=override, new_bias=engine.value_head_bias
            )
            check_layout(model, engine.parallel)
            if engine.lora is not None:
                check_lora(model, engine.parallel.tp, engine.lora)
        except ValueError as e:
            problems.append(f"{name}: {e}")
            continue
        if largest >= model.vocab_size:
            problems.append(
                f"{name}.path={path}: the tokenizer in {tokenizer} has the token "
                f"{token!r} with id {largest}, the model's vocab_size is {model.vocab_size}; name "
                "the tokenizer that belongs to the model in tokenizer_path, take its added tokens "
                "out, or enlarge the model's embedding (resize_token_embeddings)"
            )
        problems += _model_problems(cfg, name, path, model)
    if "ref" in saved_engines(cfg) and {"actor", "ref"} <= set(models):
        problems += _follower_problems(models["actor"].meaning(), models["ref"].meaning())
    raise_if_any(problems)


def _model_problems(cfg: BaseConfig, name: str, path: str, model: ModelConfig) -> Iterator[str]:
    """Yields why the model in `path` is not one for the engine `name`."""
    engine = engines(cfg)[name]
    if engine.router_replay == "rollout" and model.moe is None:
        yield (
            f"{name}.router_replay=rollout: the model in {path} has no experts to route to; "
            "leave it off"
        )
    if name == "reward_model" and model.new_head:
        yield (
            f"reward_model.path={engine.path}: a language model without a score; name a "
            "ForSequenceClassification model with one label"
        )
    if isinstance(cfg, DistillConfig):
        yield from _teacher_problems(cfg, name, path, model.vocab_size)
    if name == "actor" and isinstance(cfg, GRPOConfig):
        yield from _stop_token_problems(cfg, model.vocab_size)
        room, most = cfg.server.context_length, model.max_position_embeddings
        if room > most:
            yield f"server.context_length={room}: the model's max_position_embeddings is {most}"


def _follower_problems(actor: dict[str, Any], ref: dict[str, Any]) -> Iterator[str]:
    """Yields a line where a reference that follows the policy is another model than it."""
    differing = [name for name, value in actor.items() if ref[name] != value]
    if differing:
        name = differing[0]
        yield (
            f"ref.refresh_every, ref.ema: the reference's model has {name}={ref[name]!r}, the "
            f"actor's {actor[name]!r}, so that it cannot take over its weights; leave ref.path out"
        )


def _teacher_problems(cfg: DistillConfig, name: str, path: str, vocab_size: int) -> Iterator[str]:
    """Yields what keeps the teacher from speaking of the student's tokens, by engine `name`: its
    own, or where servers hold it the actor, as far as it is known here."""
    of_servers = name == "actor" and cfg.teacher.addresses
    if (name == "teacher" or of_servers) and cfg.teacher.lm_head_topk > vocab_size:
        yield (
            f"teacher.lm_head_topk={cfg.teacher.lm_head_topk}: the model in {path} has a "
            f"vocabulary of {vocab_size}; lower it"
        )
    if name == "teacher":
        tokenizer = Path(cfg.tokenizer_path or cfg.actor.path)
        yield from _tokenizer_problems(f"teacher.path={path}", tokenizer, Path(path))


def check_teacher_servers(cfg: DistillConfig) -> None:
    """Raises ConfigError where a server of the teacher does not answer, or the model it says that
    it serves lies here and has another tokenizer than the student."""
    tokenizer, problems = Path(cfg.tokenizer_path or cfg.actor.path), list[str]()
    for address in cfg.teacher.addresses:
        key = f"teacher.addresses={address}"
        try:
            info = call_json("GET", address, "/model_info", timeout=cfg.rollout.request_timeout)
            served = as_object(address, "/model_info", info, "model_path")["model_path"]
        except HttpError as e:
            problems.append(f"{key}: {e}")
            continue
        problems += _tokenizer_problems(key, tokenizer, Path(served))
    raise_if_any(problems)


def _tokenizer_problems(key: str, tokenizer: Path, path: Path) -> Iterator[str]:
    """Yields a problem where the tokenizers in two directories give a token different ids."""
    students, teachers = (dict(_tokens(d)) for d in (tokenizer, path))
    differing = [t for t in students if t in teachers and students[t] != teachers[t]]
    by_id = {i: t for t, i in teachers.items()}
    differing += [t for t, i in students.items() if by_id.get(i, t) != t]
    if differing:
        first = min(differing, key=lambda t: students[t])
        said = by_id.get(students[first], "none")
        yield (
            f"{key}: its tokenizer is not the student's ({tokenizer}): id "
            f"{students[first]} is {first!r} to the student and {said!r} to the teacher "
            f"({len(set(differing))} such tokens); a teacher must share the student's vocabulary"
        )


def largest_token(directory: Path) -> tuple[str, int]:
    """Returns the token with the largest id that the tokenizer in `directory` can give out, and the
    id; ("", -1) where its files do not say. It reads their JSON: loading a tokenizer imports torch.
    """
    return max(_tokens(directory), key=lambda entry: entry[1], default=("", -1))


def _tokens(directory: Path) -> list[tuple[str, int]]:
    """Returns (token, id) of the tokenizer in `directory`, one or several times each."""
    found: list[tuple[Any, Any]] = []
    for name in ("vocab.json", "added_tokens.json"):
        found += _object(directory / name).items()
    whole = _object(directory / "tokenizer.json")
    vocab = (whole.get("model") or {}).get("vocab") or {}
    if isinstance(vocab, dict):
        found += vocab.items()
    else:  # unigrams: [token, score], numbered as they come
        found += [(piece[0], number) for number, piece in enumerate(vocab)]
    found += [(t["content"], t["id"]) for t in whole.get("added_tokens") or ()]
    added = _object(directory / "tokenizer_config.json").get("added_tokens_decoder") or {}
    return found + [(t["content"], int(i)) for i, t in added.items()]


def _object(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; {} where it is missing or unreadable: the tokenizer's own
    loader says what is wrong."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
