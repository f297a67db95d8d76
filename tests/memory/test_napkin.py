"""The napkin's sums, with figures that can be checked by hand."""

import json
from pathlib import Path

import pytest

from brim.config import load_config
from brim.memory.closed_form import napkin, optimizer_state, settings_of
from brim.memory.closed_form.architecture import Lora, Optimizer, all_tensors, lora_tensors
from brim.memory.closed_form.breakdown import stored_bytes

MODELS = Path(__file__).parents[2] / "benchmarks" / "data" / "memory" / "models"
LLAMA = json.loads((MODELS / "meta-llama--Llama-2-7b-hf" / "config.json").read_text(encoding="utf-8"))
MISTRAL = json.loads((MODELS / "mistralai--Mistral-7B-v0.1" / "config.json").read_text(encoding="utf-8"))
N = 6_738_415_616


def worked(base, phase="train", rows=1, tokens=2048, world_size=1, chunked_loss=False, **keys):
    config = load_config({"base_model": "base", "trainer": {"type": "finetune", "optimizer": "adamw"}, **keys}).config
    settings = settings_of(
        config,
        base,
        phase=phase,
        batch_size=rows,
        sequence_length=tokens,
        world_size=world_size,
        chunked_loss=chunked_loss,
    )
    return napkin(base, settings)


def lines(found):
    return {line.name: line for line in found.lines}


def test_112_gigabytes_of_the_workshop():
    found = worked(LLAMA, precision="fp32")
    by_name = lines(found)
    assert by_name["weights"].num_bytes == by_name["gradients"].num_bytes == 4 * N
    assert by_name["adamw"].num_bytes == 8 * N
    assert sum(by_name[name].num_bytes for name in ("weights", "gradients", "adamw")) == 16 * N
    assert by_name["weights"].formula.startswith("6,738,415,616 parameters × 4 B (embeddings 131,072,000 + attention")
    assert by_name["adamw"].formula == "6,738,415,616 trained × 2 averages × 4 B"
    assert found.peak == "update"
    assert found.total_bytes == 20 * N  # the roots of the second averages stand beside it all


def test_lora_on_mistral_in_16_bits_with_checkpointing():
    found = worked(
        MISTRAL,
        rows=4,
        tokens=4096,
        precision="bf16-true",
        adapter={"type": "lora", "r": 16, "dropout": 0, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        trainer={"type": "finetune", "optimizer": "adamw", "enable_gradient_checkpointing": True},
    )
    by_name = lines(found)
    added = 32 * 16 * (4 * 4096 + 2 * 4096 + 2 * 1024)  # q and o: 4096 + 4096 each; k and v: 4096 + 1024 each
    assert by_name["weights"].num_bytes == 7_241_732_096 * 2
    assert by_name["adapter"].num_bytes == by_name["gradients"].num_bytes == 4 * added
    assert (
        by_name["adapter"].formula == f"r 16 × (inputs + outputs) of q_proj, k_proj, v_proj, o_proj = {added:,} × 4 B"
    )
    assert by_name["between the layers"].num_bytes == 4 * 4096 * 32 * 4096 * 2
    assert by_name["logits and loss"].num_bytes == 4 * 4096 * 32_000 * 12
    assert found.peak == "loss"
    # The same run on an A100 with transformers' Trainer (gpu_memory_a100.csv), which holds the 16-bit logits, too.
    assert found.total_bytes + 4 * 4096 * 32_000 * 2 == pytest.approx(26_704_571_904, rel=0.02)


def test_quantised_weights_by_hand():
    layers = 32 * (4 * 4096**2 + 3 * 4096 * 11_008)
    rest = 2 * (N - layers)
    four = lines(worked(LLAMA, precision="bf16-true", adapter="lora", quantization={"bits": 4}))
    assert four["weights in 4 bits"].num_bytes == layers // 2 + layers // 64 + layers // 64 // 256 * 4
    assert four["weights in 4 bits"].num_bytes * 8 / layers == pytest.approx(4.127, abs=1e-3)
    assert four["weights"].num_bytes == rest
    single = {"bits": 4, "bnb_4bit_use_double_quant": False}
    plain = lines(worked(LLAMA, precision="bf16-true", adapter="lora", quantization=single))
    assert plain["weights in 4 bits"].num_bytes * 8 == 4.5 * layers
    eight = lines(worked(LLAMA, precision="bf16-true", adapter="lora", quantization={"bits": 8}))
    assert eight["weights in 8 bits"].num_bytes == layers + 4 * 32 * (5 * 4096 + 2 * 11_008)


def test_mixed_precision_casts_the_weights_that_train():
    found = lines(worked(LLAMA, precision="bf16-mixed"))
    assert found["casts"].num_bytes == 2 * (N - 131_072_000 - 65 * 4096)


@pytest.mark.parametrize(
    ("stored", "num_bytes"), [("float16", 2 * N), ("float32", 2 * N + 2 * (131_072_000 + 65 * 4096))]
)
def test_frozen_weights_of_linear_layers_lie_in_the_dtype_of_arithmetic(stored, num_bytes):
    found = lines(worked({**LLAMA, "torch_dtype": stored}, precision="bf16-mixed", adapter="lora"))
    assert "casts" not in found
    assert found["weights"].num_bytes == num_bytes
    assert ("of which 6,607,077,376 frozen in linear layers × 2 B" in found["weights"].formula) == (stored == "float32")


@pytest.mark.parametrize(("precision", "each"), [("fp16-mixed", 2), ("bf16-mixed", 4)])
def test_two_dtypes_of_16_bits_make_32_between_the_layers(precision, each):
    trainer = {"type": "finetune", "enable_gradient_checkpointing": True}
    found = lines(worked(LLAMA, precision=precision, adapter="lora", trainer=trainer))  # stored in fp16
    assert found["between the layers"].num_bytes == 2048 * 32 * 4096 * each


@pytest.mark.parametrize("head_trains", [True, False])
def test_a_chunk_of_logits_instead_of_all(head_trains):
    from brim.models import chunk_rows

    keys = {} if head_trains else {"adapter": "lora"}
    found = lines(worked(LLAMA, rows=8, precision="bf16-true", chunked_loss=True, **keys))
    rows = chunk_rows(32_000, head_trains=head_trains)
    of_the_head = 32_000 * 4096 * 4 if head_trains else 0
    assert found["logits and loss"].num_bytes == rows * 32_000 * 6 + 2 * 8 * 2048 * 4096 * 2 + of_the_head


def test_the_cache_grows_to_prompt_and_answer():
    found = worked(
        MISTRAL, phase="generate", rows=4, tokens=1000, precision="bf16-true", generation={"max_new_tokens": 24}
    )
    by_name = lines(found)
    assert by_name["KV cache, prefill"].num_bytes == 4 * 1000 * 2 * 32 * 1024 * 2
    assert by_name["KV cache, decode"].num_bytes == 4 * 1024 * 2 * 32 * 1024 * 2
    assert set(found.moments) == {"prefill", "decode"}


def test_beams_are_rows():
    keys = {"precision": "bf16-true", "generation": {"max_new_tokens": 1, "num_beams": 3}}
    found = lines(worked(MISTRAL, phase="generate", rows=2, tokens=10, **keys))
    assert found["KV cache, prefill"].formula.startswith("6 rows × 10 tokens")


def test_loading_is_weights_alone_and_evaluating_keeps_no_layers():
    assert worked(LLAMA, phase="load", precision="bf16-true").total_bytes == 2 * N
    found = lines(worked(LLAMA, phase="evaluate", rows=2, tokens=100, precision="bf16-true"))
    assert found["logits and loss"].num_bytes == 200 * 32_000 * 10
    assert "activations" not in found


def test_shards_of_four_processes():
    found = lines(worked(LLAMA, precision="fp32", world_size=4))
    assert [found[name].num_bytes for name in ("weights", "gradients", "adamw")] == [N, N, 2 * N]
    assert found["adamw"].formula.endswith("/ 4 processes")


def test_each_moment_is_the_sum_of_its_lines():
    found = worked(LLAMA, precision="bf16-mixed", trainer={"type": "finetune", "enable_gradient_checkpointing": True})
    for moment, total in found.moments.items():
        assert total == sum(line.num_bytes for line in found.lines if moment in line.moments)
    assert found.total_bytes == max(found.moments.values()) == found.as_dict()["total_bytes"]


def test_a_newcomer_is_named():
    assert worked({**LLAMA, "model_type": "newcomer"}).notes == (
        "newcomer is not known to the napkin: taken for a Llama",
    )


@pytest.mark.parametrize(
    ("kind", "element_bytes", "state_bytes"),
    [
        ("adam", 4, 8 * 400),
        ("adamw", 2, 4 * 400),
        ("sgd", 4, 0),
        ("adafactor", 4, 4 * (2 * (4 + 40) + (40 + 2))),
        ("lion", 4, 4 * 400),
        ("adamw_8bit", 4, 8 * 400),  # each tensor is below 4,096 elements
        ("paged_adamw", 4, 0),
    ],
)
def test_what_an_optimizer_keeps(kind, element_bytes, state_bytes):
    from brim.memory.closed_form import Trained

    tensors = [Trained(rows=4, columns=40, count=2), Trained(rows=40, columns=2, count=1)]
    assert sum(tensor.elements for tensor in tensors) == 400
    state = optimizer_state(Optimizer(type=kind), tensors, element_bytes=element_bytes)
    assert state.num_bytes == state_bytes


def test_8_bit_states_have_a_scale_for_256_values():
    from brim.memory.closed_form import Trained

    state = optimizer_state(Optimizer(type="adamw_8bit"), [Trained(rows=64, columns=100, count=3)], element_bytes=4)
    assert state.num_bytes == 2 * 3 * (6_400 + 25 * 4)


def test_states_are_those_of_the_real_optimizers():
    import torch

    from brim.memory.closed_form import Trained

    weights = [torch.nn.Parameter(torch.ones(30, 20)), torch.nn.Parameter(torch.ones(7))]
    shapes = [Trained(rows=30, columns=20, count=1), Trained(rows=7, columns=1, count=1)]
    for name, kind in [("adamw", torch.optim.AdamW), ("adafactor", torch.optim.Adafactor)]:
        optimizer = kind(weights)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        tensors = [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.ndim]
        kept = sum(tensor.nbytes for tensor in tensors)
        assert optimizer_state(Optimizer(type=name), shapes, element_bytes=4).num_bytes == kept


def test_adapters_on_named_on_all_and_on_matched_layers():
    from brim.memory.closed_form import read_architecture

    def added(targets, base=LLAMA):
        lora = Lora(r=2, target_modules=targets, dropout=False)
        return sum(tensor.elements for tensor in lora_tensors(read_architecture(base), lora))

    assert added(None) == added(("q_proj", "v_proj")) == 32 * 2 * 2 * 8192
    assert added("all-linear") == 32 * 2 * (4 * 8192 + 3 * (4096 + 11_008))
    assert added(r"model\.layers\.[0-3]\.mlp\.down_proj") == 4 * 2 * (4096 + 11_008)
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100, "n_positions": 32}
    assert added(("mlp.c_proj",), gpt2) == 3 * 2 * (256 + 64)
    assert added(("c_proj",), gpt2) == 3 * 2 * (256 + 64 + 64 + 64)


def test_all_weights_are_all_parameters():
    from brim.memory.closed_form import read_architecture

    assert sum(tensor.elements for tensor in all_tensors(read_architecture(LLAMA))) == N


@pytest.mark.parametrize(
    ("config", "num_bytes"),
    [
        ({"torch_dtype": "float16"}, 2),
        ({"dtype": "torch.bfloat16"}, 2),
        ({"text_config": {"dtype": "float32"}}, 4),
        ({}, 4),
    ],
)
def test_how_weights_are_stored(config, num_bytes):
    assert stored_bytes(config) == num_bytes
