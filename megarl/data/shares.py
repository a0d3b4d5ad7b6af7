"""Deals out draws to several sources by their weights, exactly."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction


class Shares:
    """Says, draw after draw, from which source to draw next.

    After any number of draws n, source i had floor(n * share_i) of them or one more: the quota
    method of M. Balinski and H. Young (American Mathematical Monthly 82, 1975). `counts`, how many
    draws each source had, are all of its state.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Takes the weights of the sources, all above 0; a share is a weight over their sum."""
        exact = {name: Fraction(weight) for name, weight in weights.items()}
        self._shares = {name: weight / sum(exact.values()) for name, weight in exact.items()}
        self.counts = dict.fromkeys(exact, 0)

    def next(self) -> str:
        """Returns the source of the next draw, which is counted as made."""
        n = sum(self.counts.values()) + 1
        # a source is owed a draw while it has fewer than its share of n; of these, the one whose
        # share is the largest for what it would have
        owed = [name for name, share in self._shares.items() if self.counts[name] < share * n]
        found = max(owed, key=lambda name: self._shares[name] / (self.counts[name] + 1))
        self.counts[found] += 1
        return found
