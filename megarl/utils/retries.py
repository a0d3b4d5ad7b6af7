"""Says when a call of a server that failed is made again: the rule of all who ask for tokens."""

from __future__ import annotations

import random
import time

from megarl.utils.http import HttpError

RETRY_DELAY = 0.2  # seconds before the first retry; doubles up to MAX_RETRY_DELAY
MAX_RETRY_DELAY = 10.0
MAX_REST = 60.0  # seconds of a server's Retry-After that are honoured
TOO_MANY = 429  # the one refusal that asks for another try
_jitter = random.Random()  # apart from the generator that a run seeds


class Retries:
    """Counts the failures of one call. It is made again until `timeout` seconds after the first,
    so that a server has the time to come back."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._first: float | None = None
        self.failures = 0

    def rest(self) -> float | None:
        """Notes a failure, and returns the seconds before the next try; None where there is none.
        The last try is at the end of the timeout."""
        now = time.monotonic()
        self._first = now if self._first is None else self._first
        self.failures += 1
        left = self._first + self._timeout - now
        return min(backoff(self.failures - 1), left) if left > 0 else None


def is_final(error: HttpError) -> bool:
    """Tells whether another try would fail as well: the server refuses the call (4xx but 429)."""
    return error.status is not None and error.status < 500 and error.status != TOO_MANY


def backoff(attempt: int) -> float:
    """Returns the seconds before the next try: they double, and a random part of up to a half is
    left out, so that clients that failed together do not come back together."""
    return min(RETRY_DELAY * 2**attempt, MAX_RETRY_DELAY) * _jitter.uniform(0.5, 1.0)
