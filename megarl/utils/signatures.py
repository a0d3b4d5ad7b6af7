"""Compares a call that megarl is going to make with the signature of a user's function or class."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_KNOWN = (bool, int, float, str, list, tuple, dict, type(None))


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
        return f"{_name(fn)}{signature}: {e}"
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
    that megarl gives.
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
    hints = _hints(fn)
    for name, value in options.items():
        if name in given:
            yield f"{key}.{name}={value!r}: megarl gives {_name(fn)} this argument; leave it out"
        elif name in takes and not _fits(value, hints.get(name, Any)):
            yield f"{key}.{name}={value!r}: not of type {_spelled(hints[name])}"
        elif name not in takes and not open_ended:
            known = f"it takes {', '.join(own)}" if own else "it takes none"
            yield f"{key}.{name}={value!r}: {_name(fn)} has no such option; {known}"
    for name in own:
        if takes[name].default is inspect.Parameter.empty and name not in options:
            yield f"{key}.{name}: {_name(fn)} needs it; set it"


def _signature(fn: Callable[..., Any]) -> inspect.Signature | None:
    """Returns the signature, with the keys of **options: Unpack[SomeTypedDict] as parameters by
    name; None where nothing is known of it."""
    try:
        signature = inspect.signature(fn)
    except (ValueError, TypeError):  # one that is not written in Python
        return None
    parameters = list(signature.parameters.values())
    if not parameters or parameters[-1].kind is not inspect.Parameter.VAR_KEYWORD:
        return signature
    if (declared := _unpacked(_written_hints(fn).get(parameters[-1].name))) is None:
        return signature
    for name in declared.__annotations__:
        default = inspect.Parameter.empty if name in declared.__required_keys__ else None
        parameters.insert(
            -1, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        )
    return signature.replace(parameters=parameters[:-1])


def _unpacked(hint: Any) -> Any:
    """Returns the TypedDict of Unpack[TypedDict], None for another hint."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Unpack else None


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _hints(fn: Callable[..., Any]) -> dict[str, Any]:
    """Returns the types of parameters by name, as far as they can be read."""
    hints = _written_hints(fn)
    for declared in filter(None, map(_unpacked, hints.values())):
        hints = hints | typing.get_type_hints(declared)
    return hints


def _written_hints(fn: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(fn.__init__ if inspect.isclass(fn) else fn)
    except Exception:  # an annotation may name anything; then the value is not judged
        return {}


def _fits(value: Any, annotation: Any) -> bool:
    """Judges plain types, their unions, and lists of them; lets everything else pass."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, a) for a in args)
    if origin is typing.Literal:
        return value in args
    kind = origin or annotation
    if kind not in _KNOWN:
        return True
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is list and args:
        return isinstance(value, list) and all(_fits(v, args[0]) for v in value)
    return isinstance(value, (list, tuple) if kind is tuple else kind)


def _spelled(annotation: Any) -> str:
    plain = isinstance(annotation, type) and not typing.get_args(annotation)
    return annotation.__name__ if plain else str(annotation).replace("typing.", "")
