"""The work of a micro-batch: against closed forms, against PyTorch's own counter, and against all layers recorded."""

from pathlib import Path

import pytest
import torch
from tests.memory.expansion import A100, all_layers, workload_of
from tests.memory.tiny_architectures import write_folder
from torch.utils.flop_counter import FlopCounterMode

from brim.memory.cuda import rows_not_packed
from brim.memory.trace import record, record_optimizer

LLAMA_2_7B = Path(__file__).parents[2] / "benchmarks" / "data" / "memory" / "models" / "meta-llama--Llama-2-7b-hf"
LAYERS, WIDTH, INNER, VOCABULARY = 32, 4096, 11008, 32000
LAYER_MATRICES = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER
MATRICES = LAYERS * LAYER_MATRICES + VOCABULARY * WIDTH  # all that multiplies; the embeddings are looked up
ROWS, TOKENS = 2, 512
N = ROWS * TOKENS
# Scores and values, causal: 2·s·h a token and layer forward, two and a half times as many backward.
ATTENTION = 2 * TOKENS * WIDTH * LAYERS * N


def work_of(base=LLAMA_2_7B, *, part="first", rows=ROWS, tokens=TOKENS, target=A100, **given):
    trainer = {"type": "finetune", "batch_size": rows, "chunked_loss": False, **given.pop("trainer", {})}
    config = {"base_model": str(base), "precision": "bf16-true", "trainer": trainer, **given}
    return record(workload_of(config, "train", target=target).training(), rows=rows, tokens=tokens).work[part]


def lora(**given):
    return {"adapter": {"type": "lora", "r": 8, "target_modules": "all-linear", **given}}


def test_full_training_takes_6n_and_attention():
    work = work_of()
    assert work.of("forward").flops == 2 * MATRICES * N + ATTENTION
    assert work.of("backward").flops == 4 * MATRICES * N + 5 * ATTENTION // 2
    assert work.of("recompute").flops == 0
    assert work.flops_by_dtype() == {"bfloat16": work.flops}


def test_checkpointing_computes_the_layers_anew():
    """Up to what the backward pass needs: not the last product of a layer, whose result nothing asks for."""
    work = work_of(trainer={"enable_gradient_checkpointing": True})
    assert work.of("recompute").flops == 2 * LAYERS * (LAYER_MATRICES - WIDTH * INNER) * N + ATTENTION
    assert work.of("forward", "backward").flops == work_of().flops


def test_lora_takes_4n_and_attention():
    """No gradients of frozen weights: 2N of them are left out. The adapters add 1% at rank 8 and 16 of 6N for them."""
    adapters = sum(8 * (a + b) for a, b in 4 * [(WIDTH, WIDTH)] + 2 * [(WIDTH, INNER)] + [(INNER, WIDTH)])
    work = work_of(**lora())
    # Nothing asks for the gradient of the first layer's input.
    first = 2 * N * 3 * (WIDTH * WIDTH + 8 * WIDTH)
    exact = 4 * MATRICES * N + 7 * ATTENTION // 2 + 6 * LAYERS * adapters * N - first
    assert work.flops == exact
    assert work.flops_by_dtype()["float32"] > 0  # adapters are in fp32, and nothing casts


def test_the_loss_in_chunks_computes_the_same_products():
    """Its gradient is computed with it, in the forward pass; a row's last token predicts nothing."""
    head = 2 * VOCABULARY * WIDTH
    whole, chunked = work_of(**lora()), work_of(**lora(), trainer={"chunked_loss": True})
    assert whole.flops - chunked.flops == 2 * head * ROWS


def test_4_bit_weights_are_written_out_for_each_product():
    given = {**lora(), "precision": "bf16-mixed"}
    work = work_of(quantization={"bits": 4}, **given)
    passes = [place for place in work.places if place.operator == "dequantize_4bit"]
    per_pass = LAYERS * LAYER_MATRICES * 5 // 2  # half a byte read and two written an element
    forward = sum(work.places[place].num_bytes for place in passes if place.phase == "forward")
    backward = sum(work.places[place].num_bytes for place in passes if place.phase == "backward")
    assert forward == per_pass
    assert backward == per_pass - 3 * WIDTH * WIDTH * 5 // 2  # of the first layer's queries, keys and values
    assert work.flops == work_of(**given).flops


@pytest.mark.parametrize("given", [{}, {"trainer": {"enable_gradient_checkpointing": True}, **lora(r=4)}])
def test_pytorchs_counter_counts_the_same(tmp_path, given):
    """On real tensors. It has no rule for the CPU's attention."""
    folder = write_folder(tmp_path / "llama", "llama", num_hidden_layers=6)
    config = {"base_model": str(folder), "precision": "fp32", **given}
    config["trainer"] = {"type": "finetune", "batch_size": 2, "chunked_loss": False, **given.get("trainer", {})}
    traced = workload_of(config, "train", target=None).training()
    model = traced.build(traced.architecture).to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.zero_()
    with rows_not_packed(), FlopCounterMode(display=False) as counter:
        traced.training.micro_batch(model, traced.batch(2, 16))
    counts = counter.get_flop_counts()["Global"]
    work = record(traced, rows=2, tokens=16).work["first"]
    matrices = sum(each.flops for place, each in work.places.items() if place.unit == "matrix")
    assert matrices == sum(flops for operator, flops in counts.items() if "attention" not in str(operator))
    assert work.flops > matrices


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_few_layers_stand_for_all(tmp_path, family):
    folder = write_folder(tmp_path / family, family)
    config = {"base_model": str(folder), "precision": "bf16-mixed", "trainer": {"type": "finetune", "batch_size": 2}}
    traced = workload_of(config, "train").training()
    few = record(traced, rows=2, tokens=16)
    few_update = record_optimizer(traced, few).work["steady"]
    with all_layers():
        whole = record(traced, rows=2, tokens=16)
        whole_update = record_optimizer(traced, whole).work["steady"]
    ours, theirs = few.work["first"], whole.work["first"]
    assert (ours.flops, ours.num_bytes, ours.kernels) == (theirs.flops, theirs.num_bytes, theirs.kernels)
    assert few_update.num_bytes == pytest.approx(whole_update.num_bytes, rel=1e-3)  # norms of each weight, one number
    assert few_update.kernels == whole_update.kernels


def test_an_update_moves_weights_gradients_and_averages(tmp_path):
    """Adam over lists: at least seven times each weight's 4 bytes, and all of them some tens of kernels."""
    folder = write_folder(tmp_path / "llama", "llama")
    config = {"base_model": str(folder), "precision": "fp32", "trainer": {"type": "finetune", "batch_size": 2}}
    traced = workload_of(config, "train").training()
    recording = record(traced, rows=1, tokens=8)
    elements = sum(torch.Size(weight.shape).numel() for weight in recording.trained)
    update = record_optimizer(traced, recording).work["steady"]
    assert 7 * 4 * elements < update.num_bytes < 40 * 4 * elements
    assert update.flops == 0
    assert 10 < update.kernels < 100


def test_later_micro_batches_add_to_the_gradient(tmp_path):
    folder = write_folder(tmp_path / "llama", "llama")
    trainer = {"effective_batch_size": 4, "gradient_accumulation_steps": 2}
    first, following = (
        work_of(folder, part=part, tokens=16, trainer=trainer, precision="fp32") for part in ("first", "next")
    )
    assert following.flops == first.flops
    assert following.kernels > first.kernels
