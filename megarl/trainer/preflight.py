"""Checks a recipe, before any process group or server exists: its rules, its models, the place of
its run, its tokenizer, its data and its code.

No check imports torch, except where the user's code does.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from megarl.config.check import check_config
from megarl.config.container import View
from megarl.config.dataset import SourceConfig
from megarl.config.earlier_run import check_run_dir
from megarl.config.errors import ConfigError, raise_if_any
from megarl.config.loader import run_dir
from megarl.config.recipe_engines import engines, model_override, model_path, saved_engines
from megarl.config.recipes import (
    BaseConfig,
    DistillConfig,
    GRPOConfig,
    RMConfig,
    data_purpose,
    sources,
)
from megarl.data.formats import check_margins
from megarl.data.sources import apart, check_batches, load_rows, prompt_key
from megarl.data.tokenizer import check_context, is_plainly_sound, longest_rows, run_tokenizer
from megarl.models.hf_config import ModelConfig, check_layout, read_hf_config
from megarl.models.lora import check_lora
from megarl.models.shapes import differing
from megarl.observability.run_log import LOGS, check_age
from megarl.rollout.rewards import check_rows, get_reward_fn, is_registered, load_reward
from megarl.trainer.user_code import check_code, isolated, rewards_answers
from megarl.trainer.workflow_check import SourceRows
from megarl.utils.env import attention_problems
from megarl.utils.http import HttpError, as_object, call_json
from megarl.utils.importing import is_import_path
from megarl.utils.user_errors import in_one_line

PROBE_BYTES = 1 << 20
_TOKENIZER_FILES = ("*tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
Rows = Sequence[dict[str, Any]]
# by source: what the rows are read for, and the rows by number, from the shortest text on
Read = dict[str, tuple[str, dict[int, dict[str, Any]]]]
Longest = dict[str, list[dict[str, Any]]]  # by source: rows with their tokens
MOST_ROWS = 1 << 16  # rows of a source whose lengths are looked at


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
    view.check(lambda seen: check_age(run_dir(seen) / name for name in LOGS))


def check_contents(
    cfg: BaseConfig, *, path: Sequence[str] = (), launcher: bool = False, starts: bool = False
) -> None:
    """Checks the place of a run, its tokenizer, its data and its code, after `check_recipe`; the
    code may import torch. Raises ConfigError as that does, and writes nothing.

    path: the folder of the user's script, where one runs the recipe and makes its workflow.
    launcher: a launcher asks, so that code is imported in a process of its own; where it `starts`
    the run, what the code defines is made there once, too.
    """
    view, ours = View(cfg, inside=not launcher), not path
    check_place(view.seen)
    if ours:
        view.check(check_tokenizer)
    rows = view.check(lambda seen: check_data(seen, in_child=launcher, path=path, renders=ours))
    how: Any = {"in_child": launcher, "path": path, "recipe": ours, "makes": starts}
    view.check(lambda seen: check_code(seen, rows or {}, **how))


def check_place(cfg: BaseConfig) -> None:
    """Raises ConfigError if the run directory cannot be created. Leaves nothing there."""
    directory = run_dir(cfg).absolute()
    there = next(p for p in (directory, *directory.parents) if os.path.exists(p))
    try:
        with tempfile.TemporaryDirectory(dir=there):
            pass
    except OSError as e:
        why = f"cannot be created: {e.strerror} in {there}; set another fileroot"
        raise ConfigError(f"the run directory {directory} {why}") from e


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
        raise ConfigError(f"the run directory {directory} {why}") from e


def check_weights(cfg: BaseConfig) -> None:
    """Raises ConfigError naming every model that a start loads from a directory without weights."""
    paths = {k: model_path(cfg, k) for k, e in engines(cfg).items() if not e.init_from_scratch}
    if isinstance(cfg, GRPOConfig):
        servers = {"server": cfg.server, "judge": cfg.judge}
        paths |= {key: s.path for key, s in servers.items() if s is not None and s.path}
    raise_if_any(
        f"{key}.path={path}: has no *.safetensors; download or convert the weights (an engine with "
        "init_from_scratch=true needs none)"
        for key, path in paths.items()
        if not any(Path(path).glob("*.safetensors"))
    )


def check_models(cfg: BaseConfig) -> None:
    """Raises ConfigError naming every engine whose model is unsupported, does not fit its layout or
    has a smaller vocabulary than the tokenizer, and every environment variable that keeps any model
    from being built."""
    problems = attention_problems(os.environ)
    _, tokenizer = _tokenizer(cfg)
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
        for key, g in (("gconfig", cfg.gconfig), ("eval_gconfig", cfg.eval_gconfig)):
            if any(t >= model.vocab_size for t in g.stop_token_ids):
                yield (
                    f"{key}.stop_token_ids={g.stop_token_ids}: the model's vocab_size is "
                    f"{model.vocab_size}"
                )
        room, most = cfg.server.context_length, model.max_position_embeddings
        if room > most:
            yield f"server.context_length={room}: the model's max_position_embeddings is {most}"
        bound = cfg.rollout.workflow.options.get("compact_at")
        if isinstance(bound, int) and bound > room:
            yield (
                f"rollout.workflow.options.compact_at={bound}: above server.context_length={room}; "
                "lower it, or raise server.context_length"
            )


def _follower_problems(actor: dict[str, Any], ref: dict[str, Any]) -> Iterator[str]:
    """Yields a line where a reference that follows the policy is another model than it."""
    if name := differing(actor, ref):
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
        tokenizer = Path(_tokenizer(cfg)[1])
        yield from _tokenizer_problems(f"teacher.path={path}", tokenizer, Path(path))


def check_teacher_servers(cfg: DistillConfig) -> None:
    """Raises ConfigError where a server of the teacher does not answer, or the model it says that
    it serves lies here and has another tokenizer than the student."""
    tokenizer, problems = Path(_tokenizer(cfg)[1]), list[str]()
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
        token = by_id.get(students[first], "none")
        yield (
            f"{key}: its tokenizer is not the student's ({tokenizer}): id "
            f"{students[first]} is {first!r} to the student and {token!r} to the teacher "
            f"({len(set(differing))} such tokens); a teacher must share the student's vocabulary"
        )


def check_tokenizer(cfg: BaseConfig) -> None:
    """Raises ConfigError where the tokenizer's directory holds nothing of a tokenizer."""
    key, path = _tokenizer(cfg)
    directory = Path(path)
    if directory.is_dir() and not any(file for p in _TOKENIZER_FILES for file in directory.glob(p)):
        why = "has no tokenizer (tokenizer.json, tokenizer_config.json, ...)"
        raise ConfigError(
            f"{key}={directory}: {why}; set tokenizer_path to a directory that has one"
        )


def largest_token(directory: Path) -> tuple[str, int]:
    """Returns the token with the largest id that the tokenizer in `directory` can give out, and the
    id; ("", -1) where its files do not say. It reads their JSON: loading a tokenizer imports torch.
    """
    return max(_tokens(directory), key=itemgetter(1), default=("", -1))


def _tokens(directory: Path) -> list[tuple[str, int]]:
    """Returns (token, id) of the tokenizer in `directory`, one or several times each."""
    tokens: list[tuple[Any, Any]] = []
    for name in ("vocab.json", "added_tokens.json"):
        tokens += _object(directory / name).items()
    whole = _object(directory / "tokenizer.json")
    vocab = (whole.get("model") or {}).get("vocab") or {}
    if isinstance(vocab, dict):
        tokens += vocab.items()
    else:  # unigrams: [token, score], numbered as they come
        tokens += [(piece[0], number) for number, piece in enumerate(vocab)]
    tokens += [(t["content"], t["id"]) for t in whole.get("added_tokens") or ()]
    added = _object(directory / "tokenizer_config.json").get("added_tokens_decoder") or {}
    return tokens + [(t["content"], int(i)) for i, t in added.items()]


def _object(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; {} where it is missing or unreadable: the tokenizer's own
    loader says what is wrong."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def check_data(
    cfg: BaseConfig, *, in_child: bool = False, path: Sequence[str] = (), renders: bool = False
) -> dict[str, SourceRows]:
    """Reads all data as the run will, and returns facts about the rows of each source, by its key.

    in_child: the user's code reads data in a new process, with `path` first on its import path.
    renders: the run's tokenizer makes tokens of the shortest and the longest rows of each source.
    Raises ConfigError naming each source that has a wrong row, no row of at most max_length tokens,
    or a prompt without room in the servers' context.
    """
    own = [f"{k}={d.type}" for k, d in sources(cfg).items() if is_import_path(d.type)]
    if in_child and own:
        columns, read = isolated(_read_data, cfg, path=path, what=own)
    else:
        columns, read = _read_data(cfg)
    longest = Longest()
    problems = partial(_unrendered, cfg, read, longest)
    if renders and not is_plainly_sound(cfg, _tokenizer(cfg)[1], problems):
        if in_child:
            what = ["the tokenizer of {1}".format(*_tokenizer(cfg))]
            longest = isolated(_check_rendering, cfg, read, True, what=what)
        else:
            longest = _check_rendering(cfg, read)
    return {key: SourceRows(names, longest.get(key, [])) for key, names in columns.items()}


def _tokenizer(cfg: BaseConfig) -> tuple[str, str]:
    """Returns the key that names the run's tokenizer, and its directory."""
    if cfg.tokenizer_path:
        return "tokenizer_path", cfg.tokenizer_path
    name = next(iter(engines(cfg)))
    return f"{name}.path", model_path(cfg, name)


def _check_rendering(cfg: BaseConfig, read: Read, alone: bool = False) -> Longest:
    """Returns the longest rows of each source. Raises ConfigError as `check_data` does.

    alone: the process does nothing else. transformers imports torch where there is one, though a
    tokenizer needs none: that is half of a start's checks.
    """
    if alone and not cfg.trust_remote_code:  # a tokenizer's own code may import it
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that there is no torch
    from megarl.utils.env import quiet_libraries

    quiet_libraries()
    key, path = _tokenizer(cfg)
    try:
        tokenizer = run_tokenizer(cfg, path)
    except Exception as e:  # a tokenizer's files may be wrong in any way
        why = f"its tokenizer cannot be loaded: {in_one_line(e)}"
        raise ConfigError(f"{key}={path}: {why}") from e
    longest = Longest()
    raise_if_any(_unrendered(cfg, read, longest, tokenizer))
    return longest


def _unrendered(cfg: BaseConfig, read: Read, longest: Longest, tokenizer: Any) -> Iterator[str]:
    """Yields a line for each source with a row that the tokenizer, the teacher's template or a
    limit on tokens refuses, and puts the longest rows of the others into `longest`."""
    from megarl.trainer.teacher_context import TeacherContext, is_function

    for name in read:
        try:
            longest[name] = _longest(cfg, name, read, tokenizer)
            if not isinstance(cfg, DistillConfig) or not name.startswith("train_dataset"):
                continue
            if (context := cfg.teacher.context) and not is_function(context):
                teacher = TeacherContext.for_run(cfg, tokenizer)
                teacher.check(longest[name], max_new_tokens=cfg.gconfig.max_new_tokens)
        except ValueError as e:
            yield f"{name}: {e}"


def _longest(cfg: BaseConfig, name: str, read: Read, tokenizer: Any) -> list[dict[str, Any]]:
    """Returns the longest rows of the source `name` (`longest_rows`). Raises ValueError if a prompt
    and an answer exceed the servers' context."""
    purpose, rows = read[name]
    longest = longest_rows(
        rows, sources(cfg)[name], tokenizer, purpose, whole=len(rows) < MOST_ROWS
    )
    rl = isinstance(cfg, GRPOConfig)
    of: Any = cfg if rl else getattr(cfg, "generation", None)  # has gconfig and server
    if of is not None and purpose in ("rl", "prompts"):
        gconfig = of.eval_gconfig if rl and not name.startswith("train_dataset") else of.gconfig
        check_context(longest, gconfig, of.server.context_length)
    return longest


def _by_length(rows: Rows) -> dict[int, dict[str, Any]]:
    """Returns rows by their number, from the shortest text to the longest; of more than MOST_ROWS
    the shortest and the longest."""
    order = sorted(range(len(rows)), key=lambda i: len(str(rows[i]["messages"])))
    half = MOST_ROWS // 2
    return {i: rows[i] for i in (*order[:half], *order[half:][-half:])}


def _read_data(cfg: BaseConfig) -> tuple[dict[str, tuple[str, ...]], Read]:
    """Returns the columns that rewards get of each source, and its rows. Raises ConfigError naming
    each source that is not sound."""
    problems, columns, read = [], {}, Read()
    trained: set[int] = set()
    count = 0
    for key, data in sources(cfg).items():
        _, _, part = key.partition(".parts.")
        trains = key.startswith("train_dataset")
        reads = purpose_of(cfg, key)
        rewarded = rewards_answers(cfg) and reads in ("rl", "prompts")
        try:
            rows: Sequence[dict[str, Any]] = load_rows(
                data, seed=cfg.seed, purpose=reads, part=part
            )
            if trains:
                count += len(rows)
                trained.update(prompt_key(row, data) for row in rows)
            else:
                rows = apart(rows, data, frozenset(trained), cfg.evaluator.overlap, quiet=True)
            if rewarded:
                _check_answers(data, rows, cfg)
            if isinstance(cfg, RMConfig) and cfg.margin:
                check_margins(rows)
            read[key] = (reads, _by_length(rows))
            columns[key] = ("row_id", *dict.fromkeys(name for row in rows for name in row))
        except ValueError as e:
            problems.append(f"{key}: {e}")
    try:
        if trained and not any(problem.startswith("train_dataset") for problem in problems):
            check_batches(count, cfg.train_dataset)
    except ValueError as e:
        problems.insert(0, f"train_dataset: {e}")
    raise_if_any(problems)
    return columns, read


def purpose_of(cfg: BaseConfig, key: str) -> str:
    """Returns what a run reads the data set or source `key` for (`purpose` of load_rows)."""
    purpose = data_purpose(cfg)
    answered = rewards_answers(cfg) and not key.startswith("train_dataset")
    return "prompts" if answered and purpose == "sft" else purpose


def _check_answers(data: SourceConfig, rows: Sequence[dict[str, Any]], cfg: BaseConfig) -> None:
    """Has a reward of megarl's own look at every row. Other rewards look when the run begins, for
    their code is not imported here."""
    name = data.reward.type or data.type
    if not is_registered(name) or name == "weighted":  # whose parts may be the user's
        return
    # made without what is of another machine: judges' addresses
    plain = inspect.isfunction(load_reward(name))
    reward_fn = get_reward_fn(name, data.reward.options if plain else {})
    numbered = ({"row_id": i} | row for i, row in enumerate(rows))
    generates: Any = cfg if isinstance(cfg, GRPOConfig) else getattr(cfg, "generation", None)
    check_rows(reward_fn, numbered, timeout=generates.rollout.reward_timeout)
