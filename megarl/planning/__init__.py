"""Plans for clusters that one does not have: memory, traffic, advice; see tools/plan.py."""
