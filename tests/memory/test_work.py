"""Work of operators by hand, and of a micro-batch against closed forms, PyTorch's own counter, and all layers."""

from functools import cache
from pathlib import Path

import pytest
import torch
from tests.memory.tiny_architectures import write_folder
from tests.memory.traced import A100, all_layers, workload_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, addmm_flop

from brim.memory.trace import record, record_optimizer
from brim.memory.trace.operators import operator_work
from brim.models.packing import passing


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.works = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        work = operator_work(func, args, kwargs or {}, out)
        if work is not None:
            self.works.append(work)
        return out


def works(run):
    with Counted() as counted:
        run()
    return [(work.unit, work.dtype, work.flops, work.num_bytes, work.kernels) for work in counted.works]


A = torch.zeros(4, 6)
B = torch.zeros(6, 10)
F32, BF16 = "float32", "bfloat16"
OPERATORS = {
    "mm": (lambda: A @ B, [("matrix", F32, 2 * 4 * 6 * 10, 4 * (24 + 60 + 40), 1)]),
    "a cast": (lambda: A.bfloat16(), [("vector", BF16, 0, 24 * 6, 1)]),
    "bmm": (lambda: torch.bmm(A.expand(3, 4, 6), B.expand(3, 6, 10)),
            [("matrix", F32, 3 * 480, 4 * (24 + 60 + 3 * 40), 1)]),  # what is expanded lies there once
    "addmm": (lambda: torch.addmm(torch.zeros(10), A, B),
              [("vector", F32, 0, 40, 1), ("matrix", F32, 480, 4 * 134, 1)]),
    "add": (lambda: A + A, [("vector", F32, 0, 3 * 96, 1)]),
    "views are free": (lambda: A.clone().t().view(6, 4)[:2].detach(), [("vector", F32, 0, 2 * 96, 1)]),
    "empty": (lambda: torch.empty(9), []),
    "embedding": (lambda: torch.nn.functional.embedding(torch.zeros(5, dtype=torch.int64), torch.empty(100, 8)),
                  [("vector", "int64", 0, 40, 1), ("vector", F32, 0, 2 * 160 + 40, 1)]),
    "foreach": (lambda: torch._foreach_add_([torch.empty(7), torch.empty(65536 * 640)], 1.0),
                [("vector", F32, 0, 2 * 4 * (7 + 65536 * 640), 3)]),  # 641 chunks, 320 a launch
}  # fmt: skip


def test_operators():
    for name, (run, expected) in OPERATORS.items():
        assert works(run) == expected, name


def test_attention_is_two_products_forward_and_five_backward():
    q = torch.zeros(1, 2, 8, 4, requires_grad=True)

    def run(causal):
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=causal).sum().backward()

    for causal, share in ((True, 2), (False, 1)):
        found = [flops for unit, _, flops, _, _ in works(lambda c=causal: run(c)) if unit == "attention"]
        assert found == [4 * 2 * 8 * 8 * 4 // share, 10 * 2 * 8 * 8 * 4 // share]


LLAMA_2_7B = Path(__file__).parents[2] / "benchmarks" / "data" / "memory" / "models" / "meta-llama--Llama-2-7b-hf"
LAYERS, WIDTH, INNER, VOCABULARY = 32, 4096, 11008, 32000
LAYER_MATRICES = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER
MATRICES = LAYERS * LAYER_MATRICES + VOCABULARY * WIDTH  # all that multiplies; the embeddings are looked up
ROWS, TOKENS = 2, 512
N = ROWS * TOKENS
# Scores and values, causal: 2·s·h a token and layer forward, two and a half times as many backward.
ATTENTION = 2 * TOKENS * WIDTH * LAYERS * N
LORA = {"type": "lora", "r": 8, "target_modules": "all-linear"}


def traced_of(base, *, target=A100, **given):
    trainer = {"type": "finetune", "batch_size": 2, "chunked_loss": False, **given.pop("trainer", {})}
    config = {"base_model": str(base), "precision": "bf16-true", "trainer": trainer, **given}
    return workload_of(config, "train", target=target).training()


@cache
def work_of(*, checkpointing=False, chunked_loss=False, lora=False, precision="bf16-true", bits=None):
    given = {"adapter": LORA} if lora else {}
    if bits is not None:
        given["quantization"] = {"bits": bits}
    trainer = {"enable_gradient_checkpointing": checkpointing, "chunked_loss": chunked_loss}
    traced = traced_of(LLAMA_2_7B, trainer=trainer, precision=precision, **given)
    return record(traced, rows=ROWS, tokens=TOKENS).work["first"]


def test_full_training_takes_6n_and_attention_and_checkpointing_computes_the_layers_anew():
    work = work_of()
    assert work.of("forward").flops == 2 * MATRICES * N + ATTENTION
    assert work.of("backward").flops == 4 * MATRICES * N + 5 * ATTENTION // 2
    assert work.of("recompute").flops == 0
    assert {place.dtype for place, each in work.places.items() if each.flops} == {"bfloat16"}
    # Up to what the backward pass needs: not the last product of a layer, whose result nothing asks for.
    anew = work_of(checkpointing=True)
    assert anew.of("recompute").flops == 2 * LAYERS * (LAYER_MATRICES - WIDTH * INNER) * N + ATTENTION
    assert anew.of("forward", "backward").flops == work.flops


def test_lora_takes_4n_and_attention():
    """No gradients of frozen weights: 2N of them are left out. The adapters add 1% at rank 8 and 16 of 6N for them."""
    adapters = sum(8 * (a + b) for a, b in 4 * [(WIDTH, WIDTH)] + 2 * [(WIDTH, INNER)] + [(INNER, WIDTH)])
    work = work_of(lora=True)
    # Nothing asks for the gradient of the first layer's input.
    first = 2 * N * 3 * (WIDTH * WIDTH + 8 * WIDTH)
    assert work.flops == 4 * MATRICES * N + 7 * ATTENTION // 2 + 6 * LAYERS * adapters * N - first
    assert not any(place.dtype == "float32" for place, each in work.places.items() if each.flops)  # nor do adapters
    # The loss in chunks computes its gradient with it, in the forward pass; a row's last token predicts nothing.
    assert work.flops - work_of(lora=True, chunked_loss=True).flops == 2 * 2 * VOCABULARY * WIDTH * ROWS


def test_4_bit_weights_are_written_out_for_each_product():
    work = work_of(bits=4, lora=True, precision="bf16-mixed")
    passes = [place for place in work.places if place.operator == "dequantize_4bit"]
    per_pass = LAYERS * LAYER_MATRICES * 5 // 2  # half a byte read and two written an element
    forward = sum(work.places[place].num_bytes for place in passes if place.phase == "forward")
    backward = sum(work.places[place].num_bytes for place in passes if place.phase == "backward")
    assert forward == per_pass
    assert backward == per_pass - 3 * WIDTH * WIDTH * 5 // 2  # of the first layer's queries, keys and values
    assert work.flops == work_of(lora=True, precision="bf16-mixed").flops


@pytest.mark.parametrize(
    "given", [{}, {"trainer": {"enable_gradient_checkpointing": True}, "adapter": {**LORA, "r": 4}}]
)
def test_pytorchs_counter_counts_the_same(tmp_path, given):
    """On real tensors. It has no rule for the CPU's attention, nor for a product that is added in place."""
    folder = write_folder(tmp_path / "llama", "llama", num_hidden_layers=6)
    traced = traced_of(folder, target=None, precision="fp32", **given)
    model = traced.build(traced.architecture).to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.zero_()
    in_place = {torch.ops.aten.addmm_: lambda self, a, b, out_shape, **kwargs: addmm_flop(self, a, b)}
    with passing(None, None), FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        traced.training.micro_batch(model, traced.batch(2, 16))
    counts = counter.get_flop_counts()["Global"]
    work = record(traced, rows=2, tokens=16).work["first"]
    matrices = sum(each.flops for place, each in work.places.items() if place.unit == "matrix")
    assert matrices == sum(flops for operator, flops in counts.items() if "attention" not in str(operator))
    assert work.flops > matrices


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_few_layers_stand_for_all(tmp_path, family):
    traced = traced_of(write_folder(tmp_path / family, family), precision="bf16-mixed")
    few = record(traced, rows=2, tokens=16)
    few_update = record_optimizer(traced, few).work["steady"]
    with all_layers():
        whole = record(traced, rows=2, tokens=16)
        whole_update = record_optimizer(traced, whole).work["steady"]
    ours, theirs = few.work["first"], whole.work["first"]
    assert (ours.flops, ours.num_bytes, ours.kernels) == (theirs.flops, theirs.num_bytes, theirs.kernels)
    assert few_update.num_bytes == pytest.approx(whole_update.num_bytes, rel=1e-3)  # norms of each weight, one number
    assert few_update.kernels == whole_update.kernels


def test_an_update_moves_weights_gradients_and_averages_and_later_micro_batches_add_to_the_gradient(tmp_path):
    """Adam over lists: at least seven times each weight's 4 bytes, and all of them some tens of kernels."""
    trainer = {"effective_batch_size": 4, "gradient_accumulation_steps": 2}
    traced = traced_of(write_folder(tmp_path / "llama", "llama"), precision="fp32", trainer=trainer)
    recording = record(traced, rows=2, tokens=16)
    elements = sum(torch.Size(weight.shape).numel() for weight in recording.trained)
    update = record_optimizer(traced, recording).work["steady"]
    assert 7 * 4 * elements < update.num_bytes < 40 * 4 * elements
    assert update.flops == 0
    assert 10 < update.kernels < 100
    first, following = recording.work["first"], recording.work["next"]
    assert following.flops == first.flops
    assert following.kernels > first.kernels
