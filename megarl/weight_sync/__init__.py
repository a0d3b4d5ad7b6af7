"""Moves weights from the trainer to the generation servers.

`transports.WeightSender` does it in one of several ways; `transports.Transport` is what a new way
derives from.
"""
