"""Moves pieces of a model to wherever they are kept: another layout, servers, one rank's memory.

Two tables meet in `plan.plan_transfer`, and `moves` carries out what it plans.
"""
