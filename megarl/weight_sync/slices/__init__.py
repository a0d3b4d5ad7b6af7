"""Sends each server rank the slices of the weights that it keeps, and no more."""
