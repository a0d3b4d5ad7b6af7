"""Workflows: how a row becomes samples. A new one subclasses rollout.trajectory.ChatWorkflow, or
api.inference.RolloutWorkflow with a constructor of the same arguments, and is named in
rollout.workflow.
"""
