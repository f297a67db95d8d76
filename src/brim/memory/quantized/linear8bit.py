"""A stand-in for bitsandbytes' 8-bit linear layer (LLM.int8) that allocates what the real one does on CUDA."""

from __future__ import annotations

from typing import Any, cast

import bitsandbytes.nn.modules as theirs
import torch
from bitsandbytes.autograd._functions import MatmulLtState
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from brim.memory.quantized.layout import eight_bit_tensors
from brim.memory.recorder import note_kernel

# Columns of the activations with a value over the threshold depend on the data. Transformers of up to 13 B parameters
# have at most 7 (Dettmers et al., LLM.int8, 2022, section 4: |O| ≤ 7); freshly drawn weights have none.
TYPICAL_OUTLIER_COLUMNS = 7


class Int8Params(FakeTensor):
    """A fake 8-bit weight: PEFT asks for the class by this name."""


class StandInLinear8bit(theirs.Linear8bitLt):
    """Linear8bitLt (nn/modules.py) whose tensors may be replaced by fake ones; PEFT wraps it as the real one."""

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
    """MatMul8bitLt, autograd/_functions.py. It keeps its input on the context, past any hook of saved tensors.

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
    """`int8_vectorwise_quant`, backends/cuda/ops.py: int8 rows, their scales, the outliers' columns."""
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
    """`int8_mixed_scaled_mm`, backends/default/ops.py: the outliers' columns apart, in the inputs' dtype."""
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
    """`int8_scaled_mm`, backends/default/ops.py, with the parts of backends/cuda/ops.py."""
    product = _integer_product(quantized, cast(Any, state).CB)
    output = torch.empty_like(product, dtype=torch.float16)  # the kernel writes fp16 only
    note_kernel("int8_mm_dequant", product, output)
    if bias is not None and bias.dtype != torch.float16:
        output.add_(bias)
    return output.to(dtype)


def _integer_product(quantized: Tensor, weight: Tensor) -> Tensor:
    """`int8_linear_matmul`, backends/cuda/ops.py: int32; in fp32 where the inner dimension is no multiple of 4."""
    output = torch.empty((*quantized.shape[:-1], weight.shape[0]), dtype=torch.int32, device=quantized.device)
    if quantized.shape[-1] % 4:
        result = torch.matmul(quantized.float(), weight.float().t()).to(torch.int32)
        return output.copy_(result)
    flops = 2 * quantized.numel() * weight.shape[0]
    note_kernel("int8_linear_matmul", quantized, weight, output, flops=flops, unit="matrix")
    return output
