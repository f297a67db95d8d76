"""Stand-ins in whole models: where they go, how PEFT wraps them, and what loading allocates."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from tests.memory.births import Births
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.modeling_utils import get_total_byte_count, local_torch_dtype
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer

from brim.config.schema import QuantizationConfig
from brim.memory.bitsandbytes import LoadedTensor, loaded_tensors, quantize_stand_in, warmup_bytes
from brim.memory.bitsandbytes.layout import KeptTensor, four_bit_tensors
from brim.memory.bitsandbytes.loading import in_checkpoint_order, load_events
from brim.memory.cuda.autocast import autocast_as_on_cuda
from brim.memory.trace import EventStream
from brim.memory.trace.recorder import build_fake

FOUR = QuantizationConfig(bits=4, bnb_4bit_compute_dtype="bfloat16")
EIGHT = QuantizationConfig(bits=8)
LLAMA = LlamaConfig(
    hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=100,
)  # fmt: skip
TIED = LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": True})
GPT2 = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100)
MIXTRAL = MixtralConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    num_local_experts=4, vocab_size=100,
)  # fmt: skip


def on_meta(architecture: PretrainedConfig, settings: QuantizationConfig | None = None, **keys: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture, dtype=torch.bfloat16)
    if settings is not None:
        quantize_stand_in(model, settings, **keys)
    return model


@pytest.mark.parametrize("architecture", [LLAMA, TIED, GPT2, MIXTRAL])
@pytest.mark.parametrize("settings", [FOUR, EIGHT])
def test_stand_ins_go_where_transformers_puts_quantised_layers(
    architecture: PretrainedConfig, settings: QuantizationConfig
) -> None:
    real = on_meta(architecture)
    config = BitsAndBytesConfig(load_in_4bit=settings.bits == 4, load_in_8bit=settings.bits == 8)
    kept = HfQuantizer.get_modules_to_not_convert(real, None, list(real._keep_in_fp32_modules or ()))
    replace_with_bnb_linear(real, modules_to_not_convert=kept, quantization_config=config)
    expected = {
        name: (module.in_features, module.out_features, module.bias is None)
        for name, module in real.named_modules()
        if type(module).__module__ == "bitsandbytes.nn.modules"
    }
    stand_in = on_meta(architecture, settings)
    mine = {
        name: (module.in_features, module.out_features, module.bias is None)
        for name, module in stand_in.named_modules()
        if type(module).__name__.startswith("StandIn")
    }
    assert mine == expected
    assert len(mine) >= 4


@pytest.mark.parametrize("use_dora", [True, False])
@pytest.mark.parametrize(("settings", "wrapper"), [(FOUR, "Linear4bit"), (EIGHT, "Linear8bitLt")])
def test_peft_wraps_stand_ins_as_the_real_layers(settings: QuantizationConfig, wrapper: str, use_dora: bool) -> None:
    def build(architecture: PretrainedConfig) -> nn.Module:
        model = on_meta(architecture, settings)
        model.requires_grad_(False)
        lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", use_dora=use_dora)
        adapted: nn.Module = peft.get_peft_model(model, lora).train()
        return adapted

    mode = FakeTensorMode()
    model: Any = build_fake(LLAMA, build, mode)
    kinds = {type(module) for name, module in model.named_modules() if name.endswith("_proj")}
    assert kinds == {getattr(peft.tuners.lora.bnb, wrapper)}
    with mode:
        ids = torch.zeros(2, 8, dtype=torch.int64)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 7 * (3 if use_dora else 2)
    assert all(parameter.grad is not None for parameter in trained)


@pytest.mark.parametrize("autocast", [True, False])
def test_inputs_of_an_adapter_are_cast_but_under_autocast(autocast: bool) -> None:
    """In PEFT's layers over bitsandbytes' ones, which ask for CUDA's autocast."""

    def build(architecture: PretrainedConfig) -> nn.Module:
        model = on_meta(architecture, FOUR)
        lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["down_proj"])
        adapted: nn.Module = peft.get_peft_model(model, lora).train()
        return adapted

    mode = FakeTensorMode()
    model: Any = build_fake(LLAMA, build, mode)
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    with mode, autocast_as_on_cuda(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        inputs = torch.empty(40, 172, dtype=torch.bfloat16)
        with Births() as births:
            layer(inputs)
    assert (40 * 172 * 4 in births.log) == (not autocast)


@pytest.mark.parametrize("settings", [FOUR, EIGHT])
def test_preparing_for_k_bit_training_casts_what_is_not_quantised(settings: QuantizationConfig) -> None:
    def build(architecture: PretrainedConfig) -> nn.Module:
        prepared: nn.Module = peft.prepare_model_for_kbit_training(
            on_meta(architecture, settings), use_gradient_checkpointing=False
        )
        return prepared

    mode = FakeTensorMode()
    model: Any = build_fake(LLAMA, build, mode)
    packed = torch.uint8 if settings.bits == 4 else torch.int8
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == packed} == {name for name in dtypes if "_proj." in name}
    assert set(dtypes.values()) == {packed, torch.float32}
    with mode, torch.no_grad():
        assert model(input_ids=torch.zeros(1, 8, dtype=torch.int64)).logits.dtype == torch.float32


def test_double_quantization_makes_one_table_for_the_model() -> None:
    assert on_meta(LLAMA, FOUR).get_buffer("bitsandbytes_dynamic_map").nbytes == 1024
    plain = QuantizationConfig(bits=4, bnb_4bit_compute_dtype="bfloat16", bnb_4bit_use_double_quant=False)
    for model in (on_meta(LLAMA, plain), on_meta(LLAMA, FOUR, is_stored=True)):
        assert "bitsandbytes_dynamic_map" not in dict(model.named_buffers())


@pytest.mark.parametrize("architecture", [LLAMA, TIED, GPT2, MIXTRAL])
@pytest.mark.parametrize("settings", [FOUR, EIGHT, None])
def test_the_block_before_loading_is_transformers_own(
    architecture: PretrainedConfig, settings: QuantizationConfig | None
) -> None:
    real, quantizer = on_meta(architecture), None
    if settings is not None:
        config = BitsAndBytesConfig(load_in_4bit=settings.bits == 4, load_in_8bit=settings.bits == 8)
        quantizer = (Bnb4BitHfQuantizer if settings.bits == 4 else Bnb8BitHfQuantizer)(config, pre_quantized=False)
        with local_torch_dtype(torch.bfloat16):  # as from_pretrained does
            quantizer._process_model_before_weight_loading(real, device_map={"": 0})
    devices = {name: torch.device("cuda:0") for name in real.state_dict()}
    (expected,) = get_total_byte_count(real, devices, quantizer).values()
    tensors = loaded_tensors(on_meta(architecture, settings), arriving_bytes=2 if settings else None)
    assert warmup_bytes(tensors, None) == int(expected // 2) * 2


@pytest.mark.parametrize("architecture", [LLAMA, TIED, GPT2, MIXTRAL])
@pytest.mark.parametrize("settings", [FOUR, EIGHT, None])
def test_all_that_loading_leaves_are_the_models_tensors(
    architecture: PretrainedConfig, settings: QuantizationConfig | None
) -> None:
    model = on_meta(architecture, settings)
    own = {name: tensor.nbytes for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    tensors = loaded_tensors(model, arriving_bytes=2 if settings else None)
    for kind in ("quantized",) if settings else ("moved", "placed"):
        stream = EventStream()
        resident = load_events(stream, tensors, kind)
        assert {name: stream.sizes[storage] for name, storage in resident.items()} == own
        dead = {~event for event in stream.storages if event < 0}
        assert dead == set(range(len(stream.sizes))) - set(resident.values())
        assert {stream.categories[storage] for storage in resident.values()} == {"weights"}


def loaded(tensors: list[LoadedTensor], kind: Any, **keys: Any) -> list[int]:
    """Bytes at births, their negatives at deaths."""
    stream = EventStream()
    load_events(stream, tensors, kind, **keys)
    return [stream.sizes[event] if event >= 0 else -stream.sizes[~event] for event in stream.storages]


def test_weights_on_the_cpu_are_moved_one_by_one() -> None:
    tensors = [LoadedTensor(name=name, num_elements=8, element_bytes=2) for name in ("b", "a")]
    assert loaded(tensors, "moved") == [16, 16]


def test_a_weight_arrives_is_quantised_to_4_bits_and_goes() -> None:
    elements = 128 * 64
    kept = four_bit_tensors(elements, double_quant=True, release=(0, 50))
    tensor = LoadedTensor(name="layers.0.q.weight", num_elements=elements, element_bytes=2, kept=kept)
    scales = elements // 64 * 4
    assert loaded([tensor], "quantized", has_warmup=False) == [
        *(2 * elements, scales, elements // 2),
        *(64, 64, 4, -64, -4),  # the table of 16 values and what it is divided by
        *(4, scales, 1024, 4, scales // 4, 1024),  # offset; shifted scales; both tables; scales of scales; scales
        *(-scales, -scales, -2 * elements),
    ]
    plain = LoadedTensor(
        name="layers.0.q.weight", num_elements=elements, element_bytes=4, transposed=True,
        kept=four_bit_tensors(elements, double_quant=False),
    )  # fmt: skip
    assert loaded([plain], "quantized", has_warmup=False) == [
        *(4 * elements, 4 * elements, scales, elements // 2, 64, 64, 4, -64, -4),
        *(-4 * elements, -4 * elements),
    ]


def test_a_weight_comes_back_from_the_cpu_to_be_quantised_to_8_bits() -> None:
    kept = (
        KeptTensor(name="SCB", num_elements=64, element_bytes=4),
        KeptTensor(name="weight", num_elements=8192, element_bytes=1),
    )
    tensor = LoadedTensor(name="q.weight", num_elements=8192, element_bytes=2, kept=kept)
    assert loaded([tensor], "quantized") == [8192, -8192, 16384, 16384, 256, 8192, -16384, -16384]
    assert loaded([tensor], "placed", has_warmup=False) == [256, 8192]


def test_experts_are_stacked_on_the_device() -> None:
    tensor = LoadedTensor(name="experts.gate_up_proj", num_elements=48, element_bytes=2, stacks=(2, 2))
    assert loaded([tensor], "placed", has_warmup=False) == [
        *(24, 24, 24, 24),
        *(48, -24, -24, 48, -24, -24),
        *(96, -48, -48),
    ]
    tensor = LoadedTensor(name="experts.down_proj", num_elements=24, element_bytes=2, stacks=(2, 1))
    assert loaded([tensor], "placed", has_warmup=False) == [24, 24, 48, -24, -24]


def test_the_block_leaves_room_on_a_small_device() -> None:
    tensor = LoadedTensor(name="a", num_elements=2**31, element_bytes=2)
    assert warmup_bytes([tensor], None) == 2**32
    assert warmup_bytes([tensor], 4 * 1024**3) == 4 * 1024**3 - 1288490188
    assert loaded([tensor], "placed", device_bytes=1024**3) == [2**32]


def test_weights_come_in_the_order_of_their_names_and_numbers() -> None:
    names = ["model.layers.10.a", "model.layers.9.b", "model.layers.9.a", "lm_head.weight", "model.embed.weight"]
    tensors = [LoadedTensor(name=name, num_elements=1, element_bytes=1) for name in names]
    assert [tensor.name for tensor in in_checkpoint_order(tensors)] == [
        *("lm_head.weight", "model.embed.weight"),
        *("model.layers.9.a", "model.layers.9.b", "model.layers.10.a"),
    ]


def test_a_7b_model_in_4_bits_leaves_what_was_measured_on_an_a100() -> None:
    """FMS-A078 of benchmarks/data/memory: Mistral-7B, LoRA on q, k, v and o, bitsandbytes 0.43.3, end of step."""
    model = on_meta(MistralConfig(), FOUR, release=(0, 43))
    weights = sum(rounded(tensor.nbytes) for tensor in (*model.parameters(), *model.buffers()))
    elements = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    adapter = 3 * 4 * elements  # fp32, with Adam's two moments
    workspaces = 2 * (8 * 2**20 + 128 * 2**10)  # cuBLAS', of the forward and the backward thread
    batch = 3 * 4 * 4096 * 8  # token ids, labels, mask
    measured = 4_306_496_512
    assert 0 <= measured - (weights + adapter + workspaces + batch) < 32 * 1024  # the rest: scalars of the loop


def rounded(num_bytes: int) -> int:
    """As the caching allocator rounds."""
    return -(-num_bytes // 512) * 512
