"""A step that runs out of memory begins anew, in smaller pieces, and ends as if it had not."""

import gc
import re
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from brim.batching import ByRows, GradientStep, StepOutcome
from brim.batching.step import BufferKeeper
from brim.errors import OutOfMemoryError

LENGTHS = np.array([5, 3, 8, 2, 7, 4, 6, 3])
MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation."


class Fails(torch.autograd.Function):
    """Forwards its input, and fails in the pass of which `fail` says so."""

    @staticmethod
    def forward(ctx, x, fail):
        ctx.fail = fail
        fail("forward")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.fail("backward")
        return gradient, None


class Task:
    """A regression whose pass number `n` (from 0, replays counted on) fails where `failures` says."""

    def __init__(
        self, max_rows, failures=(), error=torch.OutOfMemoryError, dropout=0.0, checkpointed=False, middle=nn.Tanh
    ):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), middle(), nn.Dropout(dropout), nn.Linear(16, 2))
        self.inputs, self.targets = torch.randn(len(LENGTHS), 6), torch.randn(len(LENGTHS), 2)
        self.failures, self.error, self.checkpointed = dict(failures), error, checkpointed
        self.num_passes, self.rows, self.cutter = 0, (), ByRows(max_rows=max_rows)
        self.events = []
        self.born = []  # weak references to what each pass makes
        self.alive_at_start = []
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = step_of(self, module=self.model)

    def backward(self, rows):
        if all(parameter.grad is None for parameter in self.model.parameters()):  # a pass begins
            self.alive_at_start.append(sum(reference() is not None for reference in self.born))
        number, self.num_passes = self.num_passes, self.num_passes + 1
        self.rows = rows

        def fail(place):
            if self.fails(number, place):
                raise self.error(MEMORY)

        hidden = self.model[:3](self.inputs[rows])
        if self.checkpointed:
            hidden = checkpoint(lambda x: Fails.apply(x, fail).tanh(), hidden, use_reentrant=False)
        else:
            hidden = Fails.apply(hidden, fail)
        output = self.model[3](hidden)
        loss = (output - self.targets[rows]).square().sum() / len(LENGTHS)
        share = loss.detach()
        self.born += [weakref.ref(tensor) for tensor in (hidden, output, loss, share)]
        loss.backward()
        return share

    def fails(self, number, place):
        return self.failures.get(number) == place

    def train(self, num_steps=3):
        """The losses; and the gradients of each step, as one vector."""
        losses, gradients = [], []
        for _ in range(num_steps):
            losses.append(self.step.run(LENGTHS).loss)
            gradients.append(torch.cat([p.grad.flatten() for p in self.model.parameters()]))
            self.optimizer.step()
        return losses, gradients

    def kinds(self):
        return [event["event"] for event in self.events]

    def rows_that_failed(self):
        return [event["rows"] for event in self.events if event["event"] == "oom"]


def assert_same(found, expected):
    assert found[0] == expected[0]
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))


def num_clean_steps(task):
    return task.cutter.state()["cap"]["num_clean_steps"]


def step_of(task, backward=None, **settings):
    return GradientStep(
        cutter=task.cutter,
        parameters=list(task.model.parameters()),
        backward=backward or task.backward,
        on_event=task.events.append,
        **settings,
    )


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_given_the_same_cuts_all_is_bit_equal_and_as_many_random_numbers_are_drawn(where, dropout):
    found = []
    for task in (Task(2, dropout=dropout), Task(4, failures={1: where}, dropout=dropout)):
        torch.manual_seed(1)
        found.append((*task.train(), torch.rand(3)))
    assert_same(*found)
    assert torch.equal(found[0][2], found[1][2])


def test_a_failure_of_what_checkpointing_computes_anew_is_of_the_backward_pass():
    clean = Task(max_rows=2, dropout=0.5, checkpointed=True).train()
    task = Task(max_rows=4, dropout=0.5, checkpointed=True)
    seen = []

    def fail_the_second_time(number, place):
        seen.append((number, place))
        return seen.count((1, "forward")) == 2 and (number, place) == (1, "forward")

    task.fails = fail_the_second_time
    assert_same(task.train(), clean)
    assert task.events[0]["where"] == "backward"


def test_memory_may_run_out_twice_in_a_row_and_each_row_counts_once():
    clean = Task(max_rows=1).train()
    task = Task(max_rows=4, failures={0: "forward", 2: "backward"})
    outcome = task.step.run(LENGTHS)
    assert outcome.num_out_of_memory == 2
    assert sorted(row for part in outcome.parts for row in part.micro_batch.rows) == list(range(8))
    assert outcome.loss == clean[0][0] == pytest.approx(sum(part.loss.item() for part in outcome.parts))
    assert task.kinds() == ["oom", "cap", "replay"] * 2
    assert [event["micro_batch"] for event in task.events if event["event"] == "oom"] == [1, 2]
    assert (task.cutter.max_rows, num_clean_steps(task)) == (1, 0)
    task.optimizer.step()
    assert task.train(2)[0] == clean[0][1:]
    assert task.step.run(LENGTHS).num_out_of_memory == 0
    assert num_clean_steps(task) == 3


def test_a_row_that_is_alone_gets_one_more_try_and_what_fewer_rows_never_cure_is_raised(monkeypatch):
    """oneDNN's message has several causes; in the end it was not memory, of which there is plenty."""
    clean = Task(max_rows=1).train()
    task = Task(max_rows=1, failures={0: "forward", 9: "backward"})  # row 2, and in the next pass the second longest
    assert task.train()[0] == clean[0]
    assert task.kinds() == ["oom", "replay"] * 2
    monkeypatch.setattr("brim.batching.memory.oom._host_room_bytes", lambda: 80 << 30)
    task = Task(max_rows=8, error=lambda _: RuntimeError("could not create a primitive"))
    task.fails = lambda _, place: place == "forward" and 2 in task.rows
    with pytest.raises(RuntimeError, match=r"^could not create a primitive$"):
        task.train()
    assert task.rows_that_failed() == [8, 4, 2, 1]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_row_that_never_fits_is_named(where):
    task = Task(max_rows=8)
    task.fails = lambda _, place: place == where and 2 in task.rows
    with pytest.raises(OutOfMemoryError) as raised:
        task.train()
    words = rf"^row 2 of the batch \(8 tokens\) ran out of memory twice in the {where} pass.*: CUDA out of memory\. .*\n  fix: a shorter row"
    assert re.match(words, str(raised.value))
    assert task.rows_that_failed() == [8, 4, 2, 1, 1]
    assert raised.value.exit_code == 1
    assert all(parameter.grad is None for parameter in task.model.parameters())
    assert all(reference() is None for reference in task.born)
    named = step_of(task, name_row=lambda position: f"row {1000 + position} of data.jsonl")
    with pytest.raises(OutOfMemoryError, match=r"row 1002 of data\.jsonl \(8 tokens\) ran out of memory twice"):
        named.run(LENGTHS)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kept", ["itself", "as the cause of another", "as the context of another"])
def test_nothing_of_the_failed_pass_is_left_when_the_next_begins(where, kept):
    """Although someone holds on to the exception, as a debugger would, and nobody collects garbage."""
    task = Task(max_rows=4, failures={1: where, 3: where})
    errors, gradients, inner = [], [], task.backward

    def error(message):
        errors.append(torch.OutOfMemoryError(message))
        return errors[-1]

    def backward(rows):
        gradients.append(sum(parameter.grad is not None for parameter in task.model.parameters()))
        try:
            return inner(rows)
        except torch.OutOfMemoryError as cause:
            if kept == "as the cause of another":
                raise RuntimeError(MEMORY) from cause
            if kept == "as the context of another":
                raise RuntimeError(MEMORY)
            raise

    task.error = error
    gc.disable()
    try:
        step_of(task, backward).run(LENGTHS)
    finally:
        gc.enable()
    assert len(errors) == 2
    assert task.alive_at_start == [0, 0, 0]
    assert gradients == [0, 4, 0, 4] + [0] + [4] * 7


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    "error", [ValueError, KeyboardInterrupt, SystemExit, lambda _: RuntimeError("CUDA error: an illegal memory access")]
)
def test_any_other_exception_passes_through_untouched(error, where):
    raised = error("something else")
    task = Task(max_rows=2, failures={2: where}, error=lambda _: raised)
    with pytest.raises(BaseException) as caught:
        task.train()
    assert caught.value is raised
    assert raised.__cause__ is raised.__context__ is None
    assert (task.events, task.cutter.max_rows, task.num_passes) == ([], 2, 3)


def test_an_error_in_the_handling_around_the_step_keeps_its_traceback():
    def mistake():
        local = SimpleNamespace(value=1)
        raise ValueError(local)

    try:
        mistake()
    except ValueError as outer:
        Task(max_rows=4, failures={0: "forward"}).step.run(LENGTHS)
        frame = outer.__traceback__.tb_next.tb_frame
        assert frame.f_locals["local"].value == 1


# Buffers are where they were when the step began


@pytest.mark.parametrize(("max_rows", "failures"), [(4, [1]), (8, [0, 1]), (8, [0, 2])], ids=str)
def test_running_averages_are_put_back(max_rows, failures):
    """Memory runs out once, twice at the start, or again in the next pass."""
    norm = partial(nn.BatchNorm1d, 16)
    clean = Task(2, middle=norm)
    task = Task(max_rows, failures=dict.fromkeys(failures, "forward"), middle=norm)
    assert_same(task.train(), clean.train())
    assert task.model[1].num_batches_tracked == 12
    for name, buffer in clean.model.named_buffers():
        assert torch.equal(task.model.get_buffer(name), buffer)


class Counter(nn.Module):
    """Adds one to a buffer and to a cache, makes another anew, and leaves one alone."""

    def __init__(self):
        super().__init__()
        self.register_buffer("added", torch.zeros(3))
        self.register_buffer("made", torch.zeros(3))
        self.register_buffer("constant", torch.ones(3))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self):
        self.added += 1
        self.made = self.made + 1
        self.cache += 1


def values(module):
    return {name: buffer.tolist() for name, buffer in module.state_dict().items()}


def test_each_way_to_change_a_buffer_is_undone_in_every_step():
    module = Counter()
    keeper = BufferKeeper(module)
    copied = []
    for number in range(3):
        keeper.save()
        copied.append(sorted(key.name for key in keeper._copies))
        before, added = values(module), module.added
        for _ in range(2):
            module()
            keeper.restore()
            assert values(module) == before
            assert module.added is added
            assert module.cache.item() > 0
        module()
        keeper.done()
        assert not keeper._copies
        assert values(module) == {"added": [number + 1.0] * 3, "made": [number + 1.0] * 3, "constant": [1.0] * 3}
    # What does not change is copied in the first step alone.
    assert copied == [["added", "constant", "made"], ["added", "made"], ["added", "made"]]


def test_a_module_that_begins_to_train_is_looked_at_again():
    module, inputs = nn.BatchNorm1d(2).eval(), torch.randn(8, 2)
    keeper = BufferKeeper(module)
    for training in (False, False, True, True):
        module.train(training)
        before = values(module)
        keeper.save()
        module(inputs)
        assert (values(module) != before) == training
        keeper.restore()
        assert values(module) == before
        module(inputs)
        keeper.done()


def test_the_shares_of_a_thousand_micro_batches_are_added_up_exactly():
    shares = torch.full((1000,), 0.1)
    outcome = StepOutcome(losses=shares, parts=(), num_out_of_memory=0, random_before={})
    assert outcome.loss == pytest.approx(1000 * shares[0].item(), rel=1e-15)
    assert outcome.loss != sum(shares).item()
