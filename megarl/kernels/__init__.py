"""Triton kernels, each beside its torch twin: plain tensors, no groups, no engine."""
