"""Reads YAML, and keeps what was typed until the type of its key is known.

To YAML 1.1 `010` is eight, `12:30` seven hundred and fifty and `no` false, which is not what the
name of a run or a path means. So a plain word is read as a `Word`, its text, and `as_type` makes of
it what its key takes. Null alone is null at once.
"""

from __future__ import annotations

import re
import types
import typing
from enum import Enum
from typing import Any

import yaml
from omegaconf.errors import OmegaConfBaseException

# what PyYAML and OmegaConf raise for a text that is no YAML, or holds a tag its value does not fit
NOT_YAML = (yaml.YAMLError, OmegaConfBaseException, ValueError, LookupError, AttributeError)
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_KEPT = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")
_STR = "tag:yaml.org,2002:str"
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*|0x_*[0-9a-fA-F][0-9a-fA-F_]*|0b_*[01][01_]*)")
_FLOAT = re.compile(
    r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)"
)
_NO_DIGITS = re.compile(r"[-+]?0[xb]_+")
_BOOL = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}


class Word(str):
    """Is a plain word of a YAML text, as it was typed."""

    def untyped(self) -> Any:
        """Returns the value where no type is known, as in options: a number, a boolean or text. A
        number has base 10, or begins with 0x or 0b; one that begins with 0 besides is text, and so
        is 12:30."""
        text = str(self)
        if _INT.fullmatch(text):
            return int(text.replace("_", ""), 0)
        if _FLOAT.fullmatch(text):
            plain = text.replace("_", "").lower()
            return float(plain.replace(".inf", "inf").replace(".nan", "nan"))
        return _BOOL.get(text.lower(), text) if text in _spellings(text) else text


def _spellings(text: str) -> tuple[str, ...]:
    return text.lower(), text.capitalize(), text.upper()


class _Loader(_Base):  # type: ignore[misc]
    """Leaves plain words as they were typed, but for null and <<; a key that comes twice is an
    error."""

    yaml_implicit_resolvers: typing.ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag in _KEPT]
        for first, resolvers in _Base.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.MarkedYAMLError(None, None, f"duplicate key {twice[0]}", node.start_mark)
        return super().construct_mapping(node, deep)


def _scalar(loader: Any, node: yaml.ScalarNode) -> str:
    if _NO_DIGITS.fullmatch(node.value):
        raise yaml.MarkedYAMLError(None, None, f"{node.value} has no digits", node.start_mark)
    return node.value if node.style else Word(node.value)


_Loader.add_constructor(_STR, _scalar)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Puts in quotes each text that a plain word would not be read as."""


def _text(dumper: Any, value: str | Enum) -> yaml.ScalarNode:
    text = value.name if isinstance(value, Enum) else str(value)
    style = None if isinstance(Word(text).untyped(), str) else "'"
    return dumper.represent_scalar(_STR, text, style=style)


for _kind in (str, Enum):
    _Dumper.add_multi_representer(_kind, _text)
_Dumper.add_representer(str, _text)


def write_yaml(tree: Any) -> str:
    """Returns YAML of dicts, lists and plain values, which `read_yaml` reads as they are."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(text: str) -> Any:
    """Returns the tree of a YAML text, with words. Raises one of NOT_YAML."""
    return yaml.load(text, Loader=_Loader)


def read_override(text: str) -> Any:
    """Returns the value of an override key=text. Raises one of NOT_YAML. A plain word is all of the
    text: a name may hold what a file takes for a comment."""
    read = read_yaml(text) if text.strip() else ""
    whole = isinstance(read, Word) or (read is None and text.lstrip().startswith("#"))
    return Word(text.strip()) if whole else read


def as_type(value: Any, annotation: Any) -> Any:
    """Returns `value`, of dicts, lists and words, without words: each as its part of the annotation
    takes it. A word that the type cannot be made of stays text."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    if isinstance(value, dict):
        name, inner = typing.get_args(annotation) or (Any, Any)
        return {as_type(k, name): as_type(v, inner) for k, v in value.items()}
    if isinstance(value, list):
        inner = (typing.get_args(annotation) or (Any,))[0]
        return [as_type(v, inner) for v in value]
    if not isinstance(value, Word):
        return value
    if annotation is bool and value in ("0", "1"):
        return value == "1"
    return str(value) if annotation is str else value.untyped()
