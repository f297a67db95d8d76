"""Stand in for bitsandbytes' 4-bit and 8-bit linear layers: allocate what the real ones do on CUDA.

The 8-bit layer is that of LLM.int8. The tensors that a quantised layer keeps are listed with their names, elements
and bytes, as bitsandbytes lays them out on CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import bitsandbytes.nn.modules as theirs
import torch
from bitsandbytes.autograd._functions import MatmulLtState
from bitsandbytes.functional import QuantState
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from brim.memory.bitsandbytes.layout import (
    BLOCK_SIZE,
    FUSED_SINCE,
    OPERATORS_SINCE,
    SCALES_BLOCK_SIZE,
    eight_bit_tensors,
    four_bit_tensors,
)
from brim.memory.trace import note_kernel

# Rows up to which `gemm_4bit` takes its own kernel on any GPU (_GEMM_4BIT_CUSTOM_FLOOR_M, backends/cuda/ops.py). Above
# it, the choice depends on the GPU and the shape: up to 1,536 rows a buffer that is counted here may not be there.
_FUSED_ROWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBits:
    """Say how a 4-bit layer stores its weight and computes."""

    compute_dtype: torch.dtype
    double_quant: bool = True
    quant_type: str = "nf4"
    quant_storage: torch.dtype = torch.uint8
    release: tuple[int, int] = FUSED_SINCE  # of bitsandbytes
    scales_are_sharded: bool = False  # like weights; else each rank has all of them


class Params4bit(FakeTensor):
    """A fake packed weight: PEFT asks for the class by this name."""


class StandInLinear4bit(theirs.Linear4bit):
    """Stand in for Linear4bit (nn/modules.py) with tensors that may be replaced by fake ones; PEFT wraps it, too.

    The quantization state is in buffers, so that whoever counts or replaces a model's tensors finds it; what of it is
    sharded is in parameters.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: nn.Parameter | None, settings: FourBits) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.settings = settings
        self.compute_dtype, self.compute_type_is_set = settings.compute_dtype, True
        self.quant_storage = settings.quant_storage
        self.support_avx512bf16_for_cpu = False
        self.register_parameter("bias", bias)
        self._allocate()
        self._settle()

    def forward(self, x: Tensor) -> Tensor:
        state = self._settle()
        given = x.dtype
        x = x.to(self.compute_dtype)
        bias: Tensor | None = self._parameters["bias"]
        if bias is not None:
            if bias.dtype != x.dtype:
                bias.data = bias.data.to(x.dtype)
            bias = bias.to(self.compute_dtype)
        return _multiply(x, self.weight, bias, state, self.settings.release).to(given)

    def _allocate(self) -> None:
        dtypes = {1: torch.uint8, 4: torch.float32}
        for kept in four_bit_tensors(
            self.in_features * self.out_features,
            double_quant=self.settings.double_quant,
            release=self.settings.release,
            storage_bytes=self.quant_storage.itemsize,
        ):
            if kept.name == "weight":
                packed = torch.empty((kept.num_elements, 1), dtype=self.quant_storage)
                self.register_parameter("weight", nn.Parameter(packed, requires_grad=False))
                continue
            shape = () if kept.name == "offset" else (kept.num_elements,)
            tensor = torch.empty(shape, dtype=dtypes[kept.element_bytes])
            if kept.name == "absmax" and self.settings.scales_are_sharded:
                self.register_parameter(kept.name, nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(kept.name, tensor, persistent=False)

    def _settle(self) -> QuantState:
        """Tie the tensors that the module has now to each other, as bitsandbytes has them; allocates nothing."""
        state = self._state()
        weight = cast(Any, self.weight)
        if type(weight) is nn.Parameter:
            weight = theirs.Params4bit(weight.data, quant_storage=self.quant_storage, bnb_quantized=True)
            self.register_parameter("weight", weight)
        elif type(weight) is FakeTensor:
            weight.__class__ = Params4bit
        weight.quant_state = state
        weight.compress_statistics, weight.quant_type = state.nested, state.quant_type
        return state

    def _state(self) -> QuantState:
        buffers: dict[str, Any] = {**self._buffers, **self._parameters}
        settings = self.settings
        nested = None
        make = cast(Any, QuantState)
        if settings.double_quant:
            # Older releases' layers share one table, which the model keeps (replace.py); no value matters here.
            code = buffers.get("nested_code", buffers["code"])
            nested = make(absmax=buffers["nested_absmax"], code=code, blocksize=SCALES_BLOCK_SIZE, dtype=torch.float32)
        state: QuantState = make(
            absmax=buffers["absmax"],
            shape=torch.Size((self.out_features, self.in_features)),
            code=buffers["code"],
            blocksize=BLOCK_SIZE,
            quant_type=settings.quant_type,
            dtype=settings.compute_dtype,  # to which the backward pass dequantises
            offset=buffers.get("offset"),
            state2=nested,
        )
        return state


def _multiply(
    inputs: Tensor, packed: Tensor, bias: Tensor | None, state: QuantState, release: tuple[int, int]
) -> Tensor:
    """Do as matmul_4bit, autograd/_functions.py."""
    product = _product if release >= FUSED_SINCE else _product_before_fusion
    needs_grad = torch.is_grad_enabled() and (inputs.requires_grad or (bias is not None and bias.requires_grad))
    if needs_grad:
        result: Tensor = cast(Any, _MatMul4Bit).apply(inputs, packed, bias, state, product)
        return result
    if release < FUSED_SINCE and inputs.numel() == inputs.shape[-1] and inputs.shape[-1] % BLOCK_SIZE == 0:
        return _row_before_fusion(inputs, bias, state, release)
    return product(inputs, state, bias)


class _MatMul4Bit(torch.autograd.Function):
    """Do as MatMul4Bit, autograd/_functions.py: keep neither the input nor the dequantised weight for backward.

    As there, what the backward pass needs is on the context itself, where no hook of saved tensors sees it.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, packed: Tensor, bias: Tensor | None, state: QuantState, product: Any) -> Any:
        output = product(inputs, state, bias)
        ctx.state = state
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.tensors = (None, packed.view(-1, 1)) if any(ctx.needs_input_grad[:2]) else (None, None)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        of_inputs = of_bias = None
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum(0, dtype=ctx.bias_dtype)
        if ctx.needs_input_grad[0]:
            of_inputs = torch.matmul(gradient, _dequantized(ctx.state).to(gradient.dtype))
        return of_inputs, None, of_bias, None, None


def _product(inputs: Tensor, state: QuantState, bias: Tensor | None) -> Tensor:
    """Do as `gemm_4bit` (backends/cuda/ops.py): run its own kernel, or `_dequant_linear_fallback`."""
    rows, width = inputs.numel() // inputs.shape[-1], inputs.shape[-1]
    if rows <= _FUSED_ROWS and width % BLOCK_SIZE == 0:
        inputs = inputs.contiguous()
        out = torch.empty((*inputs.shape[:-1], state.shape[0]), dtype=inputs.dtype, device=inputs.device)
        flops, packed = 2 * inputs.numel() * state.shape[0], state.shape.numel() // 2
        note_kernel("gemm_4bit", inputs, flops=flops, unit="matrix", num_bytes=packed)
        return out
    if state.nested:
        scales = torch.empty_like(state.absmax, dtype=torch.float32)
        shifted = scales + state.offset  # the backward pass adds in place; this one does not
    weight = torch.empty(state.shape, dtype=inputs.dtype, device=inputs.device)
    _note_dequantization(weight)
    output = nn.functional.linear(inputs, weight, bias)
    if state.nested:
        del scales, shifted
    return output


def _product_before_fusion(inputs: Tensor, state: QuantState, bias: Tensor | None) -> Tensor:
    """Do as MatMul4Bit.forward up to 0.49."""
    return nn.functional.linear(inputs, _dequantized(state).to(inputs.dtype), bias)


def _row_before_fusion(inputs: Tensor, bias: Tensor | None, state: QuantState, release: tuple[int, int]) -> Tensor:
    """Do as `gemv_4bit` (functional.py) up to 0.49: the weight stays packed, its scales do not."""
    scales = _scales(state, in_place=release < OPERATORS_SINCE)
    output = torch.empty((*inputs.shape[:-1], state.shape[0]), dtype=inputs.dtype, device=inputs.device)
    flops, packed = 2 * inputs.numel() * state.shape[0], state.shape.numel() // 2
    note_kernel("gemv_4bit", inputs, flops=flops, unit="matrix", num_bytes=packed)
    del scales
    if bias is not None:
        output += bias
    return output


def _dequantized(state: QuantState) -> Tensor:
    """Do as `dequantize_4bit`, functional.py and backends/cuda/ops.py."""
    scales = _scales(state)
    weight = torch.empty(state.shape, dtype=state.dtype, device=scales.device)
    _note_dequantization(weight)
    del scales
    return weight


def _note_dequantization(weight: Tensor) -> None:
    """The kernel reads half a byte for each element that it writes."""
    note_kernel("dequantize_4bit", weight, num_bytes=weight.numel() // 2 + weight.nbytes)


def _scales(state: QuantState, *, in_place: bool = True) -> Tensor:
    """Return the fp32 scales; with double quantization in a new buffer, to which the offset is added."""
    if not state.nested:
        return cast(Tensor, state.absmax)
    scales = torch.empty_like(state.absmax, dtype=torch.float32)
    if not in_place:
        return scales + cast(Tensor, state.offset)
    scales += state.offset
    return scales


# Columns of the activations with a value over the threshold depend on the data. Transformers of up to 13 B parameters
# have at most 7 (Dettmers et al., LLM.int8, 2022, section 4: |O| ≤ 7); freshly drawn weights have none.
TYPICAL_OUTLIER_COLUMNS = 7


class Int8Params(FakeTensor):
    """A fake 8-bit weight: PEFT asks for the class by this name."""


class StandInLinear8bit(theirs.Linear8bitLt):
    """Stand in for Linear8bitLt (nn/modules.py) with tensors that may be replaced by fake ones; PEFT wraps it, too."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: nn.Parameter | None,
        threshold: float,
        outlier_columns: int = TYPICAL_OUTLIER_COLUMNS,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.index = None
        self.outlier_columns = min(outlier_columns, in_features) if threshold > 0 else 0
        self.state = MatmulLtState()
        self.state.threshold, self.state.has_fp16_weights, self.state.use_pool = threshold, False, threshold > 0
        self.register_parameter("bias", bias)
        dtypes = {1: torch.int8, 4: torch.float32}
        scales, weight = (
            torch.empty(kept.num_elements, dtype=dtypes[kept.element_bytes])
            for kept in eight_bit_tensors(out_features, in_features)
        )
        self.register_buffer("SCB", scales, persistent=False)
        weight = weight.view(out_features, in_features)
        self.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        self._settle()

    def forward(self, x: Tensor) -> Tensor:
        self._settle()
        bias = self._parameters["bias"]
        if bias is not None and bias.dtype != x.dtype:
            bias.data = bias.data.to(x.dtype)
        result: Tensor = cast(Any, _MatMul8bitLt).apply(x, self.weight, bias, self.state, self.outlier_columns)
        return result

    def _settle(self) -> None:
        """Tie the tensors that the module has now to each other, as bitsandbytes has them; allocates nothing."""
        weight, state = cast(Any, self.weight), cast(Any, self.state)
        if type(weight) is nn.Parameter:
            weight = theirs.Int8Params(weight.data, requires_grad=False)
            self.register_parameter("weight", weight)
        elif type(weight) is FakeTensor:
            weight.__class__ = Int8Params
        weight.CB = weight.SCB = None  # the state has them since the first forward pass: init_8bit_state
        state.CB, state.SCB = weight.data, self._buffers["SCB"]


class _MatMul8bitLt(torch.autograd.Function):
    """Do as MatMul8bitLt, autograd/_functions.py, which keeps its input on the context, where no hook sees it.

    So activation checkpointing without reentry does not free it, and it lives until the graph itself is dropped.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, state: MatmulLtState, outlier_columns: int
    ) -> Any:
        shape = inputs.shape
        if len(shape) == 3:
            inputs = inputs.reshape(-1, shape[-1])
        quantized, scales, outliers = _quantized_rows(inputs.to(torch.float16), state.threshold, outlier_columns)
        if state.threshold > 0:
            state.idx = outliers
            output, of_outliers = _mixed_product(inputs, quantized, scales, outliers, bias, state)
        else:
            output, of_outliers = _scaled_product(quantized, scales, bias, inputs.dtype, state), None
        ctx.state, ctx.shape, ctx.dtype = state, shape, inputs.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        if any(ctx.needs_input_grad[:2]):
            ctx.tensors = (None, of_outliers, inputs)
        else:
            ctx.tensors = (None, None, None)
        return output.reshape((*shape[:-1], output.shape[-1])) if len(shape) == 3 else output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        of_inputs = of_bias = None
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum(0, dtype=ctx.bias_dtype)
        if len(gradient.shape) == 3:
            gradient = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        if ctx.needs_input_grad[0]:
            state = ctx.state
            weight = state.CB.to(ctx.dtype, copy=True).mul_(state.SCB.unsqueeze(1).mul(1.0 / 127.0))
            of_inputs = torch.matmul(gradient.to(ctx.dtype), weight).view(ctx.shape)
        return of_inputs, None, of_bias, None, None


def _quantized_rows(inputs: Tensor, threshold: float, outlier_columns: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Do as `int8_vectorwise_quant`, backends/cuda/ops.py: return int8 rows, their scales, the outliers' columns."""
    scales = torch.empty(inputs.numel() // inputs.shape[-1], dtype=torch.float32, device=inputs.device)
    rows = torch.empty(inputs.shape, dtype=torch.int8, device=inputs.device)
    note_kernel("int8_vectorwise_quant", inputs, rows)
    if threshold <= 0:
        return rows, scales, None
    outliers = inputs.abs() >= threshold
    outliers.any()
    outliers.any(dim=0)
    columns = torch.zeros((outlier_columns, 1), dtype=torch.int64, device=inputs.device).view(-1)
    return rows, scales, columns


def _mixed_product(
    inputs: Tensor,
    quantized: Tensor,
    scales: Tensor,
    outliers: Tensor | None,
    bias: Tensor | None,
    state: MatmulLtState,
) -> tuple[Tensor, Tensor]:
    """Do as `int8_mixed_scaled_mm`, backends/default/ops.py: outliers' columns are multiplied in the inputs' dtype."""
    if outliers is None or outliers.numel() == 0:
        of_outliers = torch.empty(0, dtype=inputs.dtype, device=inputs.device)
        return _scaled_product(quantized, scales, bias, inputs.dtype, state), of_outliers
    of_outliers = inputs[:, outliers].contiguous()
    columns = cast(Any, state).CB[:, outliers].contiguous()
    weights = (columns * cast(Any, state).SCB.view(-1, 1) * (1.0 / 127.0)).to(inputs.dtype).t()
    del columns
    output = _scaled_product(quantized, scales, bias, inputs.dtype, state)
    return output.addmm(of_outliers, weights), of_outliers


def _scaled_product(
    quantized: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype, state: MatmulLtState
) -> Tensor:
    """Do as `int8_scaled_mm`, backends/default/ops.py, with the parts of backends/cuda/ops.py."""
    product = _integer_product(quantized, cast(Any, state).CB)
    output = torch.empty_like(product, dtype=torch.float16)  # the kernel writes fp16 only
    note_kernel("int8_mm_dequant", product, output)
    if bias is not None and bias.dtype != torch.float16:
        output.add_(bias)
    return output.to(dtype)


def _integer_product(quantized: Tensor, weight: Tensor) -> Tensor:
    """Do as `int8_linear_matmul`, backends/cuda/ops.py: in fp32 if the inner dimension is not a multiple of 4."""
    output = torch.empty((*quantized.shape[:-1], weight.shape[0]), dtype=torch.int32, device=quantized.device)
    if quantized.shape[-1] % 4:
        result = torch.matmul(quantized.float(), weight.float().t()).to(torch.int32)
        return output.copy_(result)
    flops = 2 * quantized.numel() * weight.shape[0]
    note_kernel("int8_linear_matmul", quantized, weight, output, flops=flops, unit="matrix")
    return output
