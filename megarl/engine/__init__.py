"""Training. Importing this decides the device (see megarl.parallel.mcore)."""

from megarl.engine.engine import MegatronEngine

__all__ = ["MegatronEngine"]
