"""The embedded server with noise in its routers' choices: python -m tests.noisy_server FLAGS."""

from __future__ import annotations

import sys
from typing import Any

from megarl.server.__main__ import main
from megarl.server.runner import ModelRunner
from tests.dist.moe_routing import perturb

if __name__ == "__main__":
    load = ModelRunner.__init__

    def noisy(self: ModelRunner, args: Any) -> None:
        load(self, args)
        perturb(self.model)

    ModelRunner.__init__ = noisy  # type: ignore[method-assign]
    sys.exit(main())
