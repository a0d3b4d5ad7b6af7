"""Training. Importing this decides the device (see megarl.parallel.mcore)."""

from megarl.engine.megatron import MegatronEngine

__all__ = ["MegatronEngine"]
