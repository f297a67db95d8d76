"""A micro-batch recorded on fake tensors: against real tensors, and against closed forms, to the byte."""

from collections import Counter
from itertools import accumulate

import pytest
from tests.memory.births import Births
from tests.memory.expansion import stream_of, workload_of
from tests.memory.tiny_architectures import write_folder
from torch._subclasses.fake_tensor import FakeTensorMode

from brim.memory.allocator import CachingAllocator, replay
from brim.memory.cuda import rows_not_packed
from brim.memory.trace import CATEGORIES, record, recorder, with_workspaces
from brim.memory.trace.recording import without_collector
from brim.memory.traces import training_stream

LAYERS, WIDTH, INNER, VOCABULARY = 6, 32, 48, 120
HEADS_KV, HEAD = 2, 8
ROWS, TOKENS = 2, 16
LORA = {"adapter": {"type": "lora", "r": 4, "dropout": 0.1}}

LAYER_SHAPES = [  # of a Llama: queries, keys, values and output, then gate, up and down, then two norms
    (WIDTH, WIDTH), (HEADS_KV * HEAD, WIDTH), (HEADS_KV * HEAD, WIDTH), (WIDTH, WIDTH),
    (INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER), (WIDTH,), (WIDTH,),
]  # fmt: skip
SHAPES = [(VOCABULARY, WIDTH), (VOCABULARY, WIDTH), (WIDTH,)] + LAYERS * LAYER_SHAPES  # embeddings, head, norm


def elements(shape):
    product = 1
    for size in shape:
        product *= size
    return product


@pytest.fixture
def llama(tmp_path):
    return write_folder(tmp_path / "llama", "llama", num_hidden_layers=LAYERS)


def config_of(folder, **given):
    trainer = {key: given.pop(key) for key in tuple(given) if key not in ("adapter", "precision", "preprocessing")}
    return {"base_model": str(folder), "trainer": {"type": "finetune", "batch_size": ROWS, **trainer}, **given}


def recorded(config, *, target=None):
    return record(workload_of(config, "train", target=target).training(), rows=ROWS, tokens=TOKENS)


def log_of(recording, *parts):
    """+bytes and -bytes of the events of some parts."""
    stream = recording.stream
    storages = [storage for part in parts for storage in stream.storages[slice(*recording.parts[part])]]
    return [stream.sizes[storage] if storage >= 0 else -stream.sizes[~storage] for storage in storages]


@pytest.mark.parametrize(
    "given",
    [
        {"precision": "fp32"},
        {"precision": "bf16-mixed", "enable_gradient_checkpointing": True, "chunked_loss": False},
        {"precision": "bf16-true", "enable_gradient_checkpointing": True, "chunked_loss": True, **LORA},
        {"precision": "bf16-mixed", "chunked_loss": True, "effective_batch_size": 2 * ROWS, **LORA},
    ],
    ids=["full", "checkpointed, whole logits", "lora, checkpointed, chunked loss", "lora, two micro-batches"],
)
def test_fake_tensors_do_what_real_ones_do(llama, given):
    config = config_of(llama, **{"effective_batch_size": ROWS, **given})
    traced = workload_of(config, "train", target=None).training()
    fake = record(traced, rows=ROWS, tokens=TOKENS)
    parts = [part for part in fake.parts if part != "load"]
    assert fake.depth.num_recorded < LAYERS
    model = traced.build(traced.architecture)
    with rows_not_packed(), without_collector(), Births() as real:
        real.know(*model.parameters(), *model.buffers())
        for _ in parts:
            traced.training.micro_batch(model, traced.batch(ROWS, TOKENS))
    expected = log_of(fake, *parts)
    assert Counter(real.log) == Counter(expected)
    assert real.peak_bytes == max(accumulate(expected))
    assert real.live_bytes == sum(expected)


def alive(stream, label=None):
    """Storages that are alive when a mark is reached; at the end if there is none."""
    end = next((position for position, name in stream.marks if name == label), len(stream.storages))
    living = set()
    for storage in stream.storages[:end]:
        if storage >= 0:
            living.add(storage)
        else:
            living.remove(~storage)
    return living


def bytes_of(stream, storages, category=None):
    return sum(stream.sizes[each] for each in storages if category in (None, stream.categories[each]))


def test_weights_gradients_and_the_optimizers_state(llama):
    weight_bytes = sum(map(elements, SHAPES))
    for precision, width, optimizer, moments in (
        ("bf16-true", 2, "adamw", 2),
        ("fp32", 4, "adamw", 2),
        ("bf16-mixed", 4, "adamw", 2),
        ("bf16-true", 2, "sgd", 0),
        ("fp32", 4, {"type": "sgd", "momentum": 0.9}, 1),
    ):
        config = config_of(llama, precision=precision, optimizer=optimizer, effective_batch_size=ROWS)
        stream = stream_of(config, "train", rows=ROWS, tokens=TOKENS)
        step = alive(stream, "step 1: optimizer")
        rotary_bytes = HEAD // 2 * 4  # inverse frequencies, a buffer
        assert bytes_of(stream, step, "weights") in (
            width * weight_bytes + rotary_bytes,
            width * weight_bytes + 2 * rotary_bytes,
        )
        assert bytes_of(stream, step, "gradients") == width * weight_bytes
        assert bytes_of(stream, step, "optimizer_state") == 0
        assert bytes_of(stream, alive(stream), "optimizer_state") == moments * width * weight_bytes
        assert bytes_of(stream, alive(stream), "gradients") == 0


def test_an_adapters_gradients_and_state(llama):
    config = config_of(llama, precision="bf16-mixed", effective_batch_size=ROWS, optimizer="adamw", **LORA)
    stream = stream_of(config, "train", rows=ROWS, tokens=TOKENS)
    trained_bytes = 4 * LAYERS * 4 * ((WIDTH + WIDTH) + (WIDTH + HEADS_KV * HEAD))  # A and B of rank 4, in fp32
    assert bytes_of(stream, alive(stream, "step 1: optimizer"), "gradients") == trained_bytes
    assert bytes_of(stream, alive(stream), "optimizer_state") == 2 * trained_bytes


def test_checkpoints_keep_the_input_of_each_layer(llama):
    config = config_of(llama, precision="bf16-true", enable_gradient_checkpointing=True, effective_batch_size=ROWS)
    recording = recorded(config)
    stream = recording.stream
    start, _ = recording.parts["first"]
    backward = next(i for i in range(start, len(stream.places)) if stream.places[i].phase == "backward")
    living = set()
    for storage in stream.storages[:backward]:
        living.add(storage) if storage >= 0 else living.discard(~storage)
    inputs = [
        storage
        for position, storage in enumerate(stream.storages[:backward])
        if storage in living
        and stream.categories[storage] == "activations"
        and (stream.places[position].layer is not None or stream.places[position].module.endswith("embed_tokens"))
        and stream.sizes[storage] == ROWS * TOKENS * WIDTH * 2
    ]
    assert len(inputs) == LAYERS


def test_whole_logits(llama):
    config = config_of(llama, precision="fp32", chunked_loss=False, effective_batch_size=ROWS)
    stream = recorded(config).stream
    sizes = Counter(
        stream.sizes[storage]
        for storage, place in zip(stream.storages, stream.places, strict=True)
        if storage >= 0 and place.phase == "forward" and stream.categories[storage] == "logits_and_loss"
    )
    assert sizes[ROWS * TOKENS * VOCABULARY * 4] >= 1  # the head's product
    assert max(sizes) == ROWS * TOKENS * VOCABULARY * 4
    chunked = recorded(config_of(llama, precision="fp32", chunked_loss=True, effective_batch_size=ROWS)).stream
    assert set(chunked.categories) == set(stream.categories)


def test_the_second_micro_batch_holds_the_gradients_of_the_first(llama):
    config = config_of(llama, precision="fp32", effective_batch_size=2 * ROWS)
    recording = recorded(config)
    assert list(recording.parts) == ["load", "first", "next", "end"][:3]
    first, second = log_of(recording, "first"), log_of(recording, "next")
    weight_bytes = 4 * sum(map(elements, SHAPES))
    assert sum(first) - weight_bytes < ROWS * TOKENS * 8 * 4  # and no more than what the batch holds
    assert sum(second) < ROWS * TOKENS * 8 * 4
    assert max(accumulate(second)) + sum(first) > max(accumulate(first))


NOT_EVERY = ("llama", "mixtral", "gemma2", "gpt2", "gpt_oss", "deepseek_v3", "mamba", "bloom")


@pytest.mark.parametrize("family", NOT_EVERY)
def test_nothing_stays_from_step_to_step(family, tmp_path):
    config = config_of(write_folder(tmp_path / family, family), effective_batch_size=ROWS, optimizer="adamw")
    stream = training_stream(workload_of(config, "train"), [(1, 4)] * 3)
    ends = [alive(stream, label) for label in ("step 2", "step 3", None)]
    assert ends[0] == ends[1] == ends[2]
    assert {stream.categories[storage] for storage in ends[0]} == {"weights", "optimizer_state"}


def test_categories_sum_to_what_is_live(llama):
    stream = stream_of(config_of(llama, effective_batch_size=2 * ROWS, **LORA), "train", rows=ROWS, tokens=TOKENS)
    replayed = replay(with_workspaces(stream, 2**20), CachingAllocator())
    assert (sum(replayed.live_bytes[each] for each in CATEGORIES) == replayed.allocated_bytes).all()
    assert min(each.min() for each in replayed.live_bytes.values()) == 0
    assert replayed.live_bytes["workspace"][-1] == 2 * 2**20


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("llama", LORA),
        ("llama", {"enable_gradient_checkpointing": True, **LORA}),
        ("gemma2", {"precision": "bf16-mixed"}),
        ("qwen3_moe", {"precision": "bf16-true", "chunked_loss": False}),
        ("gpt_bigcode", {"precision": "fp16-mixed", "optimizer": {"type": "adamw_8bit"}}),
        ("mistral", {"precision": "bf16-true", "quantization": {"bits": 4}, **LORA}),
    ],
)
def test_remembered_results_are_those_of_pytorch(tmp_path, monkeypatch, family, given):
    folder = write_folder(tmp_path / family, family)
    quantization = {key: given[key] for key in ("quantization",) if key in given}
    config = {**config_of(folder, **{k: v for k, v in given.items() if k != "quantization"}), **quantization}
    workload = workload_of(config, "train").training()
    found = [record(workload, rows=ROWS, tokens=TOKENS) for _ in range(2)]
    monkeypatch.setattr(recorder, "result_of", lambda operator, args, kwargs: operator(*args, **kwargs))
    plain = record(workload, rows=ROWS, tokens=TOKENS)
    assert [(each.stream, each.work, each.trained) for each in found] == [(plain.stream, plain.work, plain.trained)] * 2


def test_a_second_trace_asks_pytorch_for_little(llama, monkeypatch):
    workload = workload_of(config_of(llama, **LORA), "train", target=None).training()
    asked = []
    dispatch = FakeTensorMode.__torch_dispatch__

    def counting(mode, operator, *arguments):
        asked[-1] += 1
        return dispatch(mode, operator, *arguments)

    monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", counting)
    for _ in range(2):
        asked.append(0)
        record(workload, rows=ROWS, tokens=TOKENS + 1)
    assert asked[1] < asked[0] / 3
