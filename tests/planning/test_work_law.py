"""The work of any shape from that of a few: exact for what is linear in N and N·T."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.memory.expansion import workload_of
from tests.memory.tiny_architectures import write_folder
from tests.planning.hand_counted import hand_counted

from brim.memory.trace import record
from brim.planning.costs import shapes_to_count
from brim.planning.costs.time import work_law

KNOWN = [(1, 512), (2, 512), (32, 64)]


def totals(law, rows, length):
    return [float(each.sum()) for each in law.at(rows * length, length)]


@given(rows=st.integers(1, 64), length=st.integers(1, 4096))
def test_a_law_through_three_shapes_holds_for_all(rows, length):
    law = work_law({shape: hand_counted(*shape) for shape in KNOWN})
    expected = hand_counted(rows, length)
    assert totals(law, rows, length) == pytest.approx([expected.flops, expected.num_bytes, expected.kernels], rel=1e-6)


def test_more_shapes_change_nothing():
    law = work_law({shape: hand_counted(*shape) for shape in [*KNOWN, (8, 64), (1, 64), (1, 2)]})
    expected = hand_counted(5, 300)
    assert totals(law, 5, 300) == pytest.approx([expected.flops, expected.num_bytes, expected.kernels])


def test_of_one_length_it_holds_there():
    law = work_law({shape: hand_counted(*shape) for shape in [(1, 512), (4, 512)]})
    expected = hand_counted(7, 512)
    assert totals(law, 7, 512) == pytest.approx([expected.flops, expected.num_bytes, expected.kernels])


def test_a_phase_by_itself():
    law = work_law({shape: hand_counted(*shape, checkpointed=True) for shape in KNOWN})
    assert totals(law.of("recompute"), 4, 100)[0] == pytest.approx(1000 * 400)


def test_a_real_model_obeys_it(tmp_path):
    folder = write_folder(tmp_path / "llama", "llama")
    trainer = {"type": "finetune", "batch_size": 2, "chunked_loss": False}
    config = {"base_model": str(folder), "precision": "bf16-mixed", "trainer": trainer}
    traced = workload_of(config, "train").training()

    def work(rows, tokens):
        return record(traced, rows=rows, tokens=tokens).work["first"]

    law = work_law({shape: work(*shape) for shape in [(1, 48), (3, 48), (4, 16)]})
    expected = work(6, 32)
    flops, num_bytes, kernels = totals(law, 6, 32)
    assert (flops, kernels) == pytest.approx((expected.flops, expected.kernels))
    # Rotations of positions are made once for all rows, and at this width they are a part of all bytes.
    assert num_bytes == pytest.approx(expected.num_bytes, rel=0.03)


def test_missing_shapes():
    assert shapes_to_count([], longest=512, short=48, most_rows=32) == [(1, 512), (2, 512), (32, 48)]
    assert shapes_to_count([], longest=512, short=500, most_rows=32) == [(1, 512), (2, 512)]
    assert shapes_to_count([], longest=512, short=48, most_rows=1) == [(1, 512), (1, 48)]
    assert shapes_to_count([(1, 2), (1, 512), (9, 512)], longest=512, short=48, most_rows=32) == [(32, 48)]
    assert shapes_to_count([(1, 512), (9, 512), (4, 64)], longest=512, short=48, most_rows=32) == []


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 4096)), max_size=4),
    st.integers(32, 4096),
    st.integers(32, 4096),
    st.integers(2, 64),
)
def test_with_them_a_law_is_determined(known, longest, short, most_rows):
    longest, short = max(longest, short), min(longest, short)
    shapes = [*known, *shapes_to_count(known, longest=longest, short=short, most_rows=most_rows)]
    law = work_law({shape: hand_counted(*shape) for shape in shapes})
    found = np.array(totals(law, 3, longest))
    expected = hand_counted(3, longest)
    assert found == pytest.approx([expected.flops, expected.num_bytes, expected.kernels], rel=1e-3)
