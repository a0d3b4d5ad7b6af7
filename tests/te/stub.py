"""Makes transformer_engine.pytorch importable without a GPU and without its compiled extension.

What is missing is replaced by modules of which every attribute exists and every call returns
something: the extension itself, its kernels in Triton, and ONNX. Names, shapes, attributes and
signatures of Transformer Engine's layers are then its own; nothing can be computed.

For `python -O`: Transformer Engine asserts that its enumerations are the extension's.
"""

from __future__ import annotations

import enum
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

EXTENSION = "transformer_engine_torch"
ABSENT = (
    EXTENSION,
    "transformer_engine.common.triton",
    "transformer_engine.pytorch.triton",
    "onnx",
    "onnxscript",
)
_TYPES = ("Byte", "Int32", "Float32", "Float16", "BFloat16", "Float8E4M3", "Float8E5M2")


class Anything:
    """Has every attribute, can be called, indexed, or'ed, be an integer, and be a base class."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value = self.__dict__[name] = Anything(f"{self._name}.{name}")
        return value

    def __call__(self, *_: Any, **__: Any) -> Any:
        return Anything(f"{self._name}()")

    def __getitem__(self, _: Any) -> Any:
        return Anything(f"{self._name}[]")

    def __or__(self, _: Any) -> Any:
        return self

    __ror__ = __or__

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __index__(self) -> int:
        return hash(self) % 1000

    __int__ = __index__

    def __hash__(self) -> int:
        return hash(self._name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Anything) and vars(other)["_name"] == self._name

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return ()


class _Module(types.ModuleType):
    __all__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value = Anything(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in ABSENT):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == EXTENSION:
            module.__file__ = f"<{EXTENSION}>"
            names = [f"k{name}" for name in (*_TYPES, "Float4E2M1")]
            module.get_cudnn_version = lambda: 91200  # type: ignore[attr-defined]
            module.__all__ = ("get_cudnn_version",)  # type: ignore[attr-defined]
            module.DType = enum.IntEnum("DType", names, start=0)  # type: ignore[attr-defined, misc]


def install() -> None:
    """Once, before anything imports transformer_engine."""
    sys.meta_path.insert(0, _Finder())
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # it looks for no libraries then
    warnings.filterwarnings("ignore", message=".*shared object file for the Transformer Engine")
    from transformer_engine import common

    common.load_framework_extension = lambda _: None
    if hasattr(common, "_get_sys_extension"):  # 2.2 loads the extension from a file
        _load_from_file(common)


def _load_from_file(common: Any) -> None:
    """Any file will do: whatever its path, what is loaded is the stub."""
    here = Path(__file__)
    common.get_te_path = lambda: _Folder(here)
    real = importlib.util.spec_from_file_location

    def spec_from_file_location(name: str, *args: Any, **kwargs: Any) -> Any:
        return _Finder().find_spec(name) or real(name, *args, **kwargs)

    importlib.util.spec_from_file_location = spec_from_file_location


class _Folder:
    """A folder in which a search finds `file`."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __truediv__(self, _: str) -> _Folder:
        return self

    def glob(self, _: str) -> Iterator[Path]:
        return iter([self._file])
