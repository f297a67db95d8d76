"""Engines timed on a sample: by a clock that the engines themselves advance."""

import numpy as np
import pytest

from brim.data.tokens import TokenRow, TokenRows
from brim.errors import BrimError, InputError, Problem
from brim.infer.engines import Finished, Response
from brim.planning.engines import time_engines

PROMPTS = TokenRows.from_rows(
    TokenRow(key=key, input_ids=np.ones(3, np.int32), supervised=np.zeros(3, np.bool_)) for key in range(4)
)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Engine:
    """Takes so many seconds for each row."""

    def __init__(self, clock, row_s, says=7):
        self.clock, self.row_s, self.says, self.num_written = clock, row_s, says, 0

    def run(self, prompts, *, on_finished):
        for position in range(len(prompts)):
            self.clock.now += self.row_s
            self.num_written += 1
            response = Response(token_ids=[self.says], finish_reason="length")
            on_finished([Finished(position=position, response=response)])


class Refusing:
    def run(self, prompts, *, on_finished):
        raise InputError(Problem(what="not with these settings"))


def timed(engines, clock, *, allowed_s=100.0, must_agree=True):
    return time_engines(list(engines), engines.__getitem__, PROMPTS, clock, allowed_s=allowed_s, must_agree=must_agree)


def test_each_is_timed_after_one_prompt_to_warm_up():
    clock = Clock()
    engines = {"slots": Engine(clock, 2.0), "paged": Engine(clock, 1.0), "static": Engine(clock, 0.5)}
    found = timed(engines, clock)
    assert found.seconds == {"slots": 8.0, "paged": 4.0, "static": 2.0}
    assert found.dropped == {}
    assert {engine.num_written for engine in engines.values()} == {1 + 4}


def test_a_slower_one_is_stopped_on_the_way():
    clock = Clock()
    engines = {"slots": Engine(clock, 1.0), "static": Engine(clock, 3.0)}
    found = timed(engines, clock)
    assert found.seconds == {"slots": 4.0}
    assert found.dropped == {"static": "slower, and stopped on the way"}
    assert engines["static"].num_written == 1 + 2  # after two rows it has taken six seconds


def test_the_others_have_no_more_time_than_is_allowed():
    clock = Clock()
    engines = {"slots": Engine(clock, 1.0), "static": Engine(clock, 0.9)}
    assert timed(engines, clock, allowed_s=5.0).dropped == {"static": "slower, and stopped on the way"}


def test_one_that_says_other_things_is_dropped_where_it_must_not():
    clock = Clock()
    engines = {"slots": Engine(clock, 1.0), "paged": Engine(clock, 0.5, says=8)}
    assert timed(engines, clock).dropped == {"paged": "its responses differ, and in fp32 they must not"}
    assert timed(engines, clock, must_agree=False).seconds["paged"] == 2.0


def test_one_that_fails_is_dropped_but_not_the_first():
    clock = Clock()
    assert timed({"slots": Engine(clock, 1.0), "x": Refusing()}, clock).dropped == {"x": "not with these settings"}
    with pytest.raises(BrimError, match="not with these settings"):
        timed({"x": Refusing()}, clock)
