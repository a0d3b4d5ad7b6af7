"""An attacker's pickle."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Hostile:
    """Makes the directory `path` where it is unpickled without care."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)
