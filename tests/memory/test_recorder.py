"""Births and deaths of storages of hand-made operators, and where they happen."""

import gc

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from brim.memory.trace import Place
from brim.memory.trace.recorder import Recorder
from brim.memory.trace.recording import without_collector


def log(stream):
    """+bytes or -bytes of each event."""
    return [stream.sizes[storage] if storage >= 0 else -stream.sizes[~storage] for storage in stream.storages]


def test_storages_are_born_with_their_operator_and_die_when_let_go_of():
    with FakeTensorMode(), Recorder() as recorder:
        recorder.phase = "forward"
        one = torch.empty(3, 5)
        two = one @ torch.empty(5, 7)
        del one
        recorder.phase = "optimizer"
        del two
    stream = recorder.close()
    assert log(stream) == [60, 140, 84, -140, -60, -84]
    assert [place.operator for place in stream.places[:3]] == ["aten::empty", "aten::empty", "aten::mm"]
    assert [place.phase for place in stream.places] == ["forward"] * 5 + ["optimizer"]
    assert set(stream.categories) == {"temporary"}


def test_views_and_operators_in_place_bear_nothing():
    with FakeTensorMode(), Recorder() as recorder:
        one = torch.empty(4, 6)
        views = [one.view(-1), one.t(), one[1:, ::2], one.detach(), one.expand(2, 4, 6), one.untyped_storage()]
        one.add_(1).mul_(one)
        torch.add(one, one, out=one)
        one.view(-1)[0].zero_()
        del one
        assert log(recorder.stream) == [96]
        views.clear()
    assert log(recorder.close()) == [96, -96]


def test_a_storage_of_several_outputs_is_born_once():
    with FakeTensorMode(), Recorder() as recorder:
        values, indices = torch.empty(8, 4).topk(2)
        pieces = torch.empty(8, 4).chunk(4)
    assert log(recorder.stream) == [128, 64, 128, -128, 128]
    assert [piece.shape for piece in pieces] == [(2, 4)] * 4
    assert recorder.number_of(pieces[0]) == recorder.number_of(pieces[3]) == 3
    assert recorder.number_of(values) == 1
    assert recorder.number_of(indices) == 2


def test_what_an_operator_needs_within_itself_dies_after_its_outputs_are_born():
    def temporaries(operator, args, kwargs):
        return 1000 if operator == "aten::mm" else 0

    with FakeTensorMode(), Recorder(temporaries=temporaries) as recorder:
        product = torch.empty(2, 2) @ torch.empty(2, 2)
    assert log(recorder.stream)[:5] == [16, 16, 1000, 16, -1000]
    assert recorder.number_of(product) == 3


def test_nothing_is_written_once_it_is_closed_or_silent():
    with FakeTensorMode(), Recorder() as recorder:
        one = torch.empty(1)
        with recorder.silent():
            elsewhere = torch.empty(100)
        assert recorder.number_of(elsewhere) is None
        stream = recorder.close()
        del one, elsewhere
    assert log(stream) == [4]


def test_what_exists_already_is_entered_with_its_category():
    with FakeTensorMode():
        weight = torch.empty(10)
        with Recorder() as recorder:
            assert recorder.born(weight, "weights") == 0
            assert recorder.born(weight.view(2, 5), "gradients") == 0
            state = weight * 2
            recorder.categorize(state, "optimizer_state")
            recorder.categorize(torch.empty(0), "workspace")
    assert recorder.stream.categories == ["weights", "optimizer_state", "workspace"]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, checkpointed=None):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(4, 3, bias=False)
        self.checkpointed = checkpointed

    def forward(self, x):
        for layer in self.layers:
            if self.checkpointed is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointed == "reentrant")
        return self.head(x)


def stepped(model, x, recorder):
    """A forward and a backward pass, recorded."""
    recorder.know(model, model.layers)
    recorder.phase = "load"
    recorder.enter_weights(model)
    recorder.phase = "forward"
    with recorder.watching_modules():
        model(x).sum().backward()
    return recorder.close()


@pytest.fixture(params=[None, "reentrant", "not reentrant"])
def recorded(request):
    with without_collector(), FakeTensorMode():
        model = Stack(request.param)
        x = torch.empty(2, 4, requires_grad=True)
        with Recorder() as recorder:
            recorder.born(x, "activations")
            stream = stepped(model, x, recorder)
    return request.param, model, recorder, stream, x


def births(stream, phase):
    return [
        place
        for storage, place in zip(stream.storages, stream.places, strict=True)
        if storage >= 0 and place.phase == phase
    ]


def test_weights_are_born_at_the_places_of_their_modules(recorded):
    _, model, recorder, stream, _ = recorded
    assert births(stream, "load") == [
        Place("load", 0, "layers.0.up"),
        Place("load", 0, "layers.0.down"),
        Place("load", 1, "layers.1.up"),
        Place("load", 1, "layers.1.down"),
        Place("load", None, "head"),
    ]
    assert [stream.sizes[recorder.number_of(weight)] for weight in model.parameters()] == [128, 128, 128, 128, 48]


def test_the_forward_pass_is_placed_by_the_module_that_runs(recorded):
    _, _, _, stream, _ = recorded
    forward = [place for place in births(stream, "forward") if place.operator in ("aten::mm", "aten::relu")]
    assert forward == [
        Place("forward", 0, "layers.0.up", "aten::mm"),
        Place("forward", 0, "layers.0", "aten::relu"),
        Place("forward", 0, "layers.0.down", "aten::mm"),
        Place("forward", 1, "layers.1.up", "aten::mm"),
        Place("forward", 1, "layers.1", "aten::relu"),
        Place("forward", 1, "layers.1.down", "aten::mm"),
        Place("forward", None, "head", "aten::mm"),
    ]


def test_the_backward_pass_is_placed_by_the_operator_whose_gradient_it_computes(recorded):
    checkpointed, _, _, stream, _ = recorded
    products = [place for place in births(stream, "backward") if place.operator in ("aten::mm", "aten::relu")]

    def anew(layer):
        """Recomputation, which not-reentrant checkpointing ends as soon as all that is needed is there."""
        if checkpointed is None:
            return []
        places = [
            Place("backward", layer, f"layers.{layer}.up", "aten::mm"),
            Place("backward", layer, f"layers.{layer}", "aten::relu"),
            Place("backward", layer, f"layers.{layer}.down", "aten::mm"),
        ]
        return places if checkpointed == "reentrant" else places[:2]

    def back(layer):
        down, up = (Place("backward", layer, f"layers.{layer}.{name}", "aten::mm") for name in ("down", "up"))
        return [down, down, up, up]

    head = Place("backward", None, "head", "aten::mm")
    assert products == [head, head, *anew(1), *back(1), *anew(0), *back(0)]


def test_what_recomputation_leaves_for_the_backward_pass_is_known(recorded):
    checkpointed, _, recorder, stream, _ = recorded
    operators = {stream.places[stream.storages.index(storage)].operator for storage in recorder.recomputed}
    if checkpointed is None:
        assert operators == set()
    else:
        assert "aten::relu" in operators  # kept: the input of the second product
        assert operators <= {"aten::relu", "aten::mm", "aten::threshold_backward"}


def test_all_but_weights_and_gradients_dies(recorded):
    _, model, recorder, stream, x = recorded
    dead = {~storage for storage in stream.storages if storage < 0}
    alive = {storage for storage in range(len(stream.sizes)) if storage not in dead}
    kept = {recorder.number_of(weight) for weight in model.parameters()}
    kept |= {recorder.number_of(weight.grad) for weight in model.parameters()}
    assert alive - kept == {recorder.number_of(x), recorder.number_of(x.grad)}


def graph(tensor):
    """The autograd graph's nodes by name, from an output on."""
    seen, names, waiting = set(), [], [tensor.grad_fn]
    while waiting:
        node = waiting.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        names.append(type(node).__name__)
        waiting += [parent for parent, _ in node.next_functions]
    return names


@pytest.mark.parametrize("checkpointed", [None, "reentrant", "not reentrant"])
def test_watching_does_not_change_the_graph_or_the_values(checkpointed):
    torch.manual_seed(0)
    model, x = Stack(checkpointed), torch.randn(2, 4, requires_grad=True)
    expected = model(x)
    expected.sum().backward()
    gradients = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    with Recorder() as recorder:
        recorder.know(model, model.layers)
        recorder.phase = "forward"
        with recorder.watching_modules():
            watched = model(x)
            assert graph(watched) == graph(expected)
            watched.sum().backward()
    assert torch.equal(watched, expected)
    assert all(torch.equal(weight.grad, was) for weight, was in zip(model.parameters(), gradients, strict=True))


def test_a_module_that_is_not_the_models_stands_where_it_is_called():
    class Calling(nn.Module):
        def forward(self, x):
            return nn.GELU()(x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Calling()])

        def forward(self, x):
            return nn.Identity()(self.layers[0](x) + 1)

    with FakeTensorMode():
        model, x = Outer(), torch.empty(3)
        with Recorder() as recorder:
            recorder.know(model, model.layers)
            with recorder.watching_modules():
                model(x)
    assert [(place.layer, place.module, place.operator) for place in births(recorder.stream, "")] == [
        (0, "layers.0", "aten::gelu"),
        (None, "", "aten::add"),
    ]


def test_the_hooks_are_gone_afterwards_even_after_an_error():
    recorder = Recorder()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), recorder.watching_modules():
        nn.Linear(2, 2)(torch.empty(3))
    nn.Linear(2, 2)(torch.empty(2))
    assert recorder._sequence_numbers == recorder._sequence_numbers[:2]
    assert recorder._stack == []


def test_the_collector_is_put_back_as_it_was():
    assert gc.isenabled()
    with without_collector():
        assert not gc.isenabled()
        with without_collector():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
