"""Whatever the schedule, the data, the batch and the micro-batches: every row goes in once an epoch."""

import random
from collections import Counter

import numpy as np
from tests.batching.cost_examples import linear_costs

from brim.batching import ByLength, ByRows, constant, doubling, equal_steps, linear, num_steps, schedule_of
from brim.data.tokens import rows_of_step

NUM_CASES = 10_000


def drawn_schedule(chance, total_samples):
    """A schedule of a random kind, up or down, with sizes up to twice what a small epoch holds."""
    initial, final = chance.randint(1, 24), chance.randint(1, 24)
    length = chance.randint(0, total_samples)
    match chance.randrange(5):
        case 0:
            return constant(final)
        case 1:
            return doubling(initial=initial, final=final, length_samples=length)
        case 2:
            return equal_steps(initial=initial, final=final, length_samples=length)
        case 3:
            return linear(initial=initial, final=final, length_samples=length, increment=chance.randint(1, 8))
        case _:
            starts = sorted(chance.sample(range(1, total_samples + 2), min(chance.randint(1, 4), total_samples)))
            return schedule_of([(0, initial), *((start, chance.randint(1, 24)) for start in starts)])


def drawn_cutter(chance):
    if chance.random() < 0.75:  # the other one takes ten times as long
        return ByRows(max_rows=chance.randint(1, 12))
    return ByLength(costs=COSTS, cap_bytes=1000 + 10 * chance.randint(20, 200), most_rows=chance.choice([None, 5]))


COSTS = linear_costs(seconds=20.0)


def walk_case(number):
    """Walk a random run as the loop does; how often each cutter cut, and how often memory ran out."""
    chance = random.Random(number)
    num_rows = chance.randint(1, 24)
    total = num_rows * chance.randint(1, 3) - chance.choice([0, 0, chance.randrange(num_rows)])
    schedule, cutter = drawn_schedule(chance, total), drawn_cutter(chance)
    lengths = np.array([chance.randint(1, 40) for _ in range(num_rows)])
    consumed, steps, num_lowered = 0, 0, 0
    seen = Counter()
    while consumed < total:
        size = schedule.size_at(consumed)
        epoch, indices = rows_of_step(
            num_rows=num_rows, seed=number, consumed_samples=consumed, size=min(size, total - consumed)
        )
        cut = cutter.cut(lengths[indices])
        if chance.random() < 0.1:
            num_lowered += cutter.lower(cut[0]) is not None
            cut = cutter.cut(lengths[indices])
        seen.update((epoch, row) for micro_batch in cut for row in indices[micro_batch.rows].tolist())
        consumed, steps = consumed + len(indices), steps + 1
        assert len(indices) == size or consumed % num_rows == 0 or consumed == total
    epochs, rest = divmod(total, num_rows)
    assert set(seen.values()) == {1}
    assert Counter(epoch for epoch, _ in seen) == {
        **dict.fromkeys(range(epochs), num_rows), **({epochs: rest} if rest else {})
    }  # fmt: skip
    assert steps == num_steps(schedule, num_rows=num_rows, total_samples=total)
    return Counter({type(cutter).__name__: 1, "lowered": num_lowered, "phases": len(schedule.phases)})


def test_every_sample_goes_in_once_an_epoch_in_ten_thousand_cases():
    walked = sum((walk_case(number) for number in range(NUM_CASES)), Counter())
    assert walked["ByRows"] + walked["ByLength"] == NUM_CASES
    # The cases are worth their time: both cutters, moving batches, memory that runs out.
    assert walked["ByLength"] > 0.2 * NUM_CASES
    assert walked["phases"] > 2 * NUM_CASES
    assert walked["lowered"] > 0.1 * NUM_CASES
