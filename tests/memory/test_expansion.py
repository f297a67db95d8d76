"""What is expanded from a few recorded layers or tokens is what all of them do: every event, its size and place."""

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st
from tests.memory.tiny_architectures import DBRX, FAMILIES, write_folder
from tests.memory.traced import alive, events, log, recorded_layers, stream_of, training, workload_of

import brim.memory.generation.streams as streams
from brim import predict_memory
from brim.errors import ModelError
from brim.memory.events import EventStream, Place
from brim.memory.events.stream import depth_of
from brim.memory.generation import static_stream
from brim.memory.trace import compose_parts, record
from brim.memory.trace.layers import expand
from brim.memory.trace.segments import NotUniformError

PATTERN = st.builds(
    lambda first, block, repeats, last: first + block * repeats + last,
    st.lists(st.sampled_from("ab"), max_size=3),
    st.lists(st.sampled_from("abc"), min_size=1, max_size=6),
    st.integers(1, 12),
    st.lists(st.sampled_from("ab"), max_size=3),
)


@given(PATTERN)
def test_every_layer_is_like_the_one_that_stands_for_it_and_neither_ends_nor_firsts_are_in_the_middle(kinds):
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
    middle = [layer for layer in range(depth.num_layers) if depth.is_middle(layer)]
    if depth.num_recorded == depth.num_layers:
        assert middle == []
        return
    assert (middle[0], len(middle) % depth.period) == (depth.head, 0)
    assert {kinds.index(kind) for kind in kinds}.isdisjoint(middle)
    assert depth.tail >= 1


def test_the_layers_to_record():
    for kinds, recorded in (
        ("a" * 32, [0, 1, 2, 31]),
        ("a" * 4, [0, 1, 2, 3]),
        ("", []),
        ("ddd" + "m" * 58, [0, 1, 2, 3, 4, 5, 60]),
        ("sf" * 6, [0, 1, 2, 3, 4, 5, 10, 11]),
        ("sssssf" * 4 + "ss", [*range(18), 24, 25]),
        ("a" * 9 + "b", list(range(10))),
        ("abcdefghij", list(range(10))),
    ):
        assert depth_of(list(kinds)).recorded == recorded, kinds
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


@pytest.mark.parametrize("kinds", ["m" * 4, "m" * 5, "m" * 9, "m" * 32, "ddmmmmmmm"])
def test_a_recorded_step_becomes_the_full_one(kinds):
    """Neighbours of another kind number their births otherwise; nothing is expanded where all were recorded."""
    depth, dense = depth_of(list(kinds)), kinds.count("d")
    expansion = expand(Step(depth.num_recorded, dense=dense).run(), depth, layers_path=PATH)
    full = Step(len(kinds), dense=dense).run()
    assert expansion.stream == expand(full, depth.whole(), layers_path=PATH).stream


def test_a_storage_is_found_in_the_layer_that_is_asked_for():
    expansion = expand(Step(4).run(), DEPTH, layers_path=PATH)
    weights = [expansion.number(DEPTH.template(layer), layer) for layer in range(9)]
    assert weights == list(range(9))  # they come first
    assert expansion.number(4, 6) == 9  # of no layer: the shared one, after nine weights
    with pytest.raises(NotUniformError, match="storage 0 is not of layer 6"):
        expansion.number(0, 6)


def born(step, *layers, sizes=(10,) * 4):
    return [step.birth(sizes[layer], "forward", layer) for layer in layers]


def uneven_deaths(step):
    storages = born(step, 0, 1, 2, 3)
    for layer in reversed(range(4)):
        step.death(storages[{2: 1, 1: 2}.get(layer, layer)], "backward", layer)


def both_middle_ones_die_outside(step):
    for each in born(step, 0, 1, 2, 3)[1:3]:
        step.death(each, "forward", None)
    step.birth(1, "backward", None)


def far_away(step):
    """Something of the first layer's dies in the last one: not of a neighbour, and not in the middle."""
    storages = born(step, 0, 1, 2, 3)
    for layer in reversed(range(4)):
        step.birth(1, "backward", layer)
        if layer == 3:
            step.death(storages[1], "backward", layer)


def test_what_does_not_repeat_is_refused():
    for make, message in [
        (lambda step: born(step, 0, 1, 2, 3, sizes=(10, 11, 12, 13)), "layers 1 and 2 differ"),
        (uneven_deaths, "layers 1 and 2 differ"),
        (lambda step: born(step, 0, 2, 1, 3), r"layers come in the order \[0, 2, 1, 3\]"),
        (both_middle_ones_die_outside, r"outside the layers, something dies of layers \[1, 2\]"),
        (far_away, "in layer 3, something dies of layer 1"),
    ]:
        step = Step(4)
        step.stream.mark("first")
        make(step)
        with pytest.raises(NotUniformError, match=message):
            expand(step.stream, DEPTH, layers_path=PATH)


LORA = {"adapter": {"type": "lora", "r": 4}}
DORA = {"adapter": {"type": "lora", "r": 4, "use_dora": True, "target_modules": "all-linear"}}
DROPPED = {"adapter": {"type": "lora", "r": 4, "dropout": 0.1}}
KEPT = {"enable_gradient_checkpointing": True}
TWICE = {"effective_batch_size": 4}
TRAINING = {
    "full, checkpointed, accumulated, fp16-mixed, adafactor": {
        **KEPT, **TWICE, "precision": "fp16-mixed", "optimizer": {"type": "adafactor"},
    },
    "full, flash, bf16-true, sgd with momentum": {
        **KEPT, "attention": "flash_attention_2", "precision": "bf16-true", "optimizer": {"type": "sgd", "momentum": 0.9},
    },
    "full, fp32, paged": {"precision": "fp32", "optimizer": {"type": "paged_adamw_8bit"}, **KEPT},
    "lora, chunked loss": {"chunked_loss": True, **KEPT, **LORA},
    "lora, dropout, whole logits, fp32, accumulated": {"precision": "fp32", "chunked_loss": False, **TWICE, **DROPPED},
    "dora": {**KEPT, **DORA},
    "full, packed, bf16-mixed": {**KEPT, **TWICE, "packing": True},
    "lora, packed, Liger's kernels": {"precision": "bf16-true", "packing": True, "kernels": "liger", **LORA},
    "4-bit": {"quantization": {"bits": 4}, **KEPT, **LORA},
    "4-bit, fp32, eager": {"quantization": {"bits": 4}, "precision": "fp32", "attention": "eager", **LORA},
    "8-bit dora, fp16, accumulated": {"quantization": {"bits": 8}, "precision": "fp16-mixed", **TWICE, **DORA},
}  # fmt: skip


def untrained(folder, new_tokens=6, **settings):
    given = {"max_new_tokens": new_tokens, "do_sample": False, **settings}
    return {"base_model": str(folder), "trainer": {"type": "none"}, "generation": given}


LAYERS, HEADS_KV, HEAD, WIDTH_BYTES = 5, 2, 8, 2
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=LAYERS)


def check(config, phase, num_recorded, **shape):
    with recorded_layers() as layers:
        expanded = stream_of(config, phase, **shape)
    assert layers == num_recorded
    assert events(expanded) == events(stream_of(config, phase, whole=True, **shape))


@pytest.mark.parametrize("settings", TRAINING.values(), ids=TRAINING)
def test_training(llama, settings):
    check(training(llama, **settings), "train", [4])


SOME = {
    "full, accumulated, bf16-mixed": (7, 12, 8, {**TWICE, "precision": "bf16-mixed"}),
    "lora, dropout, few others": (8, 11, 7, {**DROPPED}),
    "4-bit, few": (3, 9, 7, {"quantization": {"bits": 4}, **LORA}),
    "full, all": (6, 6, 4, {}),
}


@pytest.mark.parametrize(("some", "num_layers", "num_recorded", "settings"), SOME.values(), ids=SOME)
def test_training_where_some_layers_are_recomputed(some, num_layers, num_recorded, settings, tmp_path):
    folder = write_folder(tmp_path, "llama", num_hidden_layers=num_layers)
    check(training(folder, enable_gradient_checkpointing=some, **settings), "train", [num_recorded])


def test_evaluation_and_generation(llama):
    check(untrained(llama), "evaluate", [4])
    check(untrained(llama), "generate", [4, 4])
    check(untrained(llama, **SAMPLED), "generate", [4, 4])


def test_beams_reorder_the_cache_outside_the_layers_so_all_are_recorded(llama):
    with recorded_layers() as layers:
        stream = stream_of(untrained(llama, 3, num_beams=3), "generate")
    assert layers == [4, LAYERS]
    births = zip(stream.storages, stream.places, strict=True)
    reordered = [storage for storage, place in births if storage >= 0 and place.operator == "aten::index_select"]
    # Keys and values of all layers, after the first and the second token.
    assert [stream.categories[storage] for storage in reordered] == ["kv_cache"] * 2 * 2 * LAYERS


# Of the patterns in which layers differ one architecture each, with the number of layers that is recorded.
PATTERNS = {
    "gpt2": ({"n_layer": 5}, 4),
    "deepseek_v3": ({"num_hidden_layers": 7}, 6),  # two dense layers, then such with experts
    "gpt_oss": ({"num_hidden_layers": 9}, 7),  # sliding and full attention by turns
}


@pytest.mark.parametrize("family", PATTERNS)
def test_training_where_layers_differ(family, tmp_path):
    changes, num_recorded = PATTERNS[family]
    settings = {"enable_gradient_checkpointing": True, "chunked_loss": True, "optimizer": "sgd"}
    check(training(write_folder(tmp_path / family, family, **changes), **settings), "train", [num_recorded], tokens=4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_architecture_can_be_traced(family, tmp_path):
    stream = stream_of(untrained(write_folder(tmp_path / family, family)), "evaluate", tokens=4)
    assert {"weights", "logits_and_loss"} <= set(stream.categories)


def test_what_asks_for_values_is_refused_by_name(tmp_path):
    config = untrained(write_folder(tmp_path / "dbrx", "dbrx", **DBRX))
    message = r"the architecture 'dbrx' cannot be traced: DynamicOutputShapeException: aten.nonzero"
    with pytest.raises(ModelError, match=message):
        predict_memory(config, batch_size=1, sequence_length=4, phase="evaluate", device="t4")


ROWS, TOKENS = 2, 8
CELL_BYTES = 2 * LAYERS * HEADS_KV * HEAD * WIDTH_BYTES  # of the cache, for a token of a row


def composed(config, new_tokens):
    return static_stream(workload_of(config, "generate").generation(), ROWS, TOKENS, new_tokens=new_tokens)[0]


def traced(config, new_tokens, monkeypatch):
    """Every token traced."""
    with monkeypatch.context() as patches:
        patches.setattr(streams, "TRACED_TOKENS", new_tokens)
        recording = record(workload_of(config, "generate").generation(), rows=ROWS, tokens=TOKENS)
    parts = ["load", "prefill", *(f"decode {step}" for step in range(1, new_tokens))]
    assert list(recording.parts)[: len(parts)] == parts
    return compose_parts(recording, parts)


def steps(stream):
    """The events of each part: bytes, negative at a death, and places."""
    events = list(zip(log(stream), stream.places, strict=True))
    return {label: events[start:end] for (start, label), (end, _) in pairwise(stream.marks)}


def without_padding(events):
    """Without masks that are padded to a multiple of 8 tokens: between the traced lengths these lie on a line, too."""
    return [each for each in events if abs(each[0]) >= 256]  # keys and values of 8 tokens have 512 bytes


def cache_bytes(stream):
    """Live bytes of the cache at each mark."""
    living = [alive(stream, position) for position, _ in stream.marks]
    return [sum(stream.sizes[each] for each in found if stream.categories[each] == "kv_cache") for found in living]


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 4, 5])
def test_few_tokens_are_all_traced_and_the_cache_holds_all_but_the_last(llama, new_tokens, monkeypatch):
    config = untrained(llama, new_tokens)
    stream = composed(config, new_tokens)
    if new_tokens > 1:
        assert cache_bytes(stream)[-1] == CELL_BYTES * ROWS * (TOKENS + new_tokens - 1)
    if new_tokens < 5:
        full = traced(config, new_tokens, monkeypatch)
        assert (stream.sizes, stream.storages, stream.places) == (full.sizes, full.storages, full.places)


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_many_tokens_are_as_if_all_were_traced(llama, settings, monkeypatch):
    config = untrained(llama, 12, **settings)
    full = traced(config, 12, monkeypatch)
    theirs = steps(full)
    few = list(steps(composed(config, 12)).values())
    monkeypatch.setattr(streams, "_LEAST_BYTES", 0)  # nothing is left out
    stream = composed(config, 12)
    mine = steps(stream)
    assert list(mine) == ["load", "prefill", *(f"token {token}" for token in range(2, 13))]
    for (label, ours), other in zip(mine.items(), theirs.values(), strict=True):
        assert without_padding(ours) == without_padding(other), label
    assert mine["token 12"] == theirs["decode 11"]
    assert cache_bytes(stream) == cache_bytes(full)
    # What is small and passes is left out but in the last step, in the load, the prompts and what was traced.
    every = list(theirs.values())
    assert few[-1] == every[-1]
    assert few[:5] == every[:5]
    assert all(len(some) < len(whole) for some, whole in zip(few[5:-1], every[5:-1], strict=True))


@pytest.mark.parametrize("tokens", [5, 6, 7])
def test_prompts_after_which_a_mask_needs_no_padding_are_traced_a_little_longer(llama, tokens):
    stream, _ = static_stream(workload_of(untrained(llama, 7), "generate").generation(), 1, tokens, new_tokens=7)
    assert list(steps(stream))[-1] == "token 7"
    assert CELL_BYTES * (tokens + 6) <= cache_bytes(stream)[-1] <= CELL_BYTES * (tokens + 6 + 4)
