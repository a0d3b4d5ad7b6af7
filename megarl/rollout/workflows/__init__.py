"""Turns rows into samples. A new workflow subclasses rollout.chat.ChatWorkflow, or
api.inference.RolloutWorkflow with a constructor of the same arguments, and is named in
rollout.workflow."""
