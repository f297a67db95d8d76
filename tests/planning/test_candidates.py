"""What a way costs: its cap, its cut of an epoch and its time, by hand; and which way is taken."""

from dataclasses import replace

import pytest
from tests.batching.cost_examples import linear_costs
from tests.planning.hand_made import does_not_fit, hand_made_candidate
from tests.planning.planned import COSTS, budget, task, way_costs, wire

from brim.planning.candidates import WAYS, candidate, choose, could_gain_by_sharding, some_layers, ways
from brim.planning.plan import Way


def test_with_room_to_spare_the_cut_is_the_fastest_and_under_a_cap_the_fastest_that_fits():
    found = candidate(way_costs(), task(), budget(9300))
    assert (found.fits, found.cap_binds, found.cap_bytes, found.widest) == (True, False, 9300, (4, 80))
    assert found.total_bytes == 4200 + 500
    assert found.single_row_bytes == 2000 + 500
    assert found.micro_batches_per_step == 1.5
    assert found.padding == pytest.approx((200 + 14 + 320) / 360)
    assert found.seconds_per_epoch == pytest.approx(4.14 + 4.2 + 2 * 0.5)
    assert found.reason == "its largest micro-batch, 4 × 80 tokens, makes 4.6 KiB in all"
    assert (found.bound_by, found.longest_that_fits, found.too_long) == ("arithmetic", 100, ())

    tight = candidate(way_costs(), task(), budget(4199))  # one byte too few for 4 × 80 tokens
    assert (tight.cap_binds, tight.widest, tight.micro_batches_per_step) == (True, (2, 100), 2)
    assert tight.seconds_per_epoch == pytest.approx(4.14 + 4.26 + 2 * 0.5)
    assert tight.total_bytes == 3000 + 500

    largest = candidate(way_costs(), task(largest=True), budget(9300))  # as few micro-batches as fit
    assert (largest.widest, largest.micro_batches_per_step) == ((4, 100), 1)
    assert largest.seconds_per_epoch == pytest.approx(5.0 + 4.2 + 2 * 0.5)


def test_as_few_layers_are_recomputed_as_pay():
    """Of eight layers: 10 bytes and 10 ms a token without checkpointing, 2 and 13 with that of all."""

    def best(cap_bytes, *, seconds=1.0, **changes):
        off = way_costs(costs=linear_costs(seconds=seconds))
        on = way_costs(costs=linear_costs(seconds=seconds, bytes_per_token=2, seconds_per_token=0.013))
        on = replace(on, way=Way(gradient_checkpointing=True, chunked_loss=True))
        return some_layers(off, on, task(**changes), budget(cap_bytes), num_layers=8, cap_bytes=cap_bytes)

    # The longest row's 100 tokens take 500 bytes where five layers are recomputed, 300 where seven are.
    for cap_bytes, number in ((1500, 5), (1599, 5), (1600, 4), (1750, 3), (9300, 2)):
        found = best(cap_bytes, fixed_rows=1)
        assert (found.way.gradient_checkpointing, found.widest) == (number, (1, 100))
        assert found.seconds_per_epoch == pytest.approx(8 + 360 * (0.01 + number / 8 * 0.003) + 2 * 0.5)
    assert best(1299, fixed_rows=1) is None
    assert best(9300).way == Way(gradient_checkpointing=2, chunked_loss=True)
    assert best(2000, seconds=100.0).way.gradient_checkpointing == 7  # three micro-batches instead of four
    numbers = ways(checkpointing=7, chunked="auto")
    assert [way.gradient_checkpointing for way in numbers] == [7, 7]
    assert str(numbers[0]) == "checkpointing of 7 layers, loss in chunks"


def test_what_the_allocator_needs_for_the_shapes_of_the_cut_is_left_to_it():
    asked = []

    def overhead(shapes):
        asked.append(list(shapes))
        return 600 if (4, 80) in shapes else 300

    roomy = candidate(way_costs(overhead_bytes=overhead), task(), budget(4800))
    assert (roomy.cap_bytes, roomy.cap_binds, roomy.widest) == (4200, False, (4, 80))
    assert roomy.total_bytes == 4200 + 600 + 500
    tight = candidate(way_costs(overhead_bytes=overhead), task(), budget(4799))
    assert (tight.cap_bytes, tight.cap_binds, tight.widest) == (4199, True, (2, 100))
    assert asked[0] == [(1, 100)]
    # One that never settles ends with a cap that was left.
    calls = iter(range(1, 100))
    found = candidate(way_costs(overhead_bytes=lambda shapes: 100 * next(calls)), task(), budget(4250))
    assert (found.cap_bytes, found.fits, found.widest) == (4250 - 500, True, (2, 100))


def test_rows_that_do_not_fit_are_named_by_position_after_an_update_that_does_not():
    found = candidate(way_costs(), task(), budget(1600))
    assert (found.fits, found.too_long, found.longest_that_fits) == (False, (1, 4), 60)
    assert found.reason == "the longest row, 100 tokens, takes 2.0 KiB, 1.6 KiB are available"
    assert found.single_row_bytes == 2000 + 500
    assert (found.total_bytes, found.widest, found.seconds_per_epoch) == (None, None, None)
    assert candidate(way_costs(), task(), budget(2000)).widest is not None
    assert candidate(way_costs(), task(), budget(1999)).too_long == (1,)
    large = way_costs(least_bytes=6000)
    found = candidate(large, task(), budget(5000))
    assert not found.fits
    assert found.reason == "weights and optimizer alone take 5.9 KiB, 4.9 KiB are available"
    assert found.single_row_bytes == 6000 + 500
    found = candidate(large, task(), budget(9300))  # an update that takes most is the total
    assert found.total_bytes == found.single_row_bytes == 6000 + 500


def test_a_number_of_rows_is_kept_whatever_it_takes():
    found = candidate(way_costs(), task(fixed_rows=3), budget(9300))
    assert (found.widest, found.micro_batches_per_step) == ((3, 100), 2)
    assert found.padding == pytest.approx((300 + 7 + 240 + 33) / 360)
    unfit = candidate(way_costs(), task(fixed_rows=3), budget(3999))
    assert not unfit.fits
    assert unfit.reason == "3 × 100 tokens take 3.9 KiB, 3.9 KiB are available"
    assert (unfit.too_long, unfit.longest_that_fits) == ((), 99)  # 1,000 bytes and 3 × 990


def test_what_many_rows_need_beside_them_is_not_held_against_one():
    """The allocator's overhead of 30 × 100 tokens leaves nothing; a row alone fits, and 30 rows of 9 tokens do."""
    known = way_costs(overhead_bytes=lambda shapes: sum(rows * tokens for rows, tokens in shapes))
    work = task(fixed_rows=30, effective_batch_size=30)
    unfit = candidate(known, work, budget(4000))
    assert unfit.reason == "8 × 100 tokens take 8.8 KiB, 3.1 KiB are available"
    assert unfit.too_long == ()
    assert unfit.single_row_bytes == 2000 + 500 + 100
    (longest,) = [n for n in range(1, 100) if 1000 + 330 * n <= 4000 < 1000 + 330 * (n + 1)]
    assert 0 < unfit.longest_that_fits <= longest
    assert candidate(replace(known, least_bytes=3999), work, budget(4000)).longest_that_fits is None


def test_measured_costs_and_a_lower_cap_cut_anew():
    before = candidate(way_costs(), task(), budget(9300))
    assert task().recut(before, COSTS, COSTS, cap_bytes=9300) == before
    slow = linear_costs(seconds=100.0)  # one micro-batch a step
    anew = task().recut(before, COSTS, slow, cap_bytes=4199)
    assert (anew.cap_bytes, anew.cap_binds, anew.widest) == (4199, True, (2, 100))
    assert anew.total_bytes == before.total_bytes - 4200 + 3000
    assert anew.seconds_per_epoch == pytest.approx(task().epoch(slow, cap_bytes=4199).seconds + 2 * 0.5)
    assert not task().recut(before, COSTS, slow, cap_bytes=5000).cap_binds
    # An update stays the total when the cap is lowered.
    large = candidate(way_costs(least_bytes=3900), task(), budget(9300))
    assert large.total_bytes == 4700
    assert task().recut(large, COSTS, COSTS, cap_bytes=3900).total_bytes == 3900 + 500


def test_on_ranks_a_step_takes_what_the_longest_takes_and_what_is_sent():
    """Rows one by one: 2.0 and 1.4 + 1.07 + 1.07 s, then 1.8 + 1.33 and 1.6 + 1.33 s."""
    work = task(fixed_rows=1)
    alone, found = (candidate(way_costs(wire=each), work, budget(9300)) for each in (None, wire()))
    assert (alone.busy_share, alone.seconds_per_epoch_alone) == (None, None)
    assert found.seconds_per_epoch == pytest.approx(3.54 + 3.13 + 2 * (0.5 + 0.25))
    assert found.busy_share == pytest.approx(11.6 / 2 / 6.67)
    assert found.seconds_per_epoch_alone == alone.seconds_per_epoch == pytest.approx(11.6 + 2 * 0.5)
    assert (found.micro_batches_per_step, found.wire.bytes_per_step(4)) == (4, 250)
    assert work.recut(found, COSTS, COSTS, cap_bytes=9300) == found
    slow = work.recut(found, COSTS, linear_costs(seconds=101.0), cap_bytes=9300)  # 100 s more for each row
    assert slow.seconds_per_epoch == pytest.approx(found.seconds_per_epoch + 3 * 100 + 2 * 100)
    assert slow.seconds_per_epoch_alone == pytest.approx(alone.seconds_per_epoch + 8 * 100)


def test_where_weights_are_gathered_ranks_go_in_rounds_and_divide_the_update():
    """2.0 beside 1.4, then two of 1.07; 1.8 beside 1.6, then two of 1.33. None takes less than what is sent."""
    way = Way(gradient_checkpointing=False, chunked_loss=True, is_sharded=True)
    found = candidate(way_costs(way=way, wire=wire(update_bytes=0, round_bytes=1500)), task(fixed_rows=1), budget(9300))
    assert found.seconds_per_epoch == pytest.approx(2.0 + 1.5 + 1.8 + 1.5 + 2 * 0.25)
    assert found.busy_share == pytest.approx(11.6 / 2 / 6.8)
    assert found.wire.bytes_per_step(found.micro_batches_per_step) == 2 * 1500
    assert str(way) == "sharded, no checkpointing, loss in chunks"


def test_sharding_is_looked_at_where_memory_holds_replicated_ranks_up():
    def gains(reserved_bytes, **changes):
        known = way_costs(update_s=0.0, wire=wire(**changes))
        return could_gain_by_sharding([known], [candidate(known, task(), budget(reserved_bytes))], task())

    assert not gains(9300, update_bytes=1)
    assert gains(9300, update_bytes=10_000)  # 10 s for the sums
    assert gains(1999)  # the longest row does not fit
    assert [way.is_sharded for way in ways(checkpointing=False, chunked=True, sharded=(False, True))] == [False, True]


LONG = "the longest row, 1,417 tokens, takes 15.0 GiB alone, and 13.0 GiB are available"


def of(*seconds):
    """One candidate a way, in the order of preference; None: it does not fit."""
    made = [replace(hand_made_candidate(seconds=s or 1.0), way=way) for s, way in zip(seconds, WAYS, strict=False)]
    return [each if took else does_not_fit(each) for each, took in zip(made, seconds, strict=True)]


def test_the_fastest_that_fits_is_taken_unless_it_is_hardly_faster():
    for seconds, taken in (
        ((100.0, 100.0, 140.0, 140.0), 0),
        ((100.0, 98.0, 140.0, 140.0), 0),  # faster by 2%, which is not known so well
        ((100.0, 97.9, 140.0, 140.0), 1),
        ((100.0, 97.9, 96.0, 140.0), 1),  # and the next by less than that
        ((100.0, 97.9, 95.9, 140.0), 2),
        ((None, None, 140.0, 140.0), 2),
        ((None, 150.0, 140.0, 140.0), 2),
        ((None, None, None, 140.0), 3),
    ):
        candidates = of(*seconds)
        assert choose(candidates)[0] is candidates[taken], seconds


def test_the_reason_compares_with_the_second_best_or_says_why_no_other_was_taken():
    for candidates, has_more, reason in (
        (of(100.0, 130.0, 120.0, 140.0), False, "an epoch takes 1 min 40 s, checkpointing, loss in chunks 2 min 0 s"),
        (of(100.0, 99.0), False, "an epoch takes 1 min 40 s, no checkpointing, whole logits 1 min 39 s, a difference"),
        (of(None, None, 140.0), False, f"the only strategy that fits: {LONG}"),
        (of(100.0), False, "the only strategy that is left open"),
        (of(100.0), True, "it fits, and more memory would not make updates of this size faster"),
    ):
        assert choose(candidates, has_more=has_more)[1].startswith(reason)
    none = f"no checkpointing, loss in chunks: {LONG}; no checkpointing, whole logits: {LONG}"
    assert choose(of(None, None)) == (None, none)


def test_what_the_configuration_says_is_not_left_open():
    cases = [("auto", "auto", [0, 1, 2, 3]), (True, "auto", [2, 3]), ("auto", False, [1, 3]), (False, True, [0])]
    for checkpointing, chunked, left in cases:
        assert ways(checkpointing=checkpointing, chunked=chunked) == [WAYS[number] for number in left]
    assert len({str(way) for way in WAYS}) == 4
    assert str(Way(gradient_checkpointing=True, chunked_loss=False)) == "checkpointing, whole logits"
