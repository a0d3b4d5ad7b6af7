"""Decides what of a configuration may be shown and kept: values from the environment stay the
interpolations they were written as, and values with a secret's name are masked.

A loaded configuration remembers, beside its values, which of them were interpolations that read the
environment, `${oc.env:NAME}` or `${key}` of a key that does. config.yaml keeps them as written, so
that reading it again asks the environment again. Logs, wandb and the report see `public_tree`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import PurePath
from typing import Any

import yaml

from megarl.config.compose import FILE_KEYS, NOT_YAML

MASK = "***"
_SECRET = re.compile(
    r"(^|[_\-.])(api[_-]?keys?|(access|secret|private)[_-]?keys?|token|password|passwd|passphrase"
    r"|secrets?|credentials?|authorization)$",
    re.IGNORECASE,
)
# in any value: who logs in by a URL, and what services give out as keys
_READ = "\0"  # stands for an interpolation; a password that is one was not typed
_LOGIN = re.compile(rf"(?<=://)(?!([^\s/:@]*:)?{_READ}@)[^\s/]+(?=@)")
_KEY = re.compile(
    r"\b(hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA)[A-Za-z0-9_\-]{16,}"
    r"|(?<=Bearer )[^\s$]\S*"
)
# <pad>, [EOS]: a tokenizer's, under pad_token; Bearer: what says how, before a ${...}
_MARKER = re.compile(r"<.*>|\[[A-Z_]+\]|(Bearer|Basic)\s*")
_INTERPOLATION = re.compile(r"\$\{(?:[^{}]|\$\{[^{}]*\})*\}")
_NAME = re.compile(r"[\w.]+")
_ENV_NAME = re.compile(r"oc\.env:\s*([A-Za-z_]\w*)")
# resolvers that read what they are given alone; what reads more, or cannot be followed: another
# resolver but that of a key, a key that counts from its own place, a name that is interpolated
_HARMLESS = re.compile(r"\$\{(oc\.create|oc\.decode|oc\.dict\.keys):")
_READER = re.compile(r"\$\{((?!oc\.select:\w)[^${}]+:|\.|[^${}]*\$\{)")
_KEYS = re.compile(r"\$\{(?:oc\.select:)?([^${}:,]+)")
_ATTRIBUTE = "_as_written"  # of a loaded configuration; not one of its fields

Place = tuple[str | int, ...]


def is_secret(name: str) -> bool:
    """Returns whether the (dotted) name is that of a secret: api_key, hf_token, ..."""
    return _SECRET.search(name) is not None


def remember(cfg: Any, texts: Mapping[Place, str]) -> None:
    """Notes in `cfg` which of its values came from the environment; `texts` are all interpolations
    that it was resolved from, by their places."""
    read = from_environment(texts)
    values = plain(cfg) if read else {}
    written = {path: (texts[path], at(values, path)) for path in read}
    object.__setattr__(cfg, _ATTRIBUTE, written)


def keep_written(cfg: Any, other: Any) -> None:
    """Has `other`, a configuration of the same values, remember what `cfg` does."""
    if (written := vars(cfg).get(_ATTRIBUTE)) is not None:
        object.__setattr__(other, _ATTRIBUTE, written)


def environment_names(cfg: Any) -> list[str]:
    """Returns the variables of the environment that the configuration reads."""
    return sorted({n for text, _ in written_values(cfg) for n in _ENV_NAME.findall(text)})


def written_values(cfg: Any) -> list[tuple[str, Any]]:
    """Returns (interpolation, value) of each value that came from the environment."""
    return list(vars(cfg).get(_ATTRIBUTE, {}).values())


def as_written(problems: Iterable[str], values: Iterable[tuple[str, Any]]) -> list[str]:
    """Returns lines with the environment's `values`, (interpolation, value), as they were written.
    A number or a short word is one only behind its key. A line about a key of files shows the path,
    too, if it is absolute and the interpolation reads nothing with the name of a secret."""
    lines = list(problems)
    for text, whole in values:
        literal, is_public = text.replace("\\", r"\\"), not any(map(is_secret, _NAME.findall(text)))
        for value in {str(value) for _, value in leaves(whole)} - {""}:
            before = r"(?<!\w)" if len(value) > 3 else "(?<==)"
            shown = "|".join(map(re.escape, (value, repr(value)[1:-1])))
            pattern = rf"{before}'?({shown})'?(?!\w|\.\w)"
            path = rf"{literal} (\1)" if is_public and value.startswith("/") else literal
            lines = [re.sub(pattern, path if _of_files(line) else literal, line) for line in lines]
    return lines


def _of_files(line: str) -> bool:
    key = re.match(r"[\w.]*?(\w+)[:=]", line)
    return key is not None and key[1] in FILE_KEYS


def written_tree(cfg: Any) -> dict[str, Any]:
    """Returns every key with its value; a value of the environment is the interpolation it was
    written as."""
    return _replaced(cfg, lambda text, value: text)


def public_tree(cfg: Any) -> dict[str, Any]:
    """Returns `written_tree` with secrets masked, for eyes other than the user's."""
    tree: dict[str, Any] = masked(written_tree(cfg))
    return tree


def fingerprint_tree(cfg: Any) -> dict[str, Any]:
    """Returns every key with its value, to compare with another start's. Values of the environment
    are digests and secrets are masked, since with another password it is the same run."""
    hidden: dict[str, Any] = masked(_replaced(cfg, lambda text, value: _digests(value)))
    return hidden


def masked(tree: Any, name: str = "") -> Any:
    """Returns `tree`, of dicts and lists, without secrets: the values under a secret's name, and
    those that are one by themselves (`masked_text`). Null, and a text that only names a variable of
    the environment, stay."""
    if isinstance(tree, dict):
        return {k: masked(v, str(k) if not is_secret(name) else name) for k, v in tree.items()}
    if isinstance(tree, list):
        return [masked(v, name) for v in tree]
    if isinstance(tree, str):
        return masked_text(tree, name)
    return tree if tree is None or not is_secret(name) else MASK


def masked_text(text: str, name: str = "") -> str:
    """Returns a text without the secrets in it: all of it under a secret's name, unless it is a
    tokenizer's marker; the login of a URL and a service's key anywhere. An interpolation, which
    only names a variable of the environment or a key, is none."""
    typed = _INTERPOLATION.sub("", text)
    if is_secret(name) and typed and not _MARKER.fullmatch(typed):
        return MASK
    read = _INTERPOLATION.sub(_READ, text)
    return text if _without_keys(read) == read else _without_keys(text)


def masked_message(text: str) -> str:
    """Returns the message of an error without the secrets in it: those of `masked_text`, and VALUE
    in NAME=VALUE with a secret's name."""
    pairs = re.sub(r"(\w+)=([^\s'\",;]+)", lambda m: f"{m[1]}={masked_text(m[2], m[1])}", text)
    return masked_text(pairs)


def _without_keys(text: str) -> str:
    return _KEY.sub(MASK, _LOGIN.sub(MASK, text))


def masked_yaml(text: str, *, flow: bool = False) -> str:
    """Returns a YAML text with secrets masked; text without secrets stays as it is. flow: in one
    line."""
    try:
        tree = yaml.safe_load(text)
    except NOT_YAML:
        return "\n".join(_masked_line(line) for line in text.split("\n"))
    shown = masked(tree)
    if shown == tree or isinstance(tree, str):
        return masked_text(text)
    dumped = yaml.safe_dump(
        shown, sort_keys=False, allow_unicode=True, default_flow_style=flow, width=math.inf
    )
    return dumped.strip()


def _masked_line(line: str) -> str:
    key, colon, _ = line.partition(":")
    return f"{key}: {MASK}" if colon and is_secret(key.strip(" -'\"{")) else masked_text(line)


def masked_problem(text: str) -> str:
    """Returns a line about `key=value: ...` without the secrets in it."""
    key, equals, rest = text.partition("=")
    if not equals or not is_secret(key.lstrip("+'")):
        return masked_text(text)
    value, colon, why = rest.partition(": ")
    return f"{key}={masked_text(value, key)}{colon}{masked_text(why)}"


def masked_override(text: str) -> str:
    """Returns an override key=value of a command line for the log, with secrets masked."""
    key, equals, value = text.partition("=")
    shown = masked_text(value, key) if is_secret(key) else masked_yaml(value, flow=True)
    return f"{masked_text(key)}={shown}" if equals else masked_text(text)


def _replaced(cfg: Any, by: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Returns every key with its value, with by(interpolation, value) for the environment's."""
    tree = plain(cfg)
    for path, (text, value) in vars(cfg).get(_ATTRIBUTE, {}).items():
        *parents, last = path
        with contextlib.suppress(LookupError, TypeError):  # its section is another since, or null
            if at(tree, path) == value:  # else somebody has set another since
                at(tree, parents)[last] = by(text, value)
    return tree


def _digests(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _digests(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_digests(v) for v in value]
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """Returns a value, dataclasses in it, as dicts, lists and what YAML has a form for."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, PurePath) else value


def interpolations(tree: Any) -> Iterator[tuple[Place, str]]:
    """Yields every interpolated text in `tree`, of dicts and lists, with its place."""
    return ((path, text) for path, text in leaves(tree) if isinstance(text, str) and "${" in text)


def leaves(tree: Any, path: Place = (), *, lists: bool = True) -> Iterator[tuple[Place, Any]]:
    """Yields every plain value in `tree`, of dicts and lists, with its place. lists: False takes a
    list for a plain value."""
    if isinstance(tree, dict) or (lists and isinstance(tree, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, (*path, key), lists=lists)
    else:
        yield path, tree


def flat(tree: Any) -> dict[str, Any]:
    """Returns the plain values of `tree` by their dotted names; a list counts as one."""
    return {".".join(map(str, path)): value for path, value in leaves(tree, lists=False)}


def from_environment(texts: Mapping[Place, str]) -> list[Place]:
    """Returns the places of the interpolations that read the environment, themselves or by way of
    others. What cannot be followed counts as if it did."""
    names = {path: ".".join(map(str, path)) + "." for path in texts}
    read = [path for path, text in texts.items() if _READER.search(_HARMLESS.sub("${", text))]
    for reader in read:  # which grows by those that refer to a place, above it or below
        for path, text in texts.items():
            keys = [re.sub(r"[\[.]", ".", k.replace("]", "")) + "." for k in _KEYS.findall(text)]
            meets = (names[reader].startswith(k) or k.startswith(names[reader]) for k in keys)
            if path not in read and any(meets):
                read.append(path)
    return read


def at(tree: Any, path: Sequence[str | int]) -> Any:
    """Returns what stands at a place of `tree`, of dicts and lists."""
    for step in path:
        tree = tree[int(step)] if isinstance(tree, list) else tree[step]
    return tree
