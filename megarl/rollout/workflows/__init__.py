"""Workflows: how a row becomes trajectories. A new one subclasses api.inference.RolloutWorkflow, is
made with the same arguments as RLVRWorkflow, and is named in rollout.workflow.
"""
