"""Streams of few layers given the depth of many: hand-made streams against the same ones made in full."""

import pytest
from hypothesis import given, strategies as st

from brim.memory.trace import EventStream, Place
from brim.memory.trace.events import Depth, depth_of
from brim.memory.trace.layers import NotUniformError, expand

PATTERN = st.builds(
    lambda first, block, repeats, last: first + block * repeats + last,
    st.lists(st.sampled_from("ab"), max_size=3),
    st.lists(st.sampled_from("abc"), min_size=1, max_size=6),
    st.integers(1, 12),
    st.lists(st.sampled_from("ab"), max_size=3),
)


@given(PATTERN)
def test_every_layer_is_like_the_one_that_stands_for_it(kinds):
    depth = depth_of(kinds)
    recorded = depth.recorded
    assert len(recorded) == depth.num_recorded <= len(kinds) == depth.num_layers
    assert [kinds[recorded[depth.template(layer)]] for layer in range(len(kinds))] == kinds
    assert [depth.template(layer) for layer in recorded] in (
        list(range(depth.num_recorded)),
        # The first of two alike blocks is recorded to be compared with the second, which stands for both.
        [depth.template(layer) for layer in range(depth.head)]
        + 2 * list(range(depth.head + depth.period, depth.head + 2 * depth.period))
        + list(range(depth.head + 2 * depth.period, depth.num_recorded)),
    )


@given(PATTERN)
def test_neither_ends_nor_the_first_of_a_kind_are_in_the_middle(kinds):
    depth = depth_of(kinds)
    if depth.num_recorded == depth.num_layers:
        assert not any(map(depth.is_middle, range(depth.num_layers)))
        return
    middle = [layer for layer in range(depth.num_layers) if depth.is_middle(layer)]
    assert (middle[0], len(middle) % depth.period) == (depth.head, 0)
    assert {kinds.index(kind) for kind in kinds}.isdisjoint(middle)
    assert depth.tail >= 1


@pytest.mark.parametrize(
    ("kinds", "recorded"),
    [
        ("a" * 32, [0, 1, 2, 31]),
        ("a" * 4, [0, 1, 2, 3]),
        ("a", [0]),
        ("", []),
        ("ddd" + "m" * 58, [0, 1, 2, 3, 4, 5, 60]),
        ("sf" * 6, [0, 1, 2, 3, 4, 5, 10, 11]),
        ("sssssf" * 4 + "ss", [*range(18), 24, 25]),
        ("a" * 9 + "b", list(range(10))),
        ("abcdefghij", list(range(10))),
    ],
)
def test_the_layers_to_record(kinds, recorded):
    assert depth_of(list(kinds)).recorded == recorded


def test_a_whole_model_is_recorded_layer_by_layer():
    depth = depth_of([()] * 32).whole()
    assert (depth.recorded, depth.template(17), depth.is_middle(17)) == (list(range(32)), 17, False)


PATH = "model.layers"
DEPTH = depth_of([()] * 9)


class Step:
    """A hand-made step of `num_layers`, with what makes expansion hard."""

    def __init__(self, num_layers, *, dense=0):
        self.stream = EventStream()
        self.num_layers = num_layers
        self.dense = dense  # so many first layers are of another kind, with fewer births

    def place(self, phase, layer, operator="aten::mm"):
        return Place(phase, layer, "" if layer is None else f"{PATH}.{layer}.mlp", operator)

    def birth(self, size, phase, layer, category="activations"):
        return self.stream.birth(size, category, self.place(phase, layer))

    def death(self, storage, phase, layer):
        self.stream.death(storage, self.place(phase, layer))

    def run(self):
        """Weights, a forward pass that keeps inputs, a backward pass that frees a neighbour's, gradients dropped."""
        stream, layers = self.stream, range(self.num_layers)
        stream.mark("load")
        for layer in layers:
            self.birth(1000 + (layer < self.dense), "load", layer, "weights")
        stream.mark("first")
        shared = self.birth(77, "forward", None)
        hidden = self.birth(10, "forward", None)
        kept = []
        for layer in layers:
            if layer >= self.dense:
                self.death(self.birth(40, "forward", layer), "forward", layer)
            kept.append(hidden)
            hidden = self.birth(20, "forward", layer)
            self.death(self.birth(5, "forward", None), "forward", None)  # between two layers
        grad = self.birth(30, "backward", None)
        gradients = []
        for layer in reversed(layers):
            if layer < self.dense:
                self.death(self.birth(6, "backward", layer), "backward", layer)
            self.death(hidden, "backward", layer)  # of the layer itself, and its input of the one before
            hidden = kept.pop()
            if layer == 0:
                self.death(shared, "backward", layer)
            gradients.append(self.birth(1000 + (layer < self.dense), "backward", layer, "gradients"))
            below = self.birth(30, "backward", layer)
            self.death(grad, "backward", layer)
            grad = below
        self.death(hidden, "backward", None)
        self.death(grad, "backward", None)
        stream.mark("over")
        for gradient in reversed(gradients):
            self.death(gradient, "optimizer", None)
        stream.mark("end")
        return stream


def made(num_layers, **options):
    return Step(num_layers, **options).run()


def events(stream):
    return (stream.sizes, stream.categories, stream.storages, stream.places, stream.marks)


@pytest.mark.parametrize("num_layers", [5, 9, 32])
def test_a_recorded_step_becomes_the_full_one(num_layers):
    depth = depth_of([()] * num_layers)
    expansion = expand(made(4), depth, layers_path=PATH)
    assert events(expansion.stream) == events(expand(made(num_layers), depth.whole(), layers_path=PATH).stream)


def test_neighbours_of_another_kind_number_their_births_otherwise():
    depth = depth_of(["d"] * 2 + ["m"] * 7)
    assert depth.recorded == [0, 1, 2, 3, 4, 8]
    expansion = expand(made(6, dense=2), depth, layers_path=PATH)
    full = expand(made(9, dense=2), depth.whole(), layers_path=PATH)
    assert events(expansion.stream) == events(full.stream)


def test_a_storage_is_found_in_the_layer_that_is_asked_for():
    expansion = expand(made(4), DEPTH, layers_path=PATH)
    template = DEPTH.template(6)
    number = expansion.number(template, 6)  # the weights are the first storages, one a layer
    assert expansion.stream.places[expansion.stream.storages.index(number)].module == f"{PATH}.6.mlp"
    assert expansion.number(4, 6) == 9  # of no layer: the shared one, after nine weights
    with pytest.raises(NotUniformError, match="storage 0 is not of layer 6"):
        expansion.number(0, 6)


def test_nothing_is_expanded_where_all_layers_were_recorded():
    depth = depth_of([()] * 4)
    stream = made(4)
    before = events(stream)
    expansion = expand(stream, depth, layers_path=PATH)
    assert events(expansion.stream) == before
    assert expansion.number(3, 3) == 3


def uneven_births(step):
    for layer in range(4):
        step.birth(10 + layer, "forward", layer)


def uneven_categories(step):
    for layer in range(4):
        step.birth(10, "forward", layer, "gradients" if layer == 1 else "activations")


def uneven_deaths(step):
    born = [step.birth(10, "forward", layer) for layer in range(4)]
    for layer in reversed(range(4)):
        step.death(born[{2: 1, 1: 2}.get(layer, layer)], "backward", layer)


def a_layer_left_out(step):
    for layer in (0, 1, 3):
        step.birth(10, "forward", layer)


def out_of_order(step):
    for layer in (0, 2, 1, 3):
        step.birth(10, "forward", layer)


def both_middle_ones_die_outside(step):
    born = [step.birth(10, "forward", layer) for layer in range(4)]
    for each in (born[1], born[2]):
        step.death(each, "forward", None)
    step.birth(1, "backward", None)


def far_away(step):
    """Something of the first layer's dies in the last one: not of a neighbour, and not in the middle."""
    born = [step.birth(10, "forward", layer) for layer in range(4)]
    for layer in reversed(range(4)):
        step.birth(1, "backward", layer)
        if layer == 3:
            step.death(born[1], "backward", layer)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (uneven_births, "layers 1 and 2 differ"),
        (uneven_categories, "layers 1 and 2 differ"),
        (uneven_deaths, "layers 1 and 2 differ"),
        (a_layer_left_out, r"layers come in the order \[0, 1, 3\]"),
        (out_of_order, r"layers come in the order \[0, 2, 1, 3\]"),
        (both_middle_ones_die_outside, r"outside the layers, something dies of layers \[1, 2\]"),
        (far_away, "in layer 3, something dies of layer 1"),
    ],
)
def test_what_does_not_repeat_is_refused(make, message):
    step = Step(4)
    step.stream.mark("first")
    make(step)
    with pytest.raises(NotUniformError, match=message):
        expand(step.stream, DEPTH, layers_path=PATH)


def test_deaths_that_follow_each_other_come_in_the_order_of_births():
    stream = EventStream()
    here, there = Place("forward"), Place("backward")
    for size in range(6):
        stream.birth(size, "temporary", here)
    for storage in (3, 0, 1):
        stream.death(storage, here)
    stream.mark("over")
    stream.death(5, here)
    stream.death(2, there)
    stream.death(4, here)
    expansion = expand(stream, Depth(num_layers=1, head=1, period=1, tail=0), layers_path=PATH)
    assert expansion.stream.storages[6:] == [~0, ~1, ~3, ~5, ~2, ~4]
    assert [place.phase for place in expansion.stream.places[-2:]] == ["backward", "forward"]
