"""Everything except the files of a wheel's megarl/shipped is in pyproject.toml."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("configs", "examples")  # `megarl init --from` copies from these folders


class BuildWithShipped(build_py):
    """Adds configs/ and examples/ to a wheel. An editable installation uses the clone's folders."""

    def run(self) -> None:
        """Builds the package."""
        super().run()
        for folder in () if self.editable_mode else SHIPPED:
            target = Path(self.build_lib, "megarl", "shipped", folder)
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(folder, target, ignore=ignored, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithShipped})
