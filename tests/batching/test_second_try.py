"""One more try after memory ran out."""

import gc
import weakref

import pytest
import torch

from brim.batching import first_line, second_try


class Action:
    def __init__(self, *errors):
        self.errors, self.held, self.alive = list(errors), None, []

    def __call__(self):
        if self.held is not None:
            self.alive.append(self.held() is not None)
        tensor = torch.zeros(3)
        self.held = weakref.ref(tensor)
        if self.errors:
            raise self.errors.pop(0)
        return "done"


OUT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes.\nFrames follow."


def test_what_fails_once_is_done_and_the_first_try_holds_nothing():
    told, action = [], Action(RuntimeError(OUT))
    gc.disable()
    try:
        assert second_try(action, on_failure=told.append) == "done"
    finally:
        gc.enable()
    assert told == ["DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."]
    assert action.alive == [False]


def test_the_second_failure_passes_through():
    with pytest.raises(MemoryError, match="again"):
        second_try(Action(MemoryError(), MemoryError("again")))


def test_other_errors_are_not_tried_again():
    action = Action(RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        second_try(action)
    assert action.alive == []


def test_an_error_without_words_is_named():
    assert first_line(MemoryError()) == "MemoryError"
