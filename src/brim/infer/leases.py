"""Deal units of work to members, processes that each hold a model, and take back what each of them finishes.

A lease is a part of the units, the most costly first: about a minute of work, less at first and towards the end, so
that no member waits long for another. What a member has sent back is kept; its death costs it the rest of its lease,
which goes to another one. Units on which members keep dying are divided until the unit is known that does it.

Nothing here knows what a unit is, or how members are started and talked to: see Work and Team.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brim.errors import BrimError
from brim.notes import Note, Say
from brim.units import format_seconds

Message: TypeAlias = Mapping[str, Any]  # of texts, numbers, lists and mappings of them, as JSON has it

_FIRST_S, _LEASE_S = 15.0, 60.0  # of a member's first lease, as predicted, and of the others

_PARTS = 2  # a lease is at most one of so many parts, a member, of what is left

_MOST_FAILURES = 3  # of a member without a unit in between; then it is given up

_MOST_DEATHS = 20  # of all members without a unit in between, and these: 2^17 units are divided into single ones then

# What a member may be silent for: so many times what its lease is predicted to take, and at least a minute. While it
# loads, or where nothing is predicted, an hour: weights may come over a network.
_PATIENCE, _LEAST_SILENCE_S, _MOST_SILENCE_S = 10, 60.0, 3600.0

_TICK_S = 1.0  # the longest time between two looks that counts: this process may have been stopped itself


class Team(Protocol):
    """Start members and talk with them."""

    @property
    def size(self) -> int:
        """Return how many members there are; they are numbered from 0."""
        ...

    def start(self, member: int) -> None:
        """Start a member; again, where it has ended."""
        ...

    def send(self, member: int, message: Message) -> None:
        """Send a message to a member that runs; without waiting, since it may be one that does not read."""
        ...

    def end(self, member: int) -> None:
        """End a member at once, and without waiting for long. Nothing is heard of it any more until it is started."""
        ...

    def heard(self) -> Iterable[tuple[int, Message | BrimError]]:
        """Wait a little; yield what members have said since, and how one has ended."""
        ...


@dataclass(frozen=True, kw_only=True)
class Work:
    """Describe one kind of work on numbered units."""

    costs: NDArray[np.float64]  # of each unit, in any measure
    job: Callable[[Message | None], Message]  # what a member prepares by; of the first: what it said of itself since
    lease: Callable[[NDArray[np.intp]], Message]  # what a member needs for these units
    # Gets units and what was said of them (`values`), each unit once; of a unit that is not whole yet no units.
    keep: Callable[[Sequence[int], Any], None]
    lose: Callable[[int, BrimError], None]  # gets a unit on which members have died; may raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Hold units that are dealt together. num_deaths: of members that had them, as far as it matters."""

    units: NDArray[np.intp]
    num_deaths: int = 0

    def after_a_death(self, left: NDArray[np.intp]) -> list[Lease]:
        """Return how the units that are left are dealt again: together once, then in halves."""
        parts = np.array_split(left, 2) if self.num_deaths and len(left) > 1 else [left]
        return [Lease(units=part, num_deaths=1) for part in parts]


class Leases:
    """Cut units into leases, the most costly first."""

    def __init__(self, costs: NDArray[np.float64], members: int) -> None:
        self._order, self._members = np.argsort(-costs, kind="stable"), members
        self._before = np.concatenate([[0.0], np.cumsum(costs[self._order])])  # costs before each place
        self._next = 0
        self._again: deque[Lease] = deque()

    def put_back(self, leases: Iterable[Lease]) -> None:
        """Take leases that are dealt next."""
        self._again.extend(leases)

    def take(self, *, least_units: int, most_cost: float) -> Lease | None:
        """Return the next lease; None where all units are dealt.

        least_units: what a member runs together. most_cost: that it does in the time that a lease should take.
        """
        if self._again:
            return self._again.popleft()
        first, num_left = self._next, len(self._order) - self._next
        if not num_left:
            return None
        share = (self._before[-1] - self._before[first]) / (_PARTS * self._members)
        end = int(np.searchsorted(self._before, self._before[first] + min(most_cost, share), side="right")) - 1
        self._next = min(max(end, first + min(least_units, -(-num_left // self._members))), len(self._order))
        return Lease(units=self._order[first : self._next])


State: TypeAlias = Literal["new", "starting", "asking", "preparing", "ready", "working", "gone"]


@dataclass(slots=True, kw_only=True)
class _Member:
    """Track one member. What it has done counts over all its lives."""

    number: int
    state: State = "new"
    lease: Lease | None = None
    left: set[int] = field(default_factory=set)  # places in the lease
    least_units: int = 1
    cost_per_s: float = 0.0  # as predicted, then as measured; 0: not known
    lease_s: float = _FIRST_S
    silent_s: float = 0.0
    most_silent_s: float = _MOST_SILENCE_S
    num_failures: int = 0  # in a row
    num_starts: int = 0
    num_units: int = 0
    num_leases: int = 0
    busy_s: float = 0.0


class Members:
    """Let a team do one kind of work after the other. A member that dies is started again, a few times.

    What a member says: `asks` for a job; is `ready`, with what there is to say of it, how many units it runs together
    (`least_units`) and the seconds that it predicts for its share (`predicted_s`); has `values` of `units`, places in
    its lease (of none where it is a part of one); has `finished` a lease after so many seconds; `note`. What it hears:
    a `job`, `lease`s, another job. One that should say something and does not is ended.

    most_silent_s: for which it may say nothing, instead of what is predicted. clock: in seconds.
    """

    def __init__(
        self,
        team: Team,
        *,
        say: Say,
        most_silent_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._team, self._say, self._most_silent_s, self._clock = team, say, most_silent_s, clock
        self._looked_s = clock()
        self._said: set[str] = set()  # notes on the work
        self._members = [_Member(number=number) for number in range(team.size)]
        self._num_deaths = 0  # since a unit was kept
        self._work: Work
        self._leases: Leases
        self._about: Message | None = None
        self._num_left, self._deals = 0, False

    def begin(self, work: Work) -> Message:
        """Wait until a member has prepared the work, and return what it says of itself. Others follow it.

        Raises the error of the last member that failed, once all have.
        """
        self._reset(work)
        while self._about is None:
            self._go_on()
        return self._about

    def _reset(self, work: Work) -> None:
        self._work, self._about, self._leases = work, None, Leases(work.costs, len(self._members))
        self._num_left, self._deals, self._looked_s = len(work.costs), False, self._clock()
        self._said.clear()
        if all(member.state == "gone" for member in self._members):  # after their last unit: another work, another try
            for member in self._members:
                member.state, member.num_failures = "new", 0
        for member in self._members:
            member.num_units = member.num_leases = 0
            member.busy_s = member.cost_per_s = 0.0
            member.lease_s = _FIRST_S
            if member.state == "new":
                self._start(member)
            elif member.state != "gone":
                member.state = "asking" if member.state in ("ready", "asking") else "starting"

    def run(self) -> None:
        """Return once each unit was kept or lost, and no member works. Raises what a member raised at work."""
        self._deals = True
        while self._num_left or any(member.state == "working" for member in self._members):
            self._go_on()

    def facts(self, seconds: float) -> list[dict[str, Any]]:
        """Return what each member has done in this time since `begin`."""
        return [
            {
                "rows": member.num_units,
                "leases": member.num_leases,
                "busy": member.busy_s / seconds if seconds else 0.0,
                "starts": member.num_starts,
            }
            for member in self._members
        ]

    def _go_on(self) -> None:
        for member in self._members:
            self._serve(member)
        for number, message in self._team.heard():
            if isinstance(message, BrimError):
                self._end(self._members[number], message)
            else:
                self._take(self._members[number], message)
        self._end_silent()

    def _start(self, member: _Member) -> None:
        member.state, member.num_starts = "starting", member.num_starts + 1
        self._expect(member, None)
        self._team.start(member.number)

    def _serve(self, member: _Member) -> None:
        """Send a member what it can begin with. The first prepares alone: the others take its choices."""
        if member.state == "asking":
            if self._about is not None or all(each.state != "preparing" for each in self._members):
                member.state = "preparing"
                self._expect(member, None)
                self._team.send(member.number, {"job": self._work.job(self._about)})
        elif member.state == "ready" and self._deals:
            most_cost = member.cost_per_s * member.lease_s
            member.lease = self._leases.take(least_units=member.least_units, most_cost=most_cost)
            if member.lease is not None:
                member.state, member.left = "working", set(range(len(member.lease.units)))
                cost = float(self._work.costs[member.lease.units].sum())
                self._expect(member, cost / member.cost_per_s if member.cost_per_s else None)
                self._team.send(member.number, {"lease": self._work.lease(member.lease.units)})

    def _expect(self, member: _Member, seconds: float | None) -> None:
        """Set for how long a member may say nothing, by what it is to do."""
        predicted_s = _MOST_SILENCE_S if seconds is None else max(_LEAST_SILENCE_S, _PATIENCE * seconds)
        member.silent_s, member.most_silent_s = 0.0, self._most_silent_s or predicted_s

    def _end_silent(self) -> None:
        """End the members that have said nothing for too long, as if they had died."""
        now = self._clock()
        passed_s, self._looked_s = min(now - self._looked_s, _TICK_S), now
        for member in self._members:
            if member.state not in ("starting", "preparing", "working"):
                continue
            member.silent_s += passed_s
            if member.silent_s > member.most_silent_s:
                self._team.end(member.number)
                limit = f"more than {format_seconds(member.most_silent_s)}"
                what = f"process {member.number} said nothing for {limit} ({member.state}), and was ended"
                fix = "see whether its device, or the disk, hangs; BRIM_PEER_TIMEOUT_S sets the time"
                self._end(member, BrimError(what=what, fix=fix))

    def _take(self, member: _Member, message: Message) -> None:
        member.silent_s = 0.0
        if "asks" in message or ("ready" in message and member.state == "starting"):  # for the job before
            member.state = "asking"
        elif "ready" in message:
            member.state, member.least_units = "ready", message["least_units"]
            if message["predicted_s"]:
                member.cost_per_s = float(self._work.costs.sum()) / len(self._members) / message["predicted_s"]
            self._about = message["ready"] if self._about is None else self._about
        elif "values" in message:
            self._keep(member, message["units"], message["values"])
        elif "finished" in message:
            assert member.lease is not None, "it works on one"
            assert not member.left, "to its end"
            member.state, member.num_leases = "ready", member.num_leases + 1
            member.busy_s += message["finished"]
            member.lease_s = _LEASE_S
            member.cost_per_s = float(self._work.costs[member.lease.units].sum()) / max(message["finished"], 1e-3)
        elif "note" in message and (self._about is None or member.state == "working"):
            if self._about is None and message["note"] in self._said:
                return  # of one that has died since
            self._said.add(message["note"])
            self._say(Note(message["note"], kind=message["kind"], topic=message["topic"], short=message["short"]))

    def _keep(self, member: _Member, places: Sequence[int], values: Any) -> None:
        assert member.lease is not None, "it works on one"
        self._work.keep(member.lease.units[np.asarray(places, dtype=np.intp)].tolist(), values)
        member.left.difference_update(places)
        member.num_units += len(places)
        self._num_left -= len(places)
        if places:
            member.num_failures = self._num_deaths = 0

    def _end(self, member: _Member, error: BrimError) -> None:
        """Start a member again that has ended, unless it does so each time or would say the same."""
        is_final = type(error) is not BrimError  # of bad input, of a row that does not fit: no accident
        if is_final and member.state == "working":
            raise error
        self._num_deaths += 1
        if member.lease is None or not member.lease.num_deaths:
            member.num_failures += 1
        what, had_units = str(error).splitlines()[0], bool(member.left)
        self._take_back(member, error)
        if is_final or member.num_failures >= _MOST_FAILURES:
            member.state = "gone"
        most_deaths = _MOST_DEATHS + _MOST_FAILURES * len(self._members)
        if self._num_left and (self._num_deaths >= most_deaths or all(each.state == "gone" for each in self._members)):
            raise error
        if member.state == "gone":
            self._say(f"process {member.number} is given up, the others go on: {what}")
        elif self._num_left:
            self._say(
                f"{what}; it is started again" + (", and its unfinished rows are dealt again" if had_units else "")
            )
            self._start(member)
        else:
            member.state = "new"  # for the next work

    def _take_back(self, member: _Member, error: BrimError) -> None:
        """Take back what is left of a member's lease; a unit alone, on which two have died, is lost."""
        lease, left = member.lease, np.array(sorted(member.left), dtype=np.intp)
        member.lease, member.left = None, set()
        if lease is None or not len(left):
            return
        if lease.num_deaths and len(left) == 1:
            self._num_left -= 1
            self._work.lose(int(lease.units[left[0]]), error)
        else:
            self._leases.put_back(lease.after_a_death(lease.units[left]))
