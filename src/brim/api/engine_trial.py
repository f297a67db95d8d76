"""Engines timed on a sample of a job's prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from brim.data import TokenRows
from brim.errors import BrimError
from brim.infer.engine import Engine
from brim.infer.response import Finished, Response


@dataclass(slots=True, kw_only=True)
class Timed:
    """Seconds of each engine that wrote the sample to its end, and why the others did not."""

    seconds: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)


class _TooLong(Exception):
    """The time is up."""


def time_engines(
    kinds: Sequence[str],
    make: Callable[[str], Engine],
    prompts: TokenRows,
    clock: Callable[[], float],
    *,
    allowed_s: float,
    must_agree: bool,
) -> Timed:
    """The first engine is the one that others are compared with, and it may take its time.

    make: a new engine of that kind, with a room of its own. must_agree: an engine whose responses differ from the
    first one's is dropped. allowed_s: for all together, after which the others end; none goes on once it is slower.
    """
    timed, expected = Timed(), dict[int, Response]()
    for number, kind in enumerate(kinds):
        left_s = allowed_s - sum(timed.seconds.values()) if number else float("inf")
        limit_s = min(left_s, *timed.seconds.values()) if timed.seconds else left_s
        try:
            engine = make(kind)
            _write(engine, prompts.take([0]), clock, limit_s=float("inf"))  # kernels and buffers come with it
            seconds, responses = _write(engine, prompts, clock, limit_s=limit_s)
        except _TooLong:
            timed.dropped[kind] = "slower, and stopped on the way"
            continue
        except BrimError as error:
            if not number:
                raise
            timed.dropped[kind] = error.problems[0].what
            continue
        if not number:
            expected = responses
        elif must_agree and responses != expected:
            timed.dropped[kind] = "its responses differ, and in fp32 they must not"
            continue
        timed.seconds[kind] = seconds
    return timed


def _write(
    engine: Engine, prompts: TokenRows, clock: Callable[[], float], *, limit_s: float
) -> tuple[float, dict[int, Response]]:
    responses: dict[int, Response] = {}
    started = clock()

    def keep(finished: Sequence[Finished]) -> None:
        responses.update((each.position, each.response) for each in finished)
        if len(responses) < len(prompts) and clock() - started > limit_s:
            raise _TooLong

    engine.run(prompts, on_finished=keep)
    return clock() - started, responses
