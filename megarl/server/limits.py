"""Limits one request. Every bound is far above what a trainer needs; each keeps a single request
from holding up the event loop, the scheduler or the machine's memory.
"""

from __future__ import annotations

MAX_BODY = 256 << 20  # bytes
MAX_SEQUENCES = 8192  # of one /generate call
MAX_STOPS = 1024  # stop strings, and stop token ids, of one sequence
MAX_STOP_LENGTH = 4096  # characters of one stop string
MAX_JOINS = 64  # groups for weight updates whose other members are waited for
MAX_GROUP_SIZE = 65536  # ranks
MAX_VERSION_LENGTH = 256  # characters of a weight version
MAX_MESSAGE = 2000  # characters of an error; it may quote what was sent
