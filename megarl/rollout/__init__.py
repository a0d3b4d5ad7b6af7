"""Gathers rollouts: the SGLang client, the executor that keeps it busy, workflows and rewards."""
