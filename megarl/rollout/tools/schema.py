"""Reads a Python function as a tool: its arguments as a JSON schema, and the check of a call."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

import pydantic

# parameters that megarl gives, and the model does not see
GIVEN = ("row",)
# where the description of a function ends and that of its parameters begins
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Example)s?:?\s*$")
_PARAMETER = re.compile(r"^\s*(?::param\s+)?(\w+)(?:\s*\([^)]*\))?\s*:\s*(\S.*)$")


class Signature:
    """Holds what a function takes of the model. Raises ValueError for a function with parameters
    that JSON cannot give by name (*args, positional-only), or of a type that has no schema."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.name = func.__name__
        self._doc = inspect.getdoc(func) or ""
        parameters = inspect.signature(func).parameters
        self.given = tuple(name for name in GIVEN if name in parameters)
        hints = _hints(func)
        fields: dict[str, Any] = {}
        for name, p in parameters.items():
            if name in GIVEN:
                continue
            if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                raise ValueError(
                    f"tool {self.name}: parameter {p} cannot be given by name; use named parameters"
                )
            default = ... if p.default is p.empty else p.default
            fields[name] = (hints.get(name, str), default)
        try:
            config = pydantic.ConfigDict(extra="forbid")
            self._model = pydantic.create_model(self.name, __config__=config, **fields)
            self._schema = self._model.model_json_schema()
        except Exception as e:  # pydantic's errors for types have no base of their own
            raise ValueError(
                f"tool {self.name}: a parameter's type has no JSON schema ({e}); use str, int, "
                "float, bool, list, dict, Literal or Optional"
            ) from e

    def schema(self) -> dict[str, Any]:
        """Returns the tool for the chat template. Its description and those of its parameters are
        from the docstring; a parameter without an annotation is text."""
        said, about = _read(self._doc, set(self._model.model_fields))
        parameters = _untitled(self._schema)
        for name, text in about.items():
            parameters["properties"][name]["description"] = text
        parameters.setdefault("required", [])
        del parameters["additionalProperties"]
        function = {
            "name": self.name,
            "description": said or "No description provided.",
            "parameters": {"type": "object", **parameters},
        }
        return {"type": "function", "function": function}

    def arguments(self, values: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a call, of the annotated types and with defaults filled in ("3"
        is an int where one is asked for). Raises ValueError naming each wrong one."""
        try:
            checked = self._model.model_validate(values)
        except pydantic.ValidationError as e:
            wrong = [f"{'.'.join(map(str, x['loc'])) or self.name}: {x['msg']}" for x in e.errors()]
            raise ValueError("; ".join(wrong)) from e
        return {name: getattr(checked, name) for name in self._model.model_fields}


def _hints(func: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(func, include_extras=True)
    except NameError as e:
        raise ValueError(f"tool {func.__name__}: {e}; annotate it with types it can see") from e


def _untitled(schema: Any) -> Any:
    """Returns the schema without the titles that pydantic makes of names."""
    if isinstance(schema, list):
        return [_untitled(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":  # below it stand names, and one may be "title"
            kept[key] = {name: _untitled(part) for name, part in value.items()}
        elif key != "title" or not isinstance(value, str):
            kept[key] = _untitled(value)
    return kept


def _read(doc: str, names: set[str]) -> tuple[str, dict[str, str]]:
    """Returns a docstring's description and what it says of each parameter: `name: text` or
    `:param name: text`, continued on the lines below."""
    said: list[str] = []
    about: dict[str, str] = {}
    current, described = "", False
    for line in doc.splitlines():
        found = _PARAMETER.match(line)
        if _SECTION.match(line):
            current, described = "", True
        elif found and found[1] in names:
            current, described = found[1], True
            about[current] = found[2].strip()
        elif current and line.strip():
            about[current] += " " + line.strip()
        elif not described:
            said.append(line)
        else:
            current = ""
    return "\n".join(said).strip(), about
