"""Loads objects that a configuration names by "package.module:name" or "path/to/file.py:name", in
this process or in another that may hang, exit or crash. Compares megarl's calls with signatures.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import json
import logging
import multiprocessing as mp
import os
import signal
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from megarl.utils.child import end_with_parent, signal_group
from megarl.utils.user_errors import in_one_line

logger = logging.getLogger(__name__)
T = TypeVar("T")
FASTER = "leave slow work to its first use"
_UNIONS = (types.UnionType, typing.Union)
# pydantic's names of errors of a value whose type is right
_BOUNDS = (
    *("greater_than", "greater_than_equal", "less_than", "less_than_equal", "literal_error"),
    "finite_number",
)


def add_working_directory() -> None:
    """Lets modules of the working directory be imported, as `python -m` does, but behind all
    others. A process that is started later by multiprocessing gets the same path.
    """
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def is_import_path(name: str) -> bool:
    """Returns whether `name` has the form module:name, rather than being a registered name."""
    return ":" in name


def load_object(target: str, *, what: str) -> Any:
    """Returns the object. Raises ValueError, with `what` it was to be, where it cannot be loaded:
    the message has one line, and for an error in the module itself its file and line.
    """
    module, colon, name = target.partition(":")
    if not colon or not name:
        raise ValueError(f"{what} {target!r}: use 'package.module:name' or 'path/file.py:name'")
    if module.endswith(".py"):
        module = _module_of_file(Path(module), f"{what} {target!r}")
    elif not all(module.split(".")) or "/" in module:
        raise ValueError(f"{what} {target!r}: use 'package.module:name' or 'path/file.py:name'")
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as e:
        raise ValueError(f"{what} {target!r} cannot be loaded: {_why_not(e, module)}") from e
    try:
        return getattr(found, name)
    except AttributeError as e:
        near = difflib.get_close_matches(name, vars(found), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{what} {target!r} cannot be loaded: {module} has no {name}{hint}") from e


def _module_of_file(file: Path, shown: str) -> str:
    """Makes the file importable by its name, also in processes that are started later: objects of
    its module travel between processes by that name."""
    if not file.is_file():
        raise ValueError(f"{shown}: there is no file {file} in {os.getcwd()}")
    if not file.stem.isidentifier():
        raise ValueError(f"{shown}: {file.stem!r} is no name of a module; rename the file")
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(file.stem)
    except ValueError:  # a module that was made without a spec
        spec = None
    origin = spec.origin if spec is not None else None
    if origin is None or Path(origin).resolve() != file.resolve():
        why = f"the name {file.stem} already means {origin or 'another module'}; rename the file"
        raise ValueError(f"{shown}: {why}")
    return file.stem


def _why_not(error: BaseException, module: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and module.startswith(error.name):
        fix = f"it must be in the working directory ({os.getcwd()}), installed, or on PYTHONPATH"
        return f"there is no module {error.name}; {fix}"
    return in_one_line(error)


def call_isolated(
    fn: Callable[..., T],
    *args: Any,
    timeout: float,
    path: Sequence[str] = (),
    answers: type[Exception] | tuple[()] = (),
) -> T:
    """Returns fn(*args), called in a fresh interpreter with `path` in front of this one's import
    path. Raises an error of `fn` that is one of `answers`, TimeoutError after `timeout` seconds,
    and ChildProcessError where the process ends without an answer. One that was killed says nothing
    about `fn`: then another one is asked, once."""
    context = mp.get_context("spawn")
    for last in (False, True):
        ours, theirs = context.Pipe(duplex=False)
        work = (theirs, fn, args, path, answers)
        process = context.Process(target=_answer, args=work, daemon=True)
        process.start()
        theirs.close()
        try:
            if not ours.poll(timeout):
                raise TimeoutError(f"no answer within {timeout:g} s")
            value, error = ours.recv()
        except EOFError as e:
            process.join(timeout)
            why = f"the process ended with status {process.exitcode}"
            if process.exitcode != -signal.SIGKILL:
                raise ChildProcessError(why) from e
            # from outside: by a user, or for memory
            why = "the process was killed (SIGKILL), as for want of memory"
            if last:
                raise ChildProcessError(why) from e
            logger.warning("%s: asking once more", why)
        else:
            if error is not None:
                raise error
            return value  # type: ignore[no-any-return]
        finally:
            assert process.pid is not None
            signal_group(process.pid, signal.SIGKILL)
            process.kill()  # it may not lead its group yet
            process.join()
            ours.close()
    raise AssertionError


@contextmanager
def within(seconds: int | None, done: str) -> Iterator[None]:
    """Raises TimeoutError in what takes longer, in a process's main thread; None: no bound."""
    if seconds is None:
        yield
        return

    def late(number: int, frame: types.FrameType | None) -> None:
        raise TimeoutError(f"it is not {done} after {seconds} s; {FASTER}")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _answer(
    pipe: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    path: Sequence[str],
    answers: type[Exception] | tuple[()],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer, who then ends us
    end_with_parent()
    sys.path[:0] = path
    try:
        pipe.send((fn(*args), None))
    except answers as e:
        pipe.send((None, e))


def call_problem(
    fn: Callable[..., Any], positional: Sequence[str], by_name: Sequence[str]
) -> str | None:
    """Says why `fn` cannot be called with these arguments, named by what they are; None where it
    can, or where nothing is known of its signature."""
    signature = _signature(fn)
    if signature is None:
        return None
    try:
        signature.bind(*positional, **dict.fromkeys(by_name))
    except TypeError as e:
        return f"{_name(fn)}{inspect.signature(fn)}: {e}"
    return None


def option_problems(
    fn: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    key: str,
    positional: int = 0,
    by_name: Sequence[str] = (),
) -> Iterator[str]:
    """Yields one line for each option that `fn` does not take, takes from megarl, or declares with
    another type, and for each argument without a default that `options` lacks.

    key: the dotted name of the options in the configuration. positional, by_name: the arguments
    that megarl gives. A class may have a dict GONE: what takes the place of an option that went.
    """
    signature = _signature(fn)
    if signature is None:
        return
    parameters = list(signature.parameters.values())
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    given = {p.name for p in placed[:positional]} | set(by_name)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    takes = {p.name: p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    own = [name for name in takes if name not in given]
    for name, value in options.items():
        if name in given:
            yield f"{key}.{name}={value!r}: megarl gives {_name(fn)} this argument; leave it out"
        elif name in takes and (why := _misfit(value, takes[name].annotation)):
            yield f"{key}.{name}={value!r}: {why}{_space(value)}"
        elif name not in takes and not open_ended:
            fix = getattr(fn, "GONE", {}).get(name) or meant(name, own, "it takes")
            yield f"{key}.{name}={value!r}: {_name(fn)} has no such option; {fix}"
    for name in own:
        if takes[name].default is inspect.Parameter.empty and name not in options:
            yield f"{key}.{name}: {_name(fn)} needs it; set it"


def meant(name: str, known: Sequence[str], intro: str = "there are") -> str:
    """Returns the fix of a name that is not `known`: the nearest that is, else all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"{intro} {', '.join(known) or 'none'}"


def _space(value: Any) -> str:
    """Returns the fix of a section like {a:b}, which YAML reads as one key, "a:b"."""
    items = value.items() if isinstance(value, dict) else ()
    names = (name for name, item in items if item is None and ":" in name)
    return "".join(f"; YAML wants a space after the colon: {n.replace(':', ': ')}" for n in names)


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    """Returns the signature with types in the place of annotations, Any for what cannot be read,
    and with the keys of **options: Unpack[SomeTypedDict] as parameters by name; None where nothing
    is known of it."""
    try:
        signature = inspect.signature(fn)
    except (ValueError, TypeError):  # one that is not written in Python
        return None
    try:
        called = fn.__init__ if inspect.isclass(fn) else fn
        hints = typing.get_type_hints(called, include_extras=True)
    except Exception:  # an annotation may name anything; then flags alone are judged
        defaults = {p.name: p.default for p in signature.parameters.values()}
        hints = {name: bool for name, value in defaults.items() if isinstance(value, bool)}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        hint = hints.get(parameter.name, Any)
        if typing.get_origin(hint) is typing.Unpack:
            parameters += _keys_of(typing.get_args(hint)[0])
        else:
            parameters.append(parameter.replace(annotation=hint))
    return signature.replace(parameters=parameters)


def _keys_of(declared: Any) -> Iterator[inspect.Parameter]:
    """Yields the keys of a TypedDict as parameters by name."""
    for name, hint in typing.get_type_hints(declared, include_extras=True).items():
        default = inspect.Parameter.empty if name in declared.__required_keys__ else None
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
        )


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _misfit(value: Any, annotation: Any) -> str:
    """Says why an annotation does not take a value of Python or of YAML, where a list may stand for
    a tuple: by its type, or by its bounds (pydantic's Field) and choices (Literal). Empty where it
    does, or where pydantic cannot read the annotation."""
    union = typing.get_origin(annotation) in _UNIONS
    takes = typing.get_args(annotation) if union else (annotation,)
    choices = [c for one in takes if typing.get_origin(one) is typing.Literal for c in one.__args__]
    if type(value) in takes or any(type(value) is type(c) and value == c for c in choices):
        return ""
    from pydantic import TypeAdapter, ValidationError  # here: its import is long, and seldom needed

    try:
        adapter = TypeAdapter(annotation)
        adapter.validate_python(value, strict=True)
        return ""
    except ValidationError as e:
        error = e.errors()[0]
    except Exception:  # an annotation may name anything
        return ""
    try:
        adapter.validate_json(json.dumps(value), strict=True)
        return ""
    except (ValidationError, TypeError):
        pass
    if error["type"] in _BOUNDS:
        return error["msg"].replace("Input should", "must")
    return f"not of type {type_name(annotation)}"


def type_name(annotation: Any) -> str:
    """Returns an annotation as messages spell it: "float | None", "dict[str, SourceConfig]"."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(inner[0])
    if origin in _UNIONS:
        return " | ".join(map(type_name, inner))
    if inner and isinstance(origin, type):
        return f"{origin.__name__}[{', '.join(map(type_name, inner))}]"
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return name.replace("typing.", "").replace("NoneType", "None")
