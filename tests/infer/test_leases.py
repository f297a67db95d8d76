"""Leases: each unit once, short ones at the end; whoever dies, and whatever kills, found by a team that is none."""

import random

import numpy as np
import pytest
from hypothesis import given, strategies as st

from brim.errors import BrimError, InputError
from brim.infer import Leases, Members, Work
from brim.session import say_nothing


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=200),
    st.integers(1, 5),
    st.integers(1, 20),
    st.floats(0.0, 10_000.0),
)
def test_leases_are_each_unit_once_the_most_costly_first_and_no_longer_than_asked(costs, members, least, most_cost):
    costs = np.array(costs, dtype=np.float64)
    leases, taken = Leases(costs, members), []
    while (lease := leases.take(least_units=least, most_cost=most_cost)) is not None:
        left = len(costs) - sum(map(len, taken))
        share = costs[np.setdiff1d(np.arange(len(costs)), np.concatenate([*taken, np.array([], dtype=int)]))].sum()
        few = min(least, -(-left // members))
        assert len(lease.units) >= few
        assert len(lease.units) == few or costs[lease.units].sum() <= min(most_cost, share / (2 * members)) + 1e-6
        taken.append(lease.units)
    assert sorted(np.concatenate(taken)) == list(range(len(costs)))
    assert (np.diff(costs[np.concatenate(taken)]) <= 0).all()


class Team:
    """Members that do as they are told at once, but die now and then, and on poison."""

    def __init__(self, size, *, seed=0, share=0.0, poison=(), hangs=(), fails=None):
        self.size, self.random, self.share = size, random.Random(seed), share
        self.poison, self.fails, self.num_starts = set(poison), fails or {}, 0
        self.hangs, self.now_s, self.ended = set(hangs), 0.0, []
        self.said = {member: [] for member in range(size)}

    def start(self, member):
        self.num_starts += 1
        self.said[member].append(self.fails.get(member, {"asks": True}))

    def send(self, member, message):
        said = self.said[member]
        if "job" in message:
            said.append({"note": "planned", "kind": "note", "topic": "", "short": ""})
            if self.random.random() < self.share:
                said.append(BrimError(what="died as it planned"))
                return
            said.append({"ready": {"by": member}, "least_units": 3, "predicted_s": None})
            return
        units = message["lease"]["units"]
        for place, unit in enumerate(units):
            if unit in self.hangs:
                return
            if unit in self.poison or self.random.random() < self.share:
                said.append(BrimError(what=f"died on {unit}"))
                return
            said.append({"units": [place], "values": [unit * unit]})
        said.append({"finished": 0.1 * len(units)})

    def end(self, member):
        self.ended.append((member, self.now_s))
        self.said[member].clear()

    def heard(self):
        self.now_s += 0.5
        member = self.random.randrange(self.size)
        said, self.said[member] = self.said[member], []
        yield from ((member, each) for each in said)


def worked(team, num_units, say=say_nothing):
    kept, lost = {}, []

    def keep(units, values):
        assert kept.keys().isdisjoint(units)
        kept.update(zip(units, values, strict=True))

    work = Work(
        costs=np.arange(num_units, 0, -1.0),
        job=lambda first: {},
        lease=lambda units: {"units": units.tolist()},
        keep=keep,
        lose=lambda unit, error: lost.append(unit),
    )
    members = Members(team, say=say, clock=lambda: getattr(team, "now_s", 0.0))
    for _ in range(2):  # one kind of work after the other
        kept.clear()
        lost.clear()
        members.begin(work)
        members.run()
    return kept, sorted(lost)


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 60), st.sets(st.integers(0, 59), max_size=3))
def test_what_kills_is_lost_and_nothing_else_whoever_dies_by_accident(seed, size, num_units, poison):
    poison = sorted(each for each in poison if each < num_units)
    team = Team(size, seed=seed, share=0.02 if size > 1 else 0.0, poison=poison)
    kept, lost = worked(team, num_units)
    assert set(poison) <= set(lost)
    assert kept == {unit: unit * unit for unit in range(num_units) if unit not in lost}
    assert len(lost) <= len(poison) + 1  # two accidents in a row over one unit


def test_a_member_that_cannot_start_leaves_the_work_to_others_and_the_last_says_why():
    bad = InputError(what="no model here")
    team = Team(2, fails={0: bad})
    kept, _ = worked(team, 10)
    assert (len(kept), team.num_starts) == (10, 2)
    with pytest.raises(InputError, match="no model here"):
        worked(Team(2, fails={0: bad, 1: bad}), 10)
    team = Team(2, fails={0: BrimError(what="killed"), 1: BrimError(what="killed")})
    with pytest.raises(BrimError, match="killed"):
        worked(team, 10)
    assert team.num_starts == 6


def test_a_member_that_says_nothing_for_too_long_is_ended_and_its_units_are_dealt_again():
    """Ten times what its lease is predicted to take, a minute at least; an hour where nothing is predicted."""
    said = []
    team = Team(2, hangs=[30])
    kept, lost = worked(team, 40, say=said.append)
    assert (sorted(kept), lost) == ([unit for unit in range(40) if unit != 30], [30])
    assert {member for member, _ in team.ended} == {0, 1}
    first, *_, last = (at_s for _, at_s in team.ended)
    assert 60 < first < last
    assert any("said nothing for more than 1 min 0 s (working), and was ended; it is" in line for line in said)
    assert said.count("planned") == 2  # of each work once, though several begin


def test_no_member_is_ended_for_the_time_in_which_the_coordinator_itself_was_stopped():
    team = Team(1)
    team.heard = lambda heard=team.heard: setattr(team, "now_s", team.now_s + 10**6) or heard()
    assert len(worked(team, 30)[0]) == 30
    assert team.ended == []
