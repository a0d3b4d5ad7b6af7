"""Makes DeepEP importable for megatron-core, which asks for its names where older versions had
them. Checked against sgl-deep-ep 0.1.2 (DeepEP 2.1) and megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

_problem = ""


def make_importable() -> None:
    """Runs before megatron.core is imported. megatron-core takes EventOverlap from deep_ep.utils,
    where DeepEP 2 no longer has it, and takes the ImportError for a missing package. DeepEP asserts
    that there is a CUDA toolkit, which nobody catches: there it is made to look not installed.
    """
    global _problem
    if importlib.util.find_spec("deep_ep") is None:
        _problem = "it is not installed"
        return
    try:
        utils = importlib.import_module("deep_ep.utils")
        if not hasattr(utils, "EventOverlap"):
            event = importlib.import_module("deep_ep.utils.event")
            utils.EventOverlap = event.EventOverlap  # type: ignore[attr-defined]
    except (ImportError, AssertionError, AttributeError, OSError) as e:
        _problem = f"it cannot be imported: {type(e).__name__}: {e}"
        for name in [m for m in sys.modules if m.split(".")[0] == "deep_ep"]:
            del sys.modules[name]
        sys.modules["deep_ep"] = None  # type: ignore[assignment]


def problem() -> str:
    """Returns why DeepEP cannot be used, "" where it can."""
    return _problem
