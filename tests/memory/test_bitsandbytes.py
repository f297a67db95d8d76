"""Stand-ins for bitsandbytes' layers, models and optimizers against the real ones on this machine, and by hand."""

from itertools import product
from typing import get_args

import peft
import pytest
import torch
from pydantic import TypeAdapter
from tests.memory.tiny_architectures import write_folder
from tests.memory.traced import Births, alive, log
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPT2Config, LlamaConfig, MistralConfig, MixtralConfig
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.modeling_utils import get_total_byte_count, local_torch_dtype
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer

import brim
from brim.config.schema import OptimizerConfig, QuantizationConfig
from brim.config.schema.optimizer import BitsandbytesOptimizerConfig
from brim.memory.bitsandbytes import quantize_stand_in
from brim.memory.bitsandbytes.layout import eight_bit_tensors, four_bit_tensors
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
from brim.memory.trace.optimizer import StandInOptimizer, state_rule, state_tensors
from brim.memory.trace.recorder import build_fake
from brim.models import require_bitsandbytes
from brim.train import build_optimizer

require_bitsandbytes()

from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt  # noqa: E402


def real_4bit(shape, *, double_quant=True, kind="nf4", bias=False):
    settings = {"compute_dtype": torch.bfloat16, "compress_statistics": double_quant, "quant_type": kind}
    layer = Linear4bit(*shape, bias=bias, **settings).to(torch.bfloat16)
    layer.support_avx512bf16_for_cpu = False
    return layer.to("cpu").train()


def stand_in_4bit(shape=(128, 64), *, bias=False, **settings):
    parameter = nn.Parameter(torch.zeros(shape[1], dtype=torch.bfloat16), requires_grad=False) if bias else None
    four_bits = FourBits(compute_dtype=torch.bfloat16, **settings)
    return StandInLinear4bit(*shape, bias=parameter, settings=four_bits).train()


def stand_in_8bit(shape=(128, 64), *, threshold=0.0, **keys):
    return StandInLinear8bit(*shape, bias=None, threshold=threshold, **keys)


def kept_by(layer):
    tensors = {"weight": layer.weight, **layer._buffers}
    return {name: tensor.untyped_storage().nbytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_4bit_layer_keeps_the_real_ones_bytes(double_quant, kind):
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


def test_an_8bit_layer_keeps_the_real_ones_bytes():
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


def observed(layer, dtype):
    """Shapes and dtypes of outputs and gradients."""
    inputs, saved = torch.randn(2, 5, layer.in_features, dtype=dtype, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda nothing: nothing):
        outputs = layer(inputs)
    outputs.sum().backward()
    assert saved == []  # all is on the context, in bitsandbytes, too
    return [(each.shape, each.dtype) for each in (outputs, inputs.grad)]


def test_a_layers_outputs_and_gradients_are_the_real_ones():
    for shape, dtype, bias in product([(64, 64), (128, 96)], [torch.bfloat16, torch.float32], [True, False]):
        real = real_4bit(shape, bias=bias).requires_grad_(False)
        assert observed(stand_in_4bit(shape, bias=bias), dtype) == observed(real, dtype)
    for dtype in (torch.bfloat16, torch.float16):
        real = Linear8bitLt(64, 96, bias=False, has_fp16_weights=False, threshold=6.0).to("cpu").requires_grad_(False)
        assert observed(stand_in_8bit((64, 96), threshold=6.0), dtype) == observed(real, dtype)


def log_of(layer_of, rows, dtype, *, grad=True):
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


def test_a_4bit_layer_allocates_scales_twice_and_the_weight_and_keeps_the_output():
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


def test_older_releases_dequantise_in_place_and_take_a_single_row_apart():
    def forward(release, rows, *, grad=False):
        return log_of(lambda: stand_in_4bit(release=release), rows, BF16, grad=grad)[0]

    assert forward((0, 43), 8, grad=True) == [SCALES, WEIGHT, -SCALES, OUTPUT, -WEIGHT]
    assert WEIGHT in forward((0, 43), 4)
    assert forward((0, 43), 1)[:3] == [SCALES, 64 * 2, -SCALES]
    assert forward((0, 49), 1)[:5] == [SCALES, SCALES, -SCALES, 64 * 2, -SCALES]
    assert "nested_code" not in kept_by(stand_in_4bit(release=(0, 43)))


def test_an_8bit_layer_without_outliers():
    forward, backward = log_of(stand_in_8bit, 8, BF16)
    half, stats, codes, integers, factors = 8 * 128 * 2, 8 * 4, 8 * 128, 8 * 64 * 4, 64 * 4
    assert forward[:4] == [half, stats, codes, -half]
    assert forward[4:7] == [integers, OUTPUT, OUTPUT]  # int32, fp16, and the inputs' bf16
    assert sorted(forward[7:]) == sorted([-integers, -OUTPUT, -stats, -codes])
    assert backward[:5] == [WEIGHT, factors, -factors, GRADIENT, -WEIGHT]


def test_outliers_cost_a_mask_their_columns_and_a_second_output():
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


def test_an_8bit_layer_keeps_its_input_until_the_graph_is_dropped():
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


FOUR = QuantizationConfig(bits=4, bnb_4bit_compute_dtype="bfloat16")
EIGHT = QuantizationConfig(bits=8)
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
LLAMA = LlamaConfig(intermediate_size=172, num_hidden_layers=2, **SIZES)
TIED = LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": True})
GPT2 = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100)
MIXTRAL = MixtralConfig(intermediate_size=96, num_hidden_layers=1, num_local_experts=4, **SIZES)
ARCHITECTURES = pytest.mark.parametrize("architecture", [LLAMA, TIED, GPT2, MIXTRAL])


def on_meta(architecture, settings=None, **keys):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture, dtype=torch.bfloat16)
    if settings is not None:
        quantize_stand_in(model, settings, **keys)
    return model


def bnb(settings):
    return BitsAndBytesConfig(load_in_4bit=settings.bits == 4, load_in_8bit=settings.bits == 8)


@ARCHITECTURES
@pytest.mark.parametrize("settings", [FOUR, EIGHT])
def test_stand_ins_go_where_transformers_puts_quantised_layers(architecture, settings):
    real = on_meta(architecture)
    kept = HfQuantizer.get_modules_to_not_convert(real, None, list(real._keep_in_fp32_modules or ()))
    replace_with_bnb_linear(real, modules_to_not_convert=kept, quantization_config=bnb(settings))

    def layers(model, is_one):
        found = {name: module for name, module in model.named_modules() if is_one(type(module))}
        return {name: (each.in_features, each.out_features, each.bias is None) for name, each in found.items()}

    expected = layers(real, lambda kind: kind.__module__ == "bitsandbytes.nn.modules")
    mine = layers(on_meta(architecture, settings), lambda kind: kind.__name__.startswith("StandIn"))
    assert mine == expected
    assert len(mine) >= 4


def adapted(settings, mode, **keys):
    """A fake Llama with an adapter over stand-ins."""

    def build(architecture):
        model = on_meta(architecture, settings).requires_grad_(False)
        return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, **keys)).train()

    return build_fake(LLAMA, build, mode)


@pytest.mark.parametrize("use_dora", [True, False])
@pytest.mark.parametrize(("settings", "wrapper"), [(FOUR, "Linear4bit"), (EIGHT, "Linear8bitLt")])
def test_peft_wraps_stand_ins_as_the_real_layers(settings, wrapper, use_dora):
    mode = FakeTensorMode()
    model = adapted(settings, mode, target_modules="all-linear", use_dora=use_dora)
    kinds = {type(module) for name, module in model.named_modules() if name.endswith("_proj")}
    assert kinds == {getattr(peft.tuners.lora.bnb, wrapper)}
    with mode:
        ids = torch.zeros(2, 8, dtype=torch.int64)
        model(input_ids=ids, labels=ids).loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 7 * (3 if use_dora else 2)
    assert all(parameter.grad is not None for parameter in trained)


@pytest.mark.parametrize("autocast", [True, False])
def test_inputs_of_an_adapter_are_cast_but_under_autocast(autocast):
    """In PEFT's layers over bitsandbytes' ones, which ask for CUDA's autocast."""
    mode = FakeTensorMode()
    model = adapted(FOUR, mode, target_modules=["down_proj"])
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    with mode, autocast_as_on_cuda(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        inputs = torch.empty(40, 172, dtype=torch.bfloat16)
        with Births() as births:
            layer(inputs)
    assert (40 * 172 * 4 in births.log) == (not autocast)


def test_double_quantization_makes_one_table_for_the_model():
    assert on_meta(LLAMA, FOUR).get_buffer("bitsandbytes_dynamic_map").nbytes == 1024
    plain = QuantizationConfig(bits=4, bnb_4bit_compute_dtype="bfloat16", bnb_4bit_use_double_quant=False)
    for model in (on_meta(LLAMA, plain), on_meta(LLAMA, FOUR, is_stored=True)):
        assert "bitsandbytes_dynamic_map" not in dict(model.named_buffers())


def test_a_7b_model_in_4_bits_leaves_what_was_measured_on_an_a100():
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


@ARCHITECTURES
@pytest.mark.parametrize("settings", [FOUR, EIGHT, None])
def test_the_block_before_loading_is_transformers_own_and_loading_leaves_the_models_tensors(architecture, settings):
    real, quantizer = on_meta(architecture), None
    if settings is not None:
        kind = Bnb4BitHfQuantizer if settings.bits == 4 else Bnb8BitHfQuantizer
        quantizer = kind(bnb(settings), pre_quantized=False)
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


def loaded(tensors, kind, **keys):
    stream = EventStream()
    load_events(stream, tensors, kind, **keys)
    return log(stream)


def weight(num_elements, element_bytes=2, **keys):
    return LoadedTensor(name="layers.0.q.weight", num_elements=num_elements, element_bytes=element_bytes, **keys)


E, S = 128 * 64, 128 * 4  # elements of a weight; bytes of its scales
LOADS = {
    "a weight arrives, is quantised to 4 bits and goes": (
        weight(E, kept=four_bit_tensors(E, double_quant=True)), "quantized",
        [2 * E, S, E // 2, 64, 64, 4, -64, -4,  # the table of 16 values and what it is divided by
         4, S, 1024, 4, S // 4, 1024,  # offset; shifted scales; both tables; scales of scales; scales
         -S, -S, -2 * E],
    ),
    "turned, without double quantization": (
        weight(E, 4, transposed=True, kept=four_bit_tensors(E, double_quant=False)), "quantized",
        [4 * E, 4 * E, S, E // 2, 64, 64, 4, -64, -4, -4 * E, -4 * E],
    ),
    "it comes back from the CPU to be quantised to 8 bits": (
        weight(E, kept=eight_bit_tensors(64, 128)), "quantized", [2 * E, 2 * E, 256, E, -2 * E, -2 * E]
    ),
    "stored in 8 bits": (weight(E, kept=eight_bit_tensors(64, 128)), "placed", [256, E]),
    "two projections of experts are stacked": (
        weight(48, stacks=(2, 2)), "placed", [24, 24, 24, 24, 48, -24, -24, 48, -24, -24, 96, -48, -48]
    ),
    "one projection of experts": (weight(24, stacks=(2, 1)), "placed", [24, 24, 48, -24, -24]),
}  # fmt: skip


@pytest.mark.parametrize(("tensor", "kind", "expected"), LOADS.values(), ids=LOADS)
def test_loading_a_weight(tensor, kind, expected):
    assert loaded([tensor], kind, has_warmup=False) == expected


def test_the_block_leaves_room_on_a_small_device_and_weights_come_in_the_order_of_their_names_and_numbers():
    tensor = LoadedTensor(name="a", num_elements=2**31, element_bytes=2)
    assert warmup_bytes([tensor], None) == 2**32
    assert warmup_bytes([tensor], 4 * 1024**3) == 4 * 1024**3 - 1288490188
    assert loaded([tensor], "placed", device_bytes=1024**3) == loaded([tensor], "moved") == [2**32]
    assert loaded([weight(8)], "placed") == [16, -16, 16]
    names = ["model.layers.10.a", "model.layers.9.b", "model.layers.9.a", "lm_head.weight", "model.embed.weight"]
    tensors = [LoadedTensor(name=name, num_elements=1, element_bytes=1) for name in names]
    assert [tensor.name for tensor in in_checkpoint_order(tensors)] == [names[number] for number in (3, 4, 2, 1, 0)]


def recorded(model):
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


@pytest.mark.parametrize("settings", [FOUR, None])
def test_the_weights_come_in_loadings_order_and_the_rest_after_them(settings):
    base = on_meta(LLAMA, settings)
    tensors = loaded_tensors(base, arriving_bytes=2 if settings else None)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    before = recorded(peft.get_peft_model(base, lora))
    after = with_loading(before, tensors, "quantized" if settings else "moved")
    (_, _), (step, _), (end, _) = after.marks
    assert alive(after, "step 1") == alive(before, "step 1")
    adapters = [place.module.rpartition(".")[0] for place in after.places[step - 4 : step]]
    assert all(module.endswith(("lora_A", "lora_B")) for module in adapters)
    assert (log(after)[step:], end) == ([7, -7], len(after.storages))
    if settings is None:
        modules = [[place.module for place in stream.places] for stream in (after, before)]
        assert sorted(zip(modules[0], log(after), strict=True)) == sorted(zip(modules[1], log(before), strict=True))

    # A few layers' tensors are expanded to all.
    depths = (LlamaConfig(**{**LLAMA.to_dict(), "num_hidden_layers": layers}) for layers in (2, 5))
    few, whole = (loaded_tensors(on_meta(depth, settings)) for depth in depths)
    path = "base_model.model.model.layers"
    assert of_all_layers(few, layers_path=path, num_layers=5, template=lambda layer: min(layer, 1)) == whole


@pytest.mark.parametrize("bits", [4, 8])
def test_a_bias_is_cast_once_and_not_in_every_step(tmp_path, bits):
    """A card without bf16: bitsandbytes casts the biases of a Qwen2 in the first pass of all, for good."""
    trainer = {"type": "finetune", "optimizer": "sgd", "dropout_by_row": True, "enable_gradient_checkpointing": False}
    config = {"base_model": str(write_folder(tmp_path, "qwen2", num_hidden_layers=5)), "trainer": trainer}
    config |= {"adapter": {"type": "lora", "r": 1, "dropout": 0.1}, "quantization": {"bits": bits}}
    for device in ("t4", "a100-80gb"):
        first, second = brim.predict_memory(config, batch_size=2, sequence_length=8, device=device).step_peaks_bytes
        # Without an optimizer's state steps are alike, but for a block that each 8-bit layer keeps of its first pass.
        assert second - first == (5 * 7 * 512 if bits == 8 else 0), device


SECTIONS = [section for section in get_args(OptimizerConfig) if issubclass(section, BitsandbytesOptimizerConfig)]
TYPES = [section.model_fields["type"].default for section in SECTIONS]
SHAPES = [(4095,), (64, 64), (3, 7), (257, 401), (1000, 120)]  # below, at and above 4,096 elements; the last is paged


def settings_of(kind, **keys):
    return TypeAdapter(OptimizerConfig).validate_python({"type": kind, **keys})


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("kind", TYPES)
def test_states_are_those_of_the_real_optimizer(kind):
    parameters = [Parameter(torch.zeros(shape)) for shape in SHAPES]
    real = build_optimizer(settings_of(kind), parameters)  # on the CPU, where paged states are plain ones
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    real.step()
    rule = state_rule(settings_of(kind))
    stand_in = StandInOptimizer(parameters, rule)
    stand_in.step()
    tables = {}
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


def test_sizes_from_which_states_are_paged_or_in_8_bits():
    paged = state_rule(settings_of("paged_adamw_8bit"))
    assert [tensor.paged for tensor in state_tensors(paged, 100_000)] == [True, True, False, False]
    assert [tensor.paged for tensor in state_tensors(paged, 99_999)] == [False] * 4
    small = state_rule(settings_of("adam_8bit", min_8bit_size=16))
    assert [tensor.num_bytes for tensor in state_tensors(small, 16)] == [16, 16, 4, 4]
    assert [tensor.num_bytes for tensor in state_tensors(small, 15)] == [60, 60]


def test_the_first_step_allocates_in_the_real_order_and_the_second_nothing():
    rule = state_rule(settings_of("adamw_8bit"))
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
