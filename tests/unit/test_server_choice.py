"""The choice of a server: an episode stays with its home, the rest goes where the least is left."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.episode_context import Home
from megarl.rollout.servers import Server, ServerChoice

AFFINITY = 2.0
TOKENS = st.integers(1, 4000)


def servers(*loads: float) -> list[Server]:
    return [Server(f"s{i}:1", outstanding=load) for i, load in enumerate(loads)]


def choice(affinity: float = AFFINITY) -> ServerChoice:
    return ServerChoice(affinity=affinity)


@given(st.lists(TOKENS, min_size=1, max_size=6), TOKENS)
def test_a_request_without_a_home_goes_where_the_fewest_tokens_are(loads, tokens):
    given_servers = servers(*loads)
    assert choice().pick(given_servers, tokens).outstanding == min(loads)


@given(st.lists(TOKENS, min_size=1, max_size=400))
def test_no_server_has_more_than_one_request_over_another(requests):
    """What load spreads by is tokens: the gap between servers is at most the largest request."""
    three, chooser = servers(0, 0, 0), choice()
    for tokens in requests:
        chooser.pick(three, tokens).outstanding += tokens
    loads = [s.outstanding for s in three]
    assert max(loads) - min(loads) <= max(requests)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("ask", "ask", "ask", "load", "lose", "silence", "rest", "heal")),
        st.integers(0, 3),  # an episode, or a server
        TOKENS,
    ),
    max_size=120,
)


@given(STEPS, st.sampled_from((0.0, 1.0, AFFINITY, 10.0)))
def test_an_episode_moves_only_where_its_server_is_lost_ailing_or_overloaded(steps, affinity):
    everyone, chooser = servers(0, 0, 0, 0), choice(affinity)
    homes, here, lost = [Home() for _ in range(4)], [None] * 4, set()
    for what, i, tokens in steps:
        present = [s for s in everyone if s not in lost]
        if what == "ask":
            before, loads = here[i], {s: s.outstanding for s in everyone}
            least_ill = min((s.silent, s.rests) for s in present)
            well = [s for s in present if (s.silent, s.rests) == least_ill]
            least = min(loads[s] for s in well)
            here[i] = chooser.pick(present, tokens, home=homes[i])
            assert homes[i].address == (here[i].address if affinity else None)
            if affinity and before is not None and here[i] is not before:
                overloaded = loads[before] > affinity * (least + tokens)
                assert before in lost or before not in well or overloaded
            if affinity and before in well and before not in lost and here[i] is before:
                assert loads[before] <= affinity * (least + tokens) or loads[before] == least
            here[i].outstanding += tokens
        elif what == "load":
            everyone[i].outstanding = float(tokens)
        elif what == "lose" and len(present) > 1:
            lost.add(everyone[i])
        elif what == "silence":
            everyone[i].silent = True
        elif what == "rest":
            everyone[i].rests_until = time.monotonic() + 1000
        elif what == "heal":
            lost.discard(everyone[i])
            everyone[i].silent, everyone[i].rests_until = False, 0.0


def test_a_home_that_just_failed_is_given_up_while_there_is_another():
    first, second = servers(0, 500)
    home = Home(first.address)
    assert choice().pick([first, second], 10, home=home, avoid=[first.address]) is second
    assert home.address == second.address
    assert choice().pick([first], 10, home=home, avoid=[first.address]) is first


def test_sessions_of_a_group_begin_where_the_group_is_and_move_by_themselves():
    one, two = pair = servers(100, 0)
    group = Home(one.address)
    sessions = [Home(near=group) for _ in range(2)]
    for session in sessions:
        assert choice().pick(pair, 100, home=session) is one
    one.outstanding = 1000
    assert choice().pick(pair, 100, home=sessions[0]) is two
    assert sessions[0].address == two.address
    assert sessions[1].address == group.address == one.address


def test_the_first_session_of_a_group_settles_the_group():
    group = Home()
    Home(near=group).settle("s1:1")
    assert Home(near=group).first_choice == "s1:1"


def test_the_expected_length_follows_the_answers():
    chooser = choice()
    assert chooser.expected(50, 1000) == 1050
    for _ in range(1000):
        chooser.learn(100, 1000)
    assert chooser.expected(50, 1000) == pytest.approx(150, rel=1e-3)
    chooser.learn(5, 0)  # an answer that had no budget says nothing
    assert chooser.expected(50, 1000) == pytest.approx(150, rel=1e-3)
