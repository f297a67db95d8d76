"""Random rows in the order of the loop."""

from __future__ import annotations

from brim.data.tokens import rows_of_step
from brim.workflows.measure.work import in_order_of_steps, random_rows


def test_each_step_of_the_loop_gets_its_lengths_and_later_ones_the_last():
    steps = [(5, 6), (7, 8), (9, 9)]
    lengths = in_order_of_steps(steps, num_rows=10, seed=42)
    seen = []
    for consumed in range(0, 10, 2):
        _, positions = rows_of_step(num_rows=10, seed=42, consumed_samples=consumed, size=2)
        seen.append(tuple(lengths[int(position)] for position in positions))
    assert seen == [(5, 6), (7, 8), (9, 9), (9, 9), (9, 9)]


def test_rows_are_all_learned_from_or_all_prompt():
    learned = random_rows([4, 9], vocabulary=7, supervised=True, seed=0)
    assert learned.lengths.tolist() == [4, 9]
    assert learned.num_supervised.tolist() == [3, 8]
    assert max(int(row.input_ids.max()) for row in learned) < 7
    prompts = random_rows([4, 9], vocabulary=7, supervised=False, seed=0)
    assert prompts.num_prompt_tokens.tolist() == [4, 9]
