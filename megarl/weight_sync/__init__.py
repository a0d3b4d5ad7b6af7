"""Moves weights from the trainer to the generation servers.

`sender.WeightSender` does it, in one of the ways of `transports`; `transports.Transport` is what a
new way derives from.
"""
