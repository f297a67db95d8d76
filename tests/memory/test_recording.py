"""Storages of hand-made operators and of a micro-batch: against real tensors, and closed forms, to the byte."""

import gc
from collections import Counter
from itertools import accumulate
from unittest.mock import patch

import pytest
import torch
from tests.memory.tiny_architectures import write_folder
from tests.memory.traced import Births, alive, gradient_functions, log, stream_of, training, workload_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from brim.infer.engines import CacheShape
from brim.lazy import without_collector
from brim.memory.allocator import CachingAllocator, replay
from brim.memory.events import CATEGORIES, Place
from brim.memory.generation import DECODE, FILL, PREFILL
from brim.memory.trace import operators, record, with_workspaces
from brim.memory.trace.recorder import Recorder
from brim.memory.traces import training_stream
from brim.models.packing import passing


def test_what_an_operator_needs_within_itself_dies_after_its_outputs_are_born():
    def temporaries(operator, args, kwargs):
        return 1000 if operator == "aten::mm" else 0

    with FakeTensorMode(), Recorder(temporaries=temporaries) as recorder:
        product = torch.empty(2, 2) @ torch.empty(2, 2)
        assert recorder.number_of(product) == 3
        stream = recorder.close()
        del product  # of which nothing is written any more
    assert log(stream) == [16, 16, 1000, 16, -1000, -16, -16]


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


def births(stream, phase, *operators):
    return [
        place
        for storage, place in zip(stream.storages, stream.places, strict=True)
        if storage >= 0 and place.phase == phase and (not operators or place.operator in operators)
    ]


MM, RELU = "aten::mm", "aten::relu"
CHECKPOINTED = pytest.mark.parametrize("checkpointed", [None, "reentrant", "not reentrant"])


@CHECKPOINTED
def test_a_step_by_hand(checkpointed):
    with without_collector(), FakeTensorMode():
        model, x = Stack(checkpointed), torch.empty(2, 4, requires_grad=True)
        with Recorder() as recorder:
            recorder.born(x, "activations")
            recorder.know(model, model.layers)
            recorder.phase = "load"
            recorder.enter_weights(model)
            recorder.phase = "forward"
            with recorder.watching_modules():
                model(x).sum().backward()
            stream = recorder.close()

    def at(phase, layer, name="", operator=""):
        module = "head" if layer is None else f"layers.{layer}.{name}".rstrip(".")
        return Place(phase, layer, module, operator)

    # Weights are born at the places of their modules, the forward pass is placed by the module that runs.
    names = [(0, "up"), (0, "down"), (1, "up"), (1, "down"), (None, "")]
    assert births(stream, "load") == [at("load", *name) for name in names]
    assert [stream.sizes[recorder.number_of(weight)] for weight in model.parameters()] == [128, 128, 128, 128, 48]
    assert births(stream, "forward", MM, RELU) == [
        *(at("forward", 0, *each) for each in (("up", MM), ("", RELU), ("down", MM))),
        *(at("forward", 1, *each) for each in (("up", MM), ("", RELU), ("down", MM))),
        at("forward", None, "", MM),
    ]

    # The backward pass by the operator whose gradient it computes.
    def anew(layer):
        """Recomputation, which not-reentrant checkpointing ends as soon as all that is needed is there."""
        places = [at("backward", layer, "up", MM), at("backward", layer, "", RELU), at("backward", layer, "down", MM)]
        return {None: [], "reentrant": places}.get(checkpointed, places[:2])

    def back(layer):
        down, up = (at("backward", layer, name, MM) for name in ("down", "up"))
        return [down, down, up, up]

    head = at("backward", None, "", MM)
    assert births(stream, "backward", MM, RELU) == [head, head, *anew(1), *back(1), *anew(0), *back(0)]
    operators = {stream.places[stream.storages.index(storage)].operator for storage in recorder.recomputed}
    assert (RELU in operators) == (checkpointed is not None)  # kept: the input of the second product
    assert operators <= ({RELU, MM, "aten::threshold_backward"} if checkpointed else set())

    # All but weights, gradients and the input dies.
    kept = {recorder.number_of(each) for weight in (*model.parameters(), x) for each in (weight, weight.grad)}
    assert alive(stream) == kept


@CHECKPOINTED
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
            assert gradient_functions(watched) == gradient_functions(expected)
            watched.sum().backward()
    assert torch.equal(watched, expected)
    assert all(torch.equal(weight.grad, was) for weight, was in zip(model.parameters(), gradients, strict=True))


def test_a_module_that_is_not_the_models_stands_where_it_is_called():
    class Calling(nn.Module):
        def forward(self, x):
            return nn.GELU()(x)

    with FakeTensorMode():
        model, x = nn.Sequential(Calling(), nn.ReLU()), torch.empty(3)
        with Recorder() as recorder:
            recorder.know(model, model)
            with recorder.watching_modules():
                model(x)
    places = [(place.layer, place.module, place.operator) for place in births(recorder.stream, "")]
    assert places == [(0, "0", "aten::gelu"), (1, "1", RELU)]


def test_the_collector_is_put_back_by_the_outermost():
    assert gc.isenabled()
    with without_collector():
        assert not gc.isenabled()
        with without_collector():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


LAYERS, WIDTH, INNER, VOCABULARY = 6, 32, 48, 120
HEADS_KV, HEAD = 2, 8
ROWS, TOKENS = 2, 16
LORA = {"adapter": {"type": "lora", "r": 4, "dropout": 0.1}}
LAYER_SHAPES = [  # of a Llama: queries, keys, values and output, then gate, up and down, then two norms
    (WIDTH, WIDTH), (HEADS_KV * HEAD, WIDTH), (HEADS_KV * HEAD, WIDTH), (WIDTH, WIDTH),
    (INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER), (WIDTH,), (WIDTH,),
]  # fmt: skip
SHAPES = [(VOCABULARY, WIDTH), (VOCABULARY, WIDTH), (WIDTH,)] + LAYERS * LAYER_SHAPES  # embeddings, head, norm
ELEMENTS = sum(torch.Size(shape).numel() for shape in SHAPES)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=LAYERS)


def recorded(config):
    return record(workload_of(config, "train", target=None).training(), rows=ROWS, tokens=TOKENS)


def log_of(recording, *parts):
    """+bytes and -bytes of the events of some parts."""
    bytes_of_all = log(recording.stream)
    return [each for part in parts for each in bytes_of_all[slice(*recording.parts[part])]]


@pytest.mark.parametrize(
    "given",
    [
        {"precision": "fp32"},
        {"precision": "bf16-mixed", "enable_gradient_checkpointing": True, "chunked_loss": False},
        {"precision": "bf16-true", "enable_gradient_checkpointing": True, "chunked_loss": True, **LORA},
        {"precision": "bf16-mixed", "chunked_loss": True, "effective_batch_size": 2 * ROWS, **LORA},
        {"precision": "bf16-mixed", "effective_batch_size": 2 * ROWS, "enable_gradient_checkpointing": LAYERS - 1},
        {"precision": "bf16-mixed", "chunked_loss": True, "enable_gradient_checkpointing": True, "packing": True},
        {"precision": "bf16-true", "packing": True, **LORA},
        {"precision": "bf16-mixed", "enable_gradient_checkpointing": True, "kernels": "liger", **LORA},
    ],
    ids=[
        "full",
        "checkpointed, whole logits",
        "lora, checkpointed, chunked loss",
        "lora, two micro-batches",
        "five of six layers checkpointed, two micro-batches",
        "packed, checkpointed",
        "packed, lora",
        "lora, checkpointed, Liger's kernels",
    ],
)
def test_fake_tensors_do_what_real_ones_do(llama, given):
    traced = workload_of(training(llama, **given), "train", target=None).training()
    fake = record(traced, rows=ROWS, tokens=TOKENS)
    parts = [part for part in fake.parts if part != "load"]
    assert fake.depth.num_recorded < LAYERS
    model = traced.build(traced.architecture)
    with passing(None, None), without_collector(), Births() as real:
        real.know(*model.parameters(), *model.buffers())
        for _ in parts:
            traced.training.micro_batch(model, traced.batch(ROWS, TOKENS))
    expected = log_of(fake, *parts)
    assert Counter(real.log) == Counter(expected)
    assert max(accumulate(real.log)) == max(accumulate(expected))
    assert real.live_bytes == sum(expected)


def test_packed_passes_of_generation_over_fake_tensors_do_what_those_over_real_ones_do(llama):
    config = {"base_model": str(llama), "precision": "bf16-true", "trainer": {"type": "none", "packing": True}}
    shape = CacheShape(rows=5, columns=TOKENS + 6, prompts=3, prompt_tokens=TOKENS)
    traced = workload_of({**config, "generation": {"max_new_tokens": 7}}, "generate", target=None).slots(shape)
    fake = record(traced, rows=shape.rows, tokens=shape.columns)
    model, begun = traced.build(traced.architecture), []
    with without_collector(), Births() as real:
        real.know(*model.parameters(), *model.buffers())
        traced.run(model, None, begun.append)
    parts = [part for part in begun if part != "over"]
    expected = log_of(fake, *parts)
    assert parts == [FILL, PREFILL, DECODE]
    assert Counter(size for size in real.log if size > 0) <= Counter(expected)  # a trace makes what is uploaded twice
    assert max(accumulate(real.log)) == max(accumulate(expected))


def bytes_of(stream, storages, category):
    return sum(stream.sizes[each] for each in storages if stream.categories[each] == category)


@pytest.mark.parametrize(
    ("precision", "width", "optimizer", "moments"),
    [
        ("bf16-true", 2, "adamw", 2),
        ("bf16-mixed", 4, "adamw", 2),
        ("bf16-true", 2, "sgd", 0),
        ("fp32", 4, {"type": "sgd", "momentum": 0.9}, 1),
    ],
)
def test_weights_gradients_and_the_optimizers_state(llama, precision, width, optimizer, moments):
    stream = stream_of(training(llama, precision=precision, optimizer=optimizer), "train", rows=ROWS, tokens=TOKENS)
    step, end = alive(stream, "step 1: optimizer"), alive(stream)
    rotary_bytes = HEAD // 2 * 4  # inverse frequencies, a buffer, once or twice
    assert bytes_of(stream, step, "weights") - width * ELEMENTS in (rotary_bytes, 2 * rotary_bytes)
    assert bytes_of(stream, step, "gradients") == width * ELEMENTS
    assert bytes_of(stream, step, "optimizer_state") == 0
    counts_bytes = 4 * (9 * LAYERS + 3) if optimizer == "adamw" else 0  # of steps, on the device
    assert bytes_of(stream, end, "optimizer_state") == moments * width * ELEMENTS + counts_bytes
    update = {name: position for position, name in stream.marks}["step 2: optimizer"]
    if optimizer == "adamw":  # one kernel, without temporaries: the gradients' norms alone
        assert sum(size for size in log(stream)[update:] if size > 0) < width * ELEMENTS / 20
    assert bytes_of(stream, end, "gradients") == 0


def test_an_adapters_gradients_and_state_and_categories_that_sum_to_what_is_live(llama):
    config = training(llama, precision="bf16-mixed", optimizer="adamw", effective_batch_size=2 * ROWS, **LORA)
    stream = stream_of(config, "train", rows=ROWS, tokens=TOKENS)
    trained_bytes = 4 * LAYERS * 4 * ((WIDTH + WIDTH) + (WIDTH + HEADS_KV * HEAD))  # A and B of rank 4, in fp32
    assert bytes_of(stream, alive(stream, "step 1: optimizer"), "gradients") == trained_bytes
    assert bytes_of(stream, alive(stream), "optimizer_state") == 2 * trained_bytes + 4 * 4 * LAYERS
    replayed = replay(with_workspaces(stream, 2**20), CachingAllocator())
    assert (sum(replayed.live_bytes[each] for each in CATEGORIES) == replayed.allocated_bytes).all()
    assert min(each.min() for each in replayed.live_bytes.values()) == 0
    assert replayed.live_bytes["workspace"][-1] == 2 * 2**20


def test_whole_logits(llama):
    stream = recorded(training(llama, precision="fp32", chunked_loss=False)).stream
    found = zip(stream.sizes, stream.categories, strict=True)
    largest = max(size for size, category in found if category == "logits_and_loss")
    assert largest == ROWS * TOKENS * VOCABULARY * 4  # the head's product


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", "deepseek_v3", "mamba"])
def test_nothing_stays_from_step_to_step(family, tmp_path):
    config = training(write_folder(tmp_path / family, family), optimizer="adamw")
    stream = training_stream(workload_of(config, "train"), [(1, 4)] * 3)
    ends = [alive(stream, label) for label in ("step 2", "step 3", None)]
    assert ends[0] == ends[1] == ends[2]
    assert {stream.categories[storage] for storage in ends[0]} == {"weights", "optimizer_state"}


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("llama", {"enable_gradient_checkpointing": True, **LORA}),
        ("qwen3_moe", {"precision": "bf16-true", "chunked_loss": False}),
        ("gpt_bigcode", {"precision": "fp16-mixed", "optimizer": {"type": "adamw_8bit"}}),
        ("mistral", {"precision": "bf16-true", "quantization": {"bits": 4}, **LORA}),
    ],
)
def test_remembered_results_are_those_of_pytorch(tmp_path, monkeypatch, family, given):
    workload = workload_of(training(write_folder(tmp_path / family, family), **given), "train").training()
    found = [record(workload, rows=ROWS, tokens=TOKENS) for _ in range(2)]
    monkeypatch.setattr(operators, "_extend_key", lambda *others: False)
    plain = record(workload, rows=ROWS, tokens=TOKENS)
    assert [(each.stream, each.work, each.trained) for each in found] == [(plain.stream, plain.work, plain.trained)] * 2


def test_a_second_trace_asks_pytorch_for_little(llama):
    workload = workload_of(training(llama, **LORA), "train", target=None).training()
    dispatch = FakeTensorMode.__torch_dispatch__
    with patch.object(FakeTensorMode, "__torch_dispatch__", autospec=True, side_effect=dispatch) as asked:
        record(workload, rows=ROWS, tokens=TOKENS + 1)
        first = asked.call_count
        record(workload, rows=ROWS, tokens=TOKENS + 1)
    assert 100 < asked.call_count < first * 4 / 3
