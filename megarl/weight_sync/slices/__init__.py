"""Sends to each rank of a server the slices of the weights that it keeps, and no more."""
