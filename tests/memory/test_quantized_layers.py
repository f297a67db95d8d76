"""Stand-ins for bitsandbytes' layers against the real ones on this machine, and against CUDA's allocations by hand."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from tests.memory.births import Births
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from brim.memory.bitsandbytes.layout import eight_bit_tensors, four_bit_tensors
from brim.models import require_bitsandbytes

require_bitsandbytes()

from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt  # noqa: E402

from brim.memory.bitsandbytes.linear import FourBits, StandInLinear4bit, StandInLinear8bit  # noqa: E402

SHAPES = [(64, 64), (128, 64), (100, 36), (7, 5), (65, 33), (688, 256), (96, 200)]  # inputs, outputs


def real_4bit(shape: tuple[int, int], *, double_quant: bool, kind: str = "nf4", bias: bool = False) -> Linear4bit:
    layer = Linear4bit(
        *shape, bias=bias, compute_dtype=torch.bfloat16, compress_statistics=double_quant, quant_type=kind
    )
    layer.to(torch.bfloat16)
    layer.support_avx512bf16_for_cpu = False
    return layer.to("cpu").train()


def stand_in_4bit(shape: tuple[int, int], *, bias: bool = False, **settings: Any) -> StandInLinear4bit:
    parameter = nn.Parameter(torch.zeros(shape[1], dtype=torch.bfloat16), requires_grad=False) if bias else None
    four_bits = FourBits(compute_dtype=torch.bfloat16, **settings)
    return StandInLinear4bit(*shape, bias=parameter, settings=four_bits).train()


def kept_by(layer: nn.Module) -> dict[str, int]:
    tensors = {"weight": layer.weight, **layer._buffers}
    return {name: tensor.untyped_storage().nbytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_4bit_layer_keeps_the_real_ones_bytes(shape: tuple[int, int], double_quant: bool, kind: str) -> None:
    real = real_4bit(shape, double_quant=double_quant, kind=kind)
    state = real.weight.quant_state
    tensors = {"weight": real.weight, "absmax": state.absmax, "code": state.code}
    if double_quant:
        tensors |= {"offset": state.offset, "nested_absmax": state.state2.absmax, "nested_code": state.state2.code}
    expected = {name: tensor.untyped_storage().nbytes() for name, tensor in tensors.items()}
    assert kept_by(stand_in_4bit(shape, double_quant=double_quant, quant_type=kind)) == expected
    described = four_bit_tensors(shape[0] * shape[1], double_quant=double_quant)
    assert {tensor.name: tensor.num_bytes for tensor in described} == expected


@pytest.mark.parametrize("shape", [(64, 64), (100, 36), (688, 256)])
def test_an_8bit_layer_keeps_the_real_ones_bytes(shape: tuple[int, int]) -> None:
    real = Linear8bitLt(*shape, bias=False, has_fp16_weights=False, threshold=6.0).to("cpu")
    real(torch.zeros(1, shape[0], dtype=torch.bfloat16))
    expected = {"weight": real.weight.untyped_storage().nbytes(), "SCB": real.state.SCB.untyped_storage().nbytes()}
    assert real.weight.data_ptr() == real.state.CB.data_ptr()
    assert kept_by(StandInLinear8bit(*shape, bias=None, threshold=6.0)) == expected
    assert {tensor.name: tensor.num_bytes for tensor in eight_bit_tensors(shape[1], shape[0])} == expected


def test_a_packed_weight_of_another_storage_type_takes_the_same_bytes() -> None:
    real = Linear4bit(128, 64, bias=False, compute_dtype=torch.bfloat16, quant_storage=torch.bfloat16).to("cpu")
    layer = stand_in_4bit((128, 64), quant_storage=torch.bfloat16)
    assert (layer.weight.shape, layer.weight.dtype) == (real.weight.shape, real.weight.dtype)


def observed(layer: nn.Module, inputs: torch.Tensor) -> dict[str, Any]:
    """What can be seen of a forward and backward pass from outside."""
    saved: list[int] = []

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


@pytest.mark.parametrize(
    ("shape", "dtype", "bias"),
    list(product([(64, 64), (128, 96)], [torch.bfloat16, torch.float32], [True, False])),
)
def test_a_4bit_layers_outputs_are_the_real_ones(shape: tuple[int, int], dtype: torch.dtype, bias: bool) -> None:
    inputs = torch.randn(2, 5, shape[0], dtype=dtype, requires_grad=True)
    real = observed(real_4bit(shape, double_quant=True, bias=bias).requires_grad_(False), inputs)
    inputs.grad = None
    assert observed(stand_in_4bit(shape, bias=bias), inputs) == real
    assert real["saved"] == []  # all is on the context


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_8bit_layers_outputs_are_the_real_ones(dtype: torch.dtype) -> None:
    inputs = torch.randn(2, 5, 64, dtype=dtype, requires_grad=True)
    layer = Linear8bitLt(64, 96, bias=False, has_fp16_weights=False, threshold=6.0).to("cpu")
    real = observed(layer.train().requires_grad_(False), inputs)
    inputs.grad = None
    assert observed(StandInLinear8bit(64, 96, bias=None, threshold=6.0), inputs) == real
    assert real["saved"] == []


def allocations(layer_of: Any, rows: int, dtype: torch.dtype, *, grad: bool = True) -> tuple[Births, int]:
    """The storages of a forward and a backward pass, and how many of them belong to the forward pass."""
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
    return births, forward


SCALES, WEIGHT, OUTPUT, GRADIENT = 128 * 4, 64 * 128 * 2, 8 * 64 * 2, 8 * 128 * 2  # 128 inputs, 64 outputs, 8 rows


def test_a_4bit_layer_allocates_scales_twice_and_the_weight_and_keeps_the_output() -> None:
    births, forward = allocations(lambda: stand_in_4bit((128, 64)), 8, torch.bfloat16)
    assert births.log[:4] == [SCALES, SCALES, WEIGHT, OUTPUT]
    assert sorted(births.log[4:forward]) == [-WEIGHT, -SCALES, -SCALES]
    assert births.log[forward:][:5] == [SCALES, WEIGHT, -SCALES, GRADIENT, -WEIGHT]


def test_without_double_quantization_there_are_no_scales_to_make() -> None:
    births, forward = allocations(lambda: stand_in_4bit((128, 64), double_quant=False), 8, torch.bfloat16)
    assert births.log[:forward] == [WEIGHT, OUTPUT, -WEIGHT]
    assert births.log[forward:][:3] == [WEIGHT, GRADIENT, -WEIGHT]


def test_up_to_four_rows_need_no_buffer() -> None:
    births, forward = allocations(lambda: stand_in_4bit((128, 64)), 4, torch.bfloat16, grad=False)
    assert births.log[:forward] == [OUTPUT // 2]
    births, _ = allocations(lambda: stand_in_4bit((100, 64)), 1, torch.bfloat16, grad=False)
    assert births.log[2] == 64 * 100 * 2  # 100 inputs are no whole number of blocks


def test_inputs_are_cast_to_the_compute_dtype_and_outputs_back() -> None:
    births, forward = allocations(lambda: stand_in_4bit((128, 64), double_quant=False), 8, torch.float32)
    cast = 8 * 128 * 2
    assert births.log[:4] == [cast, WEIGHT, OUTPUT, -WEIGHT]
    assert births.log[4] == 2 * OUTPUT  # fp32
    assert sorted(births.log[5:forward]) == [-cast, -OUTPUT]


def test_a_backward_pass_can_dequantise_to_another_dtype() -> None:
    layer = lambda: stand_in_4bit((128, 64), double_quant=False, dequantized_dtype=torch.float32)  # noqa: E731
    births, forward = allocations(layer, 8, torch.bfloat16)
    assert births.log[:forward] == [WEIGHT, OUTPUT, -WEIGHT]
    assert births.log[forward:][:4] == [2 * WEIGHT, WEIGHT, -2 * WEIGHT, GRADIENT]


def test_older_releases_dequantise_in_place_and_take_a_single_row_apart() -> None:
    old = {"release": (0, 43)}
    births, forward = allocations(lambda: stand_in_4bit((128, 64), **old), 8, torch.bfloat16)
    assert births.log[:forward] == [SCALES, WEIGHT, -SCALES, OUTPUT, -WEIGHT]
    births, _ = allocations(lambda: stand_in_4bit((128, 64), **old), 4, torch.bfloat16, grad=False)
    assert WEIGHT in births.log
    births, _ = allocations(lambda: stand_in_4bit((128, 64), **old), 1, torch.bfloat16, grad=False)
    assert births.log[:3] == [SCALES, 64 * 2, -SCALES]
    births, _ = allocations(lambda: stand_in_4bit((128, 64), release=(0, 49)), 1, torch.bfloat16, grad=False)
    assert births.log[:5] == [SCALES, SCALES, -SCALES, 64 * 2, -SCALES]
    assert "nested_code" not in kept_by(stand_in_4bit((128, 64), **old))


def test_an_8bit_layer_without_outliers() -> None:
    births, forward = allocations(lambda: StandInLinear8bit(128, 64, bias=None, threshold=0.0), 8, torch.bfloat16)
    half, stats, codes, integers = 8 * 128 * 2, 8 * 4, 8 * 128, 8 * 64 * 4
    assert births.log[:4] == [half, stats, codes, -half]
    assert births.log[4:7] == [integers, OUTPUT, OUTPUT]  # int32, fp16, and the inputs' bf16
    assert sorted(births.log[7:forward]) == sorted([-integers, -OUTPUT, -stats, -codes])
    factors = 64 * 4
    assert births.log[forward:][:5] == [WEIGHT, factors, -factors, GRADIENT, -WEIGHT]


def test_outliers_cost_a_mask_their_columns_and_a_second_output() -> None:
    births, forward = allocations(
        lambda: StandInLinear8bit(128, 48, bias=None, threshold=6.0, outlier_columns=2), 8, torch.float16
    )
    stats, codes, absolute, mask = 8 * 4, 8 * 128, 8 * 128 * 2, 8 * 128
    assert births.log[:5] == [stats, codes, absolute, mask, -absolute]
    columns, of_inputs = 2 * 8, 8 * 2 * 2  # int64, on the layer's state until the next pass; fp16
    codes_of_weight, exact = 48 * 2, 48 * 2 * 4
    at = births.log.index(of_inputs, 5)
    assert births.log[5:at] == [1, -1, 128, -128, columns, -mask]
    assert births.log[at : at + 5] == [of_inputs, codes_of_weight, exact, exact, -exact]
    integers, output = 8 * 48 * 4, 8 * 48 * 2
    assert births.log[at + 5 : at + 12] == [exact // 2, -exact, -codes_of_weight, integers, output, -integers, output]
    assert sum(births.log[:forward]) == output + of_inputs + columns


def test_an_8bit_layer_keeps_its_input_until_the_graph_is_dropped() -> None:
    with FakeTensorMode():
        layer = StandInLinear8bit(128, 64, bias=None, threshold=0.0)
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
