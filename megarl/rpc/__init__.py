"""Calls worker processes: signed messages over HTTP, the process that serves, and who starts it."""
