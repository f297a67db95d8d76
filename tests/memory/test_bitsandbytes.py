"""Stand-ins for bitsandbytes' layers, models and optimizers against the real ones on this machine, and by hand."""

from __future__ import annotations

import warnings
from itertools import product
from pathlib import Path
from typing import Any, get_args

import peft
import pytest
import torch
from pydantic import TypeAdapter
from tests.memory.tiny_architectures import write_folder
from tests.memory.traced import Births
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
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

import brim
from brim.config.schema import OptimizerConfig, QuantizationConfig
from brim.config.schema.optimizer import BitsandbytesOptimizerConfig
from brim.memory.bitsandbytes import quantize_stand_in
from brim.memory.bitsandbytes.layout import KeptTensor, eight_bit_tensors, four_bit_tensors
from brim.memory.bitsandbytes.linear import FourBits, StandInLinear4bit, StandInLinear8bit
from brim.memory.cuda.autocast import autocast_as_on_cuda
from brim.memory.events import EventStream, Place
from brim.memory.loading import (
    LoadedTensor,
    in_checkpoint_order,
    load_events,
    loaded_tensors,
    of_all_layers,
    warmup_bytes,
    with_loading,
)
from brim.memory.trace import traceable_optimizer
from brim.memory.trace.optimizer import StandInOptimizer, state_rule, state_tensors
from brim.memory.trace.recorder import build_fake
from brim.models import require_bitsandbytes
from brim.train import build_optimizer

require_bitsandbytes()

from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt  # noqa: E402

# Layers


def real_4bit(shape: tuple[int, int], *, double_quant: bool, kind: str = "nf4", bias: bool = False) -> Linear4bit:
    layer = Linear4bit(
        *shape, bias=bias, compute_dtype=torch.bfloat16, compress_statistics=double_quant, quant_type=kind
    )
    layer.to(torch.bfloat16)
    layer.support_avx512bf16_for_cpu = False
    return layer.to("cpu").train()


def stand_in_4bit(shape: tuple[int, int] = (128, 64), *, bias: bool = False, **settings: Any) -> StandInLinear4bit:
    parameter = nn.Parameter(torch.zeros(shape[1], dtype=torch.bfloat16), requires_grad=False) if bias else None
    four_bits = FourBits(compute_dtype=torch.bfloat16, **settings)
    return StandInLinear4bit(*shape, bias=parameter, settings=four_bits).train()


def stand_in_8bit(shape: tuple[int, int] = (128, 64), *, threshold: float = 0.0, **keys: Any) -> StandInLinear8bit:
    return StandInLinear8bit(*shape, bias=None, threshold=threshold, **keys)


def kept_by(layer: nn.Module) -> dict[str, int]:
    tensors = {"weight": layer.weight, **layer._buffers}
    return {name: tensor.untyped_storage().nbytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_4bit_layer_keeps_the_real_ones_bytes(double_quant: bool, kind: str) -> None:
    for shape in [(64, 64), (128, 64), (100, 36), (7, 5), (65, 33), (688, 256), (96, 200)]:  # inputs, outputs
        real = real_4bit(shape, double_quant=double_quant, kind=kind)
        state = real.weight.quant_state
        tensors = {"weight": real.weight, "absmax": state.absmax, "code": state.code}
        if double_quant:
            tensors |= {"offset": state.offset, "nested_absmax": state.state2.absmax, "nested_code": state.state2.code}
        expected = {name: tensor.untyped_storage().nbytes() for name, tensor in tensors.items()}
        assert kept_by(stand_in_4bit(shape, double_quant=double_quant, quant_type=kind)) == expected, shape
        described = four_bit_tensors(shape[0] * shape[1], double_quant=double_quant)
        assert {tensor.name: tensor.num_bytes for tensor in described} == expected, shape


def test_an_8bit_layer_keeps_the_real_ones_bytes() -> None:
    for shape in [(64, 64), (100, 36), (688, 256)]:
        real = Linear8bitLt(*shape, bias=False, has_fp16_weights=False, threshold=6.0).to("cpu")
        real(torch.zeros(1, shape[0], dtype=torch.bfloat16))
        expected = {"weight": real.weight.untyped_storage().nbytes(), "SCB": real.state.SCB.untyped_storage().nbytes()}
        assert real.weight.data_ptr() == real.state.CB.data_ptr()
        assert kept_by(stand_in_8bit(shape, threshold=6.0)) == expected
        assert {tensor.name: tensor.num_bytes for tensor in eight_bit_tensors(shape[1], shape[0])} == expected
    # A packed weight of another storage type takes the same bytes.
    real = Linear4bit(128, 64, bias=False, compute_dtype=torch.bfloat16, quant_storage=torch.bfloat16).to("cpu")
    layer = stand_in_4bit(quant_storage=torch.bfloat16)
    assert (layer.weight.shape, layer.weight.dtype) == (real.weight.shape, real.weight.dtype)


def observed(layer: nn.Module, inputs: torch.Tensor) -> dict[str, Any]:
    """What can be seen of a forward and backward pass from outside."""
    saved: list[int] = []
    inputs.grad = None

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = layer(inputs)
    outputs.sum().backward()
    assert inputs.grad is not None
    return {
        "outputs": (outputs.shape, outputs.dtype),
        "gradient": (inputs.grad.shape, inputs.grad.dtype),
        "saved": saved,
    }


def test_a_layers_outputs_and_gradients_are_the_real_ones() -> None:
    for shape, dtype, bias in product([(64, 64), (128, 96)], [torch.bfloat16, torch.float32], [True, False]):
        inputs = torch.randn(2, 5, shape[0], dtype=dtype, requires_grad=True)
        real = observed(real_4bit(shape, double_quant=True, bias=bias).requires_grad_(False), inputs)
        assert observed(stand_in_4bit(shape, bias=bias), inputs) == real
        assert real["saved"] == []  # all is on the context
    for dtype in (torch.bfloat16, torch.float16):
        inputs = torch.randn(2, 5, 64, dtype=dtype, requires_grad=True)
        layer = Linear8bitLt(64, 96, bias=False, has_fp16_weights=False, threshold=6.0).to("cpu")
        real = observed(layer.train().requires_grad_(False), inputs)
        assert observed(stand_in_8bit((64, 96), threshold=6.0), inputs) == real
        assert real["saved"] == []


def log_of(layer_of: Any, rows: int, dtype: torch.dtype, *, grad: bool = True) -> tuple[list[int], list[int]]:
    """Births and deaths of storages in a forward pass, and in a backward pass."""
    with FakeTensorMode():
        layer = layer_of()
        inputs = torch.empty(rows, layer.in_features, dtype=dtype, requires_grad=grad)
        births = Births()
        births.know(inputs, layer.weight, *layer._buffers.values())
        with births, torch.set_grad_enabled(grad):
            outputs = layer(inputs)
            forward = len(births.log)
            if grad:
                gradient = torch.empty_like(outputs)
                births.log.pop()  # of this test's
                outputs.backward(gradient)
    return births.log[:forward], births.log[forward:]


BF16 = torch.bfloat16
SCALES, WEIGHT, OUTPUT, GRADIENT = 128 * 4, 64 * 128 * 2, 8 * 64 * 2, 8 * 128 * 2  # 128 inputs, 64 outputs, 8 rows


def test_a_4bit_layer_allocates_scales_twice_and_the_weight_and_keeps_the_output() -> None:
    forward, backward = log_of(stand_in_4bit, 8, BF16)
    assert forward[:4] == [SCALES, SCALES, WEIGHT, OUTPUT]
    assert sorted(forward[4:]) == [-WEIGHT, -SCALES, -SCALES]
    assert backward[:5] == [SCALES, WEIGHT, -SCALES, GRADIENT, -WEIGHT]
    # Without double quantization there are no scales to make.
    forward, backward = log_of(lambda: stand_in_4bit(double_quant=False), 8, BF16)
    assert (forward, backward[:3]) == ([WEIGHT, OUTPUT, -WEIGHT], [WEIGHT, GRADIENT, -WEIGHT])
    # Up to four rows need no buffer, but where 100 inputs are no whole number of blocks.
    assert log_of(stand_in_4bit, 4, BF16, grad=False)[0] == [OUTPUT // 2]
    assert log_of(lambda: stand_in_4bit((100, 64)), 1, BF16, grad=False)[0][2] == 64 * 100 * 2
    # Inputs are cast to the compute dtype, and outputs back.
    forward, _ = log_of(lambda: stand_in_4bit(double_quant=False), 8, torch.float32)
    cast = 8 * 128 * 2
    assert forward[:5] == [cast, WEIGHT, OUTPUT, -WEIGHT, 2 * OUTPUT]  # the last in fp32
    assert sorted(forward[5:]) == [-cast, -OUTPUT]


def test_older_releases_dequantise_in_place_and_take_a_single_row_apart() -> None:
    def forward(release: tuple[int, int], rows: int, *, grad: bool = False) -> list[int]:
        return log_of(lambda: stand_in_4bit(release=release), rows, BF16, grad=grad)[0]

    assert forward((0, 43), 8, grad=True) == [SCALES, WEIGHT, -SCALES, OUTPUT, -WEIGHT]
    assert WEIGHT in forward((0, 43), 4)
    assert forward((0, 43), 1)[:3] == [SCALES, 64 * 2, -SCALES]
    assert forward((0, 49), 1)[:5] == [SCALES, SCALES, -SCALES, 64 * 2, -SCALES]
    assert "nested_code" not in kept_by(stand_in_4bit(release=(0, 43)))


def test_an_8bit_layer_without_outliers() -> None:
    forward, backward = log_of(stand_in_8bit, 8, BF16)
    half, stats, codes, integers, factors = 8 * 128 * 2, 8 * 4, 8 * 128, 8 * 64 * 4, 64 * 4
    assert forward[:4] == [half, stats, codes, -half]
    assert forward[4:7] == [integers, OUTPUT, OUTPUT]  # int32, fp16, and the inputs' bf16
    assert sorted(forward[7:]) == sorted([-integers, -OUTPUT, -stats, -codes])
    assert backward[:5] == [WEIGHT, factors, -factors, GRADIENT, -WEIGHT]


def test_outliers_cost_a_mask_their_columns_and_a_second_output() -> None:
    forward, _ = log_of(lambda: stand_in_8bit((128, 48), threshold=6.0, outlier_columns=2), 8, torch.float16)
    stats, codes, absolute, mask = 8 * 4, 8 * 128, 8 * 128 * 2, 8 * 128
    assert forward[:5] == [stats, codes, absolute, mask, -absolute]
    columns, of_inputs = 2 * 8, 8 * 2 * 2  # int64, on the layer's state until the next pass; fp16
    codes_of_weight, exact = 48 * 2, 48 * 2 * 4
    at = forward.index(of_inputs, 5)
    assert forward[5:at] == [1, -1, 128, -128, columns, -mask]
    assert forward[at : at + 5] == [of_inputs, codes_of_weight, exact, exact, -exact]
    integers, output = 8 * 48 * 4, 8 * 48 * 2
    assert forward[at + 5 : at + 12] == [exact // 2, -exact, -codes_of_weight, integers, output, -integers, output]
    assert sum(forward) == output + of_inputs + columns


def test_an_8bit_layer_keeps_its_input_until_the_graph_is_dropped() -> None:
    with FakeTensorMode():
        layer = stand_in_8bit()
        source = torch.empty(8, 128, dtype=torch.bfloat16, requires_grad=True)
        births = Births()
        births.know(source, layer.weight, *layer._buffers.values())
        with births:
            loss = layer(source * 1).sum()
            assert 8 * 128 * 2 in births.log
            kept = births.live_bytes
            loss.backward()
            source.grad = None
            assert births.live_bytes >= 8 * 128 * 2
            del loss
            assert births.live_bytes == 0 < kept


# Models

FOUR = QuantizationConfig(bits=4, bnb_4bit_compute_dtype="bfloat16")
EIGHT = QuantizationConfig(bits=8)
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
LLAMA = LlamaConfig(intermediate_size=172, num_hidden_layers=2, **SIZES)
TIED = LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": True})
GPT2 = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100)
MIXTRAL = MixtralConfig(intermediate_size=96, num_hidden_layers=1, num_local_experts=4, **SIZES)
ARCHITECTURES = pytest.mark.parametrize("architecture", [LLAMA, TIED, GPT2, MIXTRAL])


def on_meta(architecture: PretrainedConfig, settings: QuantizationConfig | None = None, **keys: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture, dtype=torch.bfloat16)
    if settings is not None:
        quantize_stand_in(model, settings, **keys)
    return model


def bnb(settings: QuantizationConfig) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_4bit=settings.bits == 4, load_in_8bit=settings.bits == 8)


@ARCHITECTURES
@pytest.mark.parametrize("settings", [FOUR, EIGHT])
def test_stand_ins_go_where_transformers_puts_quantised_layers(
    architecture: PretrainedConfig, settings: QuantizationConfig
) -> None:
    real = on_meta(architecture)
    kept = HfQuantizer.get_modules_to_not_convert(real, None, list(real._keep_in_fp32_modules or ()))
    replace_with_bnb_linear(real, modules_to_not_convert=kept, quantization_config=bnb(settings))

    def layers(model: nn.Module, is_one: Any) -> dict[str, Any]:
        found = {name: module for name, module in model.named_modules() if is_one(type(module))}
        return {name: (each.in_features, each.out_features, each.bias is None) for name, each in found.items()}

    expected = layers(real, lambda kind: kind.__module__ == "bitsandbytes.nn.modules")
    mine = layers(on_meta(architecture, settings), lambda kind: kind.__name__.startswith("StandIn"))
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
        model(input_ids=ids, labels=ids).loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 7 * (3 if use_dora else 2)
    assert all(parameter.grad is not None for parameter in trained)


@pytest.mark.parametrize("autocast", [True, False])
def test_inputs_of_an_adapter_are_cast_but_under_autocast(autocast: bool) -> None:
    """In PEFT's layers over bitsandbytes' ones, which ask for CUDA's autocast."""

    def build(architecture: PretrainedConfig) -> nn.Module:
        lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["down_proj"])
        adapted: nn.Module = peft.get_peft_model(on_meta(architecture, FOUR), lora).train()
        return adapted

    mode = FakeTensorMode()
    model: Any = build_fake(LLAMA, build, mode)
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    with mode, autocast_as_on_cuda(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        inputs = torch.empty(40, 172, dtype=torch.bfloat16)
        with Births() as births:
            layer(inputs)
    assert (40 * 172 * 4 in births.log) == (not autocast)


def test_double_quantization_makes_one_table_for_the_model() -> None:
    assert on_meta(LLAMA, FOUR).get_buffer("bitsandbytes_dynamic_map").nbytes == 1024
    plain = QuantizationConfig(bits=4, bnb_4bit_compute_dtype="bfloat16", bnb_4bit_use_double_quant=False)
    for model in (on_meta(LLAMA, plain), on_meta(LLAMA, FOUR, is_stored=True)):
        assert "bitsandbytes_dynamic_map" not in dict(model.named_buffers())


def test_a_7b_model_in_4_bits_leaves_what_was_measured_on_an_a100() -> None:
    """FMS-A078 of benchmarks/data/memory: Mistral-7B, LoRA on q, k, v and o, bitsandbytes 0.43.3, end of step."""
    model = on_meta(MistralConfig(), FOUR, release=(0, 43))
    # The caching allocator rounds to 512 bytes.
    weights = sum(-(-tensor.nbytes // 512) * 512 for tensor in (*model.parameters(), *model.buffers()))
    elements = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    adapter = 3 * 4 * elements  # fp32, with Adam's two moments
    workspaces = 2 * (8 * 2**20 + 128 * 2**10)  # cuBLAS', of the forward and the backward thread
    batch = 3 * 4 * 4096 * 8  # token ids, labels, mask
    measured = 4_306_496_512
    assert 0 <= measured - (weights + adapter + workspaces + batch) < 32 * 1024  # the rest: scalars of the loop


# Loading


@ARCHITECTURES
@pytest.mark.parametrize("settings", [FOUR, EIGHT, None])
def test_the_block_before_loading_is_transformers_own_and_what_loading_leaves_the_models_tensors(
    architecture: PretrainedConfig, settings: QuantizationConfig | None
) -> None:
    real, quantizer = on_meta(architecture), None
    if settings is not None:
        quantizer = (Bnb4BitHfQuantizer if settings.bits == 4 else Bnb8BitHfQuantizer)(
            bnb(settings), pre_quantized=False
        )
        with local_torch_dtype(torch.bfloat16):  # as from_pretrained does
            quantizer._process_model_before_weight_loading(real, device_map={"": 0})
    devices = {name: torch.device("cuda:0") for name in real.state_dict()}
    (expected,) = get_total_byte_count(real, devices, quantizer).values()
    model = on_meta(architecture, settings)
    tensors = loaded_tensors(model, arriving_bytes=2 if settings else None)
    assert warmup_bytes(tensors, None) == int(expected // 2) * 2

    own = {name: tensor.nbytes for name, tensor in (*model.named_parameters(), *model.named_buffers())}
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
    kept = four_bit_tensors(elements, double_quant=False)
    plain = LoadedTensor(name="q.weight", num_elements=elements, element_bytes=4, transposed=True, kept=kept)
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


def test_weights_are_moved_one_by_one_and_experts_stacked_on_the_device() -> None:
    tensors = [LoadedTensor(name=name, num_elements=8, element_bytes=2) for name in ("b", "a")]
    assert loaded(tensors, "moved") == [16, 16]
    tensor = LoadedTensor(name="experts.gate_up_proj", num_elements=48, element_bytes=2, stacks=(2, 2))
    stacked = [*(24, 24, 24, 24), *(48, -24, -24, 48, -24, -24), *(96, -48, -48)]
    assert loaded([tensor], "placed", has_warmup=False) == stacked
    tensor = LoadedTensor(name="experts.down_proj", num_elements=24, element_bytes=2, stacks=(2, 1))
    assert loaded([tensor], "placed", has_warmup=False) == [24, 24, 48, -24, -24]


def test_the_block_leaves_room_on_a_small_device_and_weights_come_in_the_order_of_their_names_and_numbers() -> None:
    tensor = LoadedTensor(name="a", num_elements=2**31, element_bytes=2)
    assert warmup_bytes([tensor], None) == 2**32
    assert warmup_bytes([tensor], 4 * 1024**3) == 4 * 1024**3 - 1288490188
    assert loaded([tensor], "placed", device_bytes=1024**3) == [2**32]
    names = ["model.layers.10.a", "model.layers.9.b", "model.layers.9.a", "lm_head.weight", "model.embed.weight"]
    tensors = [LoadedTensor(name=name, num_elements=1, element_bytes=1) for name in names]
    assert [tensor.name for tensor in in_checkpoint_order(tensors)] == [names[number] for number in (3, 4, 2, 1, 0)]


# Loading put into a recorded stream


def llama(num_layers: int, settings: QuantizationConfig | None) -> Any:
    return on_meta(LlamaConfig(**{**LLAMA.to_dict(), "num_hidden_layers": num_layers}), settings)


def recorded(model: Any) -> EventStream:
    """A load in the model's order, then a forward pass that gives birth and death to one storage."""
    stream = EventStream()
    stream.mark("load")
    for name, module in model.named_modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                stream.birth(tensor.nbytes, "weights", Place(phase="load", module=name))
    stream.mark("step 1")
    stream.death(stream.birth(7, "activations", Place(phase="forward")), Place(phase="forward"))
    stream.mark("end")
    return stream


def named(stream: EventStream) -> list[tuple[str, int]]:
    """Module and bytes of each event; a death has negative bytes."""
    return [
        (place.module, stream.sizes[storage] if storage >= 0 else -stream.sizes[~storage])
        for storage, place in zip(stream.storages, stream.places, strict=True)
    ]


@pytest.mark.parametrize("settings", [FOUR, None])
def test_the_weights_come_in_loadings_order_and_the_rest_after_them(settings: QuantizationConfig | None) -> None:
    base = llama(2, settings)
    tensors = loaded_tensors(base, arriving_bytes=2 if settings else None)
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))
    before = recorded(adapted)
    after = with_loading(before, tensors, "quantized" if settings else "moved")
    positions = {label: position for position, label in after.marks}
    load = named(after)[positions["load"] : positions["step 1"]]
    expected = sorted(named(before)[: {label: at for at, label in before.marks}["step 1"]])
    alive = {storage for storage in after.storages[: positions["step 1"]] if storage >= 0}
    alive -= {~storage for storage in after.storages if storage < 0}
    assert alive == set(range(len(expected)))  # the storages of before, each once
    assert [module.rpartition(".")[0].endswith(("lora_A", "lora_B")) for module, _ in load[-4:]] == [True] * 4
    assert named(after)[positions["step 1"] :] == [("", 7), ("", -7)]
    assert positions["end"] == len(after.storages)
    if settings is None:
        assert sorted(load) == expected
        missing = LoadedTensor(name="a.weight", num_elements=3, element_bytes=2)
        with pytest.raises(LookupError, match=r"a\.weight, 6 bytes"):
            with_loading(before, [missing], "moved")
    # A few layers' tensors are expanded to all.
    few, all_layers = (loaded_tensors(llama(count, settings)) for count in (2, 5))
    path = "base_model.model.model.layers"
    assert of_all_layers(few, layers_path=path, num_layers=5, template=lambda layer: min(layer, 1)) == all_layers


@pytest.mark.parametrize("bits", [4, 8])
def test_a_bias_is_cast_once_and_not_in_every_step(tmp_path: Path, bits: int) -> None:
    """A card without bf16: bitsandbytes casts the biases of a Qwen2 in the first pass of all, for good."""
    config = {
        "base_model": str(write_folder(tmp_path, "qwen2", dtype="bfloat16")),
        "adapter": {"type": "lora", "r": 1, "dropout": 0.1},
        "quantization": {"bits": bits},
        "trainer": {"type": "finetune", "optimizer": {"type": "sgd"}, "dropout_by_row": True},
    }
    for device in ("t4", "a100-80gb"):
        first, second = brim.predict_memory(config, batch_size=2, sequence_length=8, device=device).step_peaks_bytes
        # Without an optimizer's state steps are alike, but for a block that each 8-bit layer keeps of its first pass.
        assert second - first == (9 * 7 * 512 if bits == 8 else 0), device


# Optimizers

TYPES = [
    section.model_fields["type"].default
    for section in get_args(OptimizerConfig)
    if issubclass(section, BitsandbytesOptimizerConfig)
]
SHAPES = [(4095,), (64, 64), (3, 7), (257, 401), (1000, 120)]  # below, at and above 4,096 elements; the last is paged


def settings_of(kind: str, **keys: Any) -> OptimizerConfig:
    settings: OptimizerConfig = TypeAdapter(OptimizerConfig).validate_python({"type": kind, **keys})
    return settings


def stepped(parameters: list[Parameter], kind: str) -> Any:
    """The real optimizer after a step on the CPU, where paged states are plain ones."""
    optimizer = build_optimizer(settings_of(kind), parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", TYPES)
def test_states_are_those_of_the_real_optimizer(kind: str) -> None:
    parameters = [Parameter(torch.zeros(shape)) for shape in SHAPES]
    real = stepped(parameters, kind)
    rule = state_rule(settings_of(kind))
    assert rule is not None
    stand_in = StandInOptimizer(parameters, rule)
    stand_in.step()
    tables: dict[int, int] = {}
    for parameter in parameters:
        state = real.state[parameter]
        tables |= {state[key].data_ptr(): state[key].nbytes for key in ("qmap1", "qmap2") if key in state}
        tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
        expected = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        mine = {name: (tensor.shape, tensor.dtype) for name, tensor in stand_in.state[parameter].items()}
        assert mine == expected
        in_order = [name for name in state if name in expected and not name.startswith("qmap")]
        assert list(mine)[: len(in_order)] == in_order
    assert [table.nbytes for table in stand_in.tables] == list(tables.values())
    paged = [each for parameter in parameters for each in state_tensors(rule, parameter.numel()) if each.paged]
    assert [state.nbytes for state in stand_in.paged] == [each.num_bytes for each in paged]
    assert bool(paged) == kind.startswith("paged_")


def test_sizes_from_which_states_are_paged_or_in_8_bits_and_torchs_own_optimizers() -> None:
    parameters = [Parameter(torch.zeros(2))]
    assert type(traceable_optimizer(settings_of("adamw"), parameters)) is torch.optim.AdamW
    assert type(traceable_optimizer(settings_of("lion"), parameters)) is StandInOptimizer
    paged = state_rule(settings_of("paged_adamw_8bit"))
    assert paged is not None
    assert [(tensor.name, tensor.num_bytes, tensor.paged) for tensor in state_tensors(paged, 100_000)] == [
        ("state1", 100_000, True),
        ("state2", 100_000, True),
        ("absmax1", 391 * 4, False),
        ("absmax2", 391 * 4, False),
    ]
    assert [tensor.paged for tensor in state_tensors(paged, 99_999)] == [False] * 4
    small = state_rule(settings_of("adam_8bit", min_8bit_size=16))
    assert small is not None
    assert [tensor.num_bytes for tensor in state_tensors(small, 16)] == [16, 16, 4, 4]
    assert [tensor.num_bytes for tensor in state_tensors(small, 15)] == [60, 60]


def test_the_first_step_allocates_in_the_real_order_and_the_second_nothing() -> None:
    rule = state_rule(settings_of("adamw_8bit"))
    assert rule is not None
    with FakeTensorMode():
        parameters = [Parameter(torch.empty(10)), Parameter(torch.empty(128, 64)), Parameter(torch.empty(4096))]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer = StandInOptimizer(parameters, rule)
        with Births() as births:
            optimizer.step()
            assert births.log == [40, 40, 1024, 1024, 8192, 8192, 128, 128, 4096, 4096, 64, 64]
            optimizer.step()
    assert len(births.log) == 12
