"""Workflows: how a row becomes trajectories. A new one subclasses api.inference.RolloutWorkflow."""
