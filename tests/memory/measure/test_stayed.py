"""Which tensors stay, and what a graph keeps."""

from __future__ import annotations

import pytest
import torch

from brim.workflows.measure import Stayed
from brim.workflows.measure.record import living

pytestmark = pytest.mark.usefixtures("few_objects")


def test_a_tensor_that_stays_is_named_with_its_shape():
    before = living()
    kept = [torch.ones(3, 1000) for _ in range(2)]
    found = living().since(before)
    assert found == (Stayed(count=2, num_bytes=24_000, shape=(3, 1000), dtype="float32", made_at=""),)
    kept.clear()
    assert living().since(before) == ()


def test_two_views_of_one_storage_count_once():
    before = living()
    whole = torch.ones(1000)
    part = whole[10:]
    assert sum(each.num_bytes for each in living().since(before)) == 4000
    del whole, part


def test_what_a_graph_saves_is_found_though_python_cannot_see_it():
    weight = torch.ones(500, requires_grad=True)
    before = living()
    loss = weight.exp().sum()
    found = living().since(before)
    assert {each.num_bytes for each in found} == {4, 2000}  # the loss, and exp's result, which its graph keeps
    loss.backward()
    assert [each.num_bytes for each in living().since(before)] == [
        2000,
        4,
    ]  # the gradient has come, the result has gone


def test_the_operator_that_made_a_storage_is_told_where_it_is_known():
    before = living()
    kept = torch.ones(1000)
    [found] = living({kept.untyped_storage().data_ptr(): "forward, lm_head, aten.mm"}).since(before)
    assert found.made_at == "forward, lm_head, aten.mm"
