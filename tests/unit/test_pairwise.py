"""tests/pairwise.py: every possible pair is there, in few rows, always the same ones; what is drawn
by one word is drawn again by it."""

from __future__ import annotations

from itertools import combinations, product

from tests.pairwise import Row, all_pairs, drawn

AXES = dict(a="abcdefg", b=range(9), c=("x", "y", "z"), d=(False, True), e=(False, True))


def odd(row: Row) -> bool:
    return not (row.get("a") == "c" and row.get("b", 0) > 3)


def pairs(rows: list[Row]) -> set[tuple[object, ...]]:
    return {pair for row in rows for pair in combinations(row.items(), 2)}


def test_every_pair_is_covered_by_few_rows() -> None:
    rows = all_pairs(AXES)
    assert all(list(row) == list(AXES) for row in rows)
    assert pairs(rows) == pairs([dict(zip(AXES, v)) for v in product(*AXES.values())])
    assert 63 <= len(rows) <= 70  # at least one for each pair of the two longest axes
    assert rows == all_pairs(AXES)


def test_impossible_pairs_are_left_out_and_all_others_covered() -> None:
    rows = all_pairs(AXES, odd)
    assert all(odd(row) for row in rows)
    everything = [dict(zip(AXES, v)) for v in product(*AXES.values())]
    assert pairs(rows) == pairs([row for row in everything if odd(row)])


def test_two_axes_are_their_product() -> None:
    rows = all_pairs(dict(a=(1, 2), b=("x", "y")))
    assert rows == [dict(a=a, b=b) for a in (1, 2) for b in ("x", "y")]


def test_a_word_draws_the_same_rows_and_other_words_others() -> None:
    rows = range(1000)
    found = {word: drawn(rows, word, 50) for word in ("b3082c90", "f4a83693", "")}
    for word, some in found.items():
        assert some == drawn(rows, word, 50) == sorted(set(some)) and len(some) == 50
    assert len(set(map(tuple, found.values()))) == 3
    seen = set[int]().union(*(drawn(rows, str(n), 50) for n in range(400)))
    assert seen == set(rows)  # each is left out with a chance of 1e-9
    assert drawn(rows[:7], "a", 50) == list(rows[:7])
