"""Reads a YAML file together with the files that its `defaults:` list names.

    defaults:
      - base/sums            # a file, relative to this one; .yaml may be left out
      - model: qwen3         # a group: the file model/qwen3.yaml; model=llama on the command line
                             # takes model/llama.yaml instead, model=null none

Every file holds keys from the top level down. Later entries win over earlier ones, and the file's
own keys win over all, unless `_self_` in the list puts them elsewhere; just below them is the
preset that they name in `algorithm` (presets.py). Sections are merged key by key; lists are
replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os.path import exists
from pathlib import Path
from typing import Any

from megarl.config import presets
from megarl.config.errors import ConfigError
from megarl.config.words import NOT_YAML, read_yaml

DEFAULTS, SELF = "defaults", "_self_"
Tree = dict[str, Any]
# keys whose values name a file or a directory; any other value does as file.py:name
_FILES = ("path", "files", "tokenizer_path", "chat_template", "adapter_path")


@dataclass(kw_only=True)
class Composer:
    """Reads files; `switches` maps a group to the option that the command line wants for it, or to
    None for no option. `groups` collects the groups that were met."""

    switches: Mapping[str, Any]
    groups: set[str] = field(default_factory=set)

    def read(self, path: Path, inside: tuple[Path, ...] = ()) -> Tree:
        """Returns the merged keys of `path` and its defaults; `inside` are the files that led here.
        Raises ConfigError naming a file that is missing, is no YAML, or includes itself."""
        if path.resolve() in inside:
            chain = " -> ".join(str(p) for p in (*inside, path.resolve()))
            raise ConfigError([f"--config {inside[0]}: a file is among its own defaults: {chain}"])
        own = _read_yaml(path)
        entries = own.pop(DEFAULTS, [])
        if not isinstance(entries, list):
            raise ConfigError([f"--config {path}: defaults: must be a list of files and groups"])
        tree: Tree = {}
        for entry in entries if SELF in entries else [*entries, SELF]:
            if entry == SELF:
                tree = merged(merged(tree, presets.below(own)), own)
                continue
            for file in self._files(path, entry):
                tree = merged(tree, self.read(file, (*inside, path.resolve())))
        return tree

    def _files(self, path: Path, entry: Any) -> Iterator[Path]:
        """Yields the file that one entry of the list of `path` stands for, or nothing."""
        if isinstance(entry, str):
            yield _existing(path, path.parent / entry, f"defaults: {entry}")
            return
        if not isinstance(entry, dict) or len(entry) != 1:
            raise ConfigError(
                [f"--config {path}: defaults: {entry}: write a file, or one group as `group: name`"]
            )
        ((group, option),) = entry.items()
        self.groups.add(str(group))
        option = self.switches.get(str(group), option)
        if option is not None:
            yield group_file(path, str(group), str(option))


def group_file(path: Path, group: str, option: str) -> Path:
    """Returns the file of a group's option beside the configuration `path`. Raises ConfigError
    where there is none."""
    return _existing(path, path.parent / group / option, f"{group}={option}")


def has_group(path: Path, group: str) -> bool:
    """Returns whether there is a directory of that group beside the configuration `path`."""
    return (path.parent / group).is_dir()


def _existing(path: Path, file: Path, wanted: str) -> Path:
    for candidate in (file, file.with_name(file.name + ".yaml")):
        if candidate.is_file():
            return candidate
    known = sorted(f.stem for f in file.parent.glob("*.yaml"))
    there = f"there are {', '.join(known)}" if known else f"{file.parent} holds no .yaml"
    raise ConfigError([f"--config {path}: {wanted}: no such file {file}; {there}"])


def _read_yaml(path: Path) -> Tree:
    if not path.is_file():
        raise ConfigError([f"--config {path}: no such file"])
    try:
        tree = read_yaml(path.read_text(encoding="utf-8")) or {}
    except NOT_YAML as e:
        raise ConfigError([f"--config {path}: not valid YAML: {' '.join(str(e).split())}"]) from e
    if not isinstance(tree, dict):
        raise ConfigError([f"--config {path}: the top level must be keys and values"])
    return {str(k): _with_neighbours(v, str(k), path.parent) for k, v in tree.items()}


def _with_neighbours(value: Any, key: str, folder: Path) -> Any:
    """Returns a value of the file in `folder` with its names of files: one that is not in the
    working directory, and is beside the file, is meant there."""
    if isinstance(value, dict):
        return {k: _with_neighbours(v, str(k), folder) for k, v in value.items()}
    if isinstance(value, list):
        return [_with_neighbours(v, key, folder) for v in value]
    if not isinstance(value, str) or not value or "${" in value:
        return value
    file, colon, name = value.rpartition(":")
    if not (file.endswith(".py") and name.isidentifier() and len(value.split()) == 1):
        if key not in _FILES:
            return value
        file, colon, name = value, "", ""
    there = folder / file
    return f"{there}{colon}{name}" if not exists(file) and exists(there) else value


def merged(below: Any, above: Any) -> Any:
    """Returns `above` over `below`, section by section. A section that names another `type` than
    the one below it drops the `options` below, which were the other type's."""
    if isinstance(below, str) and isinstance(above, dict) and below:
        below = {"type": below}  # a seam in its short form
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    kept = dict(below)
    if "type" in above and above["type"] != below.get("type"):
        kept.pop("options", None)
    return kept | {k: merged(kept[k], v) if k in kept else v for k, v in above.items()}
