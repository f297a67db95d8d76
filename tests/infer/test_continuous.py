"""Continuous batching: whoever is in the batch, a row's text is the one that it has alone; when slots are filled."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tests.infer.families import GREEDY as USUAL, ON_CPU, alone, rows_of, runs_out, texts
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from brim.errors import OutOfMemoryError
from brim.infer.engines import FixedRoom, SlotsEngine, cache, continuous, respond_to, sampling
from brim.infer.engines.cache import RowCache
from brim.infer.engines.continuous import Queue, prefill_groups, rows_to_wait_for
from brim.models.packing import PackedAttention

pytestmark = pytest.mark.run

NEW_TOKENS = 12
ENDS = list(range(30, 60))  # a tenth of the vocabulary: responses end at different lengths
GREEDY = {**USUAL, "max_new_tokens": NEW_TOKENS, "eos_token_id": ENDS}
SAMPLING = {**GREEDY, "do_sample": True, "temperature": 0.8, "top_k": 20}


def engine(model, *, rows=3, prefill_tokens=64, settings=GREEDY, **changes):
    room = FixedRoom(rows, prefill_tokens=prefill_tokens)
    return SlotsEngine(model, settings=settings, room=room, **{"seed": 0, **ON_CPU, **changes})


@pytest.fixture(scope="module")
def expected(model):
    """Each row's text alone, by prompt."""
    known = {}

    def of(prompts):
        for row in prompts:
            if row.key not in known:
                known[row.key] = alone(model, row, most=NEW_TOKENS, end=ENDS)
        return [known[row.key] for row in prompts]

    return of


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
def test_greedy_text_is_that_of_each_row_alone(model, prompts, expected, is_packed):
    packed = PackedAttention(model) if is_packed else None
    for rows, prefill_tokens in [(1, 1), (2, 1000), (3, 40), (5, 64), (11, 5), (64, 10_000)]:
        responses = respond_to(engine(model, rows=rows, prefill_tokens=prefill_tokens, packed=packed), prompts)
        assert texts(responses) == expected(prompts), (rows, prefill_tokens)
    assert len({len(text) for text in texts(responses)}) > 4  # all of one length would not show much
    short = engine(model, settings={**GREEDY, "max_new_tokens": 1})
    assert texts(respond_to(short, prompts)) == [text[:1] for text in expected(prompts)]
    assert short.statistics.num_steps == 0
    for response in responses:
        assert (response.finish_reason == "stop") == (len(response.token_ids) < NEW_TOKENS)
        assert (response.end_id in ENDS) == (response.finish_reason == "stop")


def test_rows_that_wait_take_the_place_of_those_that_have_ended(model, prompts):
    refilled = engine(model, rows=3)
    lengths = [len(text) for text in texts(respond_to(refilled, prompts))]
    longest_first = np.array(lengths)[np.argsort(-prompts.lengths, kind="stable")]
    together = [max(longest_first[start : start + 3]) for start in range(0, len(prompts), 3)]
    assert refilled.statistics.num_steps < sum(together)
    assert refilled.statistics.mean_rows > 2


def test_what_looks_back_sees_no_padding(model, prompts):
    penalty = {**GREEDY, "repetition_penalty": 1.9, "no_repeat_ngram_size": 2, "min_new_tokens": 4}
    one, together = (texts(respond_to(engine(model, rows=rows, settings=penalty), prompts)) for rows in (1, 11))
    assert one == together
    assert min(map(len, one)) >= 4


def test_rows_go_alone_where_a_batch_misleads_the_model(model, prompts, expected):
    """As in transformers' DeepSeek-V3 before 5.17, whose scores change with the padding of the rows beside."""

    def mislead(module, args, output):
        if len(output.logits) > 1:
            output.logits = output.logits.roll(1, dims=-1)
        return output

    made = engine(model, rows=5)
    with model.register_forward_hook(mislead):
        assert texts(respond_to(made, prompts)) == expected(prompts)
    assert made.statistics.most_rows == 1


def reported_once(made, prompts):
    """The texts of a run, in order; each of which was told once."""
    reported = []
    made.run(prompts, on_finished=reported.extend)
    assert sorted(each.position for each in reported) == list(range(len(prompts)))
    by_position = {each.position: each.response.token_ids for each in reported}
    return [by_position[position] for position in range(len(prompts))]


def test_out_of_memory_costs_no_row_and_no_token(model, prompts, expected, freed):
    smaller = []
    freed.clear()
    made = engine(model, rows=8, prefill_tokens=1000, on_smaller=smaller.append)
    with runs_out(model, lambda rows, tokens, number: rows > 3) as limit:
        assert reported_once(made, prompts) == expected(prompts)
    assert limit.times == made.statistics.num_out_of_memory == len(smaller) == len(freed) > 0
    assert made.statistics.most_rows <= 3
    assert "generation: 8 rows of up to" in str(smaller[0])


def test_a_prompt_that_does_not_fit_alone_is_named(model, prompts):
    made = engine(model)
    with (
        runs_out(model, lambda rows, tokens, number: rows > 8 or rows * tokens > 50),
        pytest.raises(OutOfMemoryError, match=r"row 101 .*generation of a single row runs out of memory \(60 tokens\)"),
    ):
        respond_to(made, prompts)
    assert made.statistics.num_out_of_memory >= 2  # it had a second try


def test_memory_that_runs_out_while_a_row_leaves_loses_no_response(model, prompts, expected, monkeypatch):
    copied, copy_row = [], RowCache.remove

    def remove(cache, slot):
        copied.append(slot)
        if len(copied) in (2, 5):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        copy_row(cache, slot)

    monkeypatch.setattr(RowCache, "remove", remove)
    made = engine(model, rows=4)
    assert reported_once(made, prompts) == expected(prompts)
    assert made.statistics.num_out_of_memory == 2


def test_the_cache_is_gone_with_the_last_row(model, prompts, caches):
    """On a GPU the next step of training wants the memory."""
    respond_to(engine(model), prompts)
    assert [cache() for cache in caches] == [None]


class HostWaits(TorchDispatchMode):
    """Note what would let the host wait for a GPU while it is entered: values read, and copies of what the host has."""

    WAITS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "where.ScalarSelf", "where.ScalarOther")
    CALLS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "tensor", "as_tensor")

    def __init__(self):
        super().__init__()
        self.noted, self.copies = Counter(), 0

    def __enter__(self):
        self.calls, self.patch = Calls(self.noted), pytest.MonkeyPatch()
        self.calls.__enter__()
        for module in (cache, sampling):
            self.patch.setattr(module, "moved", self.moved)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.calls.__exit__(*error)
        self.patch.undo()

    def moved(self, *arrays, device):
        self.copies += 1
        return MOVED(*arrays, device=device)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.").removesuffix(".default")
        indices = args[1] if name in ("index.Tensor", "index_put", "index_put_", "_index_put_impl_") else ()
        if name in self.WAITS or any(index is not None and index.dtype == torch.bool for index in indices):
            self.noted[name] += 1
        return func(*args, **(kwargs or {}))


MOVED = cache.moved


class Calls(TorchFunctionMode):
    """Note what is no operator on a CPU."""

    def __init__(self, noted):
        super().__init__()
        self.noted = noted

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in HostWaits.CALLS:
            self.noted[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("settings", [GREEDY, SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
def test_a_step_reads_its_tokens_and_nothing_else_and_copies_without_waiting(
    model, prompts, monkeypatch, settings, is_packed
):
    seen, step = [], continuous._Run._step

    def watched(run):
        with HostWaits() as waits:
            finished = list(step(run))
        seen.append(waits)
        return finished

    monkeypatch.setattr(continuous._Run, "_step", watched)
    packed = PackedAttention(model) if is_packed else None
    made = engine(model, rows=4, settings=settings, packed=packed, is_misled=False)
    respond_to(made, prompts)
    assert len(seen) == made.statistics.num_steps > NEW_TOKENS
    by_transformers = Counter() if is_packed else Counter(__bool__=1, is_nonzero=1)  # whether its mask masks anything
    for waits in seen:
        assert waits.noted - by_transformers == Counter(tolist=1)
        assert waits.copies == (2 if settings is SAMPLING else 1)  # tokens with places; what is drawn


def room_of(num_cells):
    """A Room where nothing but the cells takes memory."""
    return SimpleNamespace(rows=lambda columns, cells=0: max(1, num_cells // columns))


def queue_of(lengths, *, max_new_tokens):
    return Queue(rows_of(lengths), max_new_tokens=max_new_tokens)


def test_rows_come_by_length_and_each_once_and_those_that_come_back_go_first_with_their_tokens():
    queue = queue_of([3, 9, 1, 9, 4], max_new_tokens=5)
    taken = queue.take(3)
    assert [row.position for row in taken] == [1, 3, 4]
    assert len(queue) == 2
    prompt = taken[2].tokens
    taken[2].generated += [7, 8]
    queue.give_back([taken[2], taken[0]])
    assert len(queue) == 4
    assert [row.position for row in queue.take(4)] == [1, 4, 0, 2]
    assert taken[2].tokens == [*prompt, 7, 8]
    assert not queue
    queue.finish(taken[2])
    assert queue.response_tokens == (2 + 5) / 2  # as if one more had been as long as may be


def test_the_memory_of_a_cache_is_what_its_fullest_layout_takes_and_few_prompts_take_no_more_than_they_need():
    # 100 columns of one row leave 50 of 150 cells idle; 20 columns of seven rows leave 10.
    assert queue_of([90, *[10] * 19], max_new_tokens=11).first_shape(room_of(150)) == (1, 100, 140)
    queue = queue_of([9, 5, 5], max_new_tokens=2)
    assert queue.first_shape(room_of(10_000)) == (3, 10, 30)
    assert queue.first_shape(FixedRoom(2, prefill_tokens=1)) == (2, 10, 20)


@pytest.mark.parametrize(
    ("rows", "response_tokens", "expected"),
    [(64, 128, 8), (64, 2, 32), (8, 200, 1), (1, 10, 1)],
)
def test_the_number_is_the_square_root_rule_within_one_and_half_of_the_rows(rows, response_tokens, expected):
    assert rows_to_wait_for(rows, response_tokens) == expected


@given(rows=st.integers(1, 300), response_tokens=st.integers(2, 500))
def test_no_other_number_costs_less(rows, response_tokens):
    def cost(k):
        return rows / (k * response_tokens) + k / (2 * rows)

    allowed = range(1, max(rows // 2, 1) + 1)
    chosen = rows_to_wait_for(rows, response_tokens)
    assert chosen in allowed
    least = min(map(cost, allowed))
    assert cost(chosen) <= least * 1.25  # whole numbers, of which there may be few


@given(lengths=st.lists(st.integers(1, 50), max_size=40), most_tokens=st.integers(1, 200), is_packed=st.booleans())
def test_groups_take_every_row_once_and_keep_to_the_tokens(lengths, most_tokens, is_packed):
    groups = prefill_groups(lengths, most_tokens=most_tokens, is_packed=is_packed)
    assert [position for group in groups for position in group] == list(range(len(lengths)))

    def num_tokens(group):
        tokens = [lengths[position] for position in group]
        return sum(tokens) if is_packed else len(group) * max(tokens)

    for number, group in enumerate(groups):
        assert len(group) == 1 or num_tokens(group) <= most_tokens
        if group is not groups[-1]:  # none is smaller than it need be
            assert num_tokens([*group, groups[number + 1][0]]) > most_tokens
