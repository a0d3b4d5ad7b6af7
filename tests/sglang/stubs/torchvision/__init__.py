"""Stands in for torchvision: PyPI's wheels are CUDA builds that cannot load beside a CPU torch.

SGLang imports names of it where it configures image models, and calls none of them for text.
Any submodule imports, any name is there, and does nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, ClassVar


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        return _nothing(name)


class Nothing(metaclass=_Meta):
    def __init__(self, *args: Any, **kw: Any) -> None: ...

    def __call__(self, *args: Any, **kw: Any) -> Nothing:
        return Nothing()

    def __getattr__(self, name: str) -> Any:
        return _nothing(name)


def _nothing(name: str) -> Any:
    """A class for a capitalised name, which may be subclassed, else an object."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Nothing,), {}) if name[:1].isupper() else Nothing()


class _Submodule(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        return _nothing(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Submodule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def __getattr__(name: str) -> Any:
    return _nothing(name)


sys.meta_path.append(_Finder())
