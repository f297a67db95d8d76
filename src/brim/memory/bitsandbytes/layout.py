"""Say how bitsandbytes stores quantised weights: which tensors each layer has, without importing bitsandbytes."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_SIZE = 64  # weights that share one scale: quantize_4bit, functional.py


SCALES_BLOCK_SIZE = 256  # scales that share one scale in double quantization: the same function


# The first release whose 4-bit layers multiply in one operator, `gemm_4bit`: with few rows it has no buffer. Before it,
# `dequantize_4bit` and a plain linear stood in MatMul4Bit.forward, and only a single row went without a buffer.
FUSED_SINCE = (0, 50)


# The first release with operators of torch.library. Since then each layer copies the table of 8-bit values
# (`code.to(device, copy=True)` in quantize_blockwise) instead of sharing one, and for a single row the offset of the
# scales is no longer added in place.
OPERATORS_SINCE = (0, 46)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTensor:
    """Describe a tensor that lives as long as the layer does."""

    name: str
    num_elements: int
    element_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.element_bytes


def four_bit_tensors(
    num_weights: int, *, double_quant: bool, release: tuple[int, int] = FUSED_SINCE, storage_bytes: int = 1
) -> tuple[KeptTensor, ...]:
    """List what a 4-bit weight of so many elements keeps, in the order of birth (quantize_4bit, functional.py).

    storage_bytes: of an element of `quant_storage`; the packed weight takes the same memory but for rounding.
    """
    blocks = -(-num_weights // BLOCK_SIZE)
    packed = KeptTensor(
        name="weight", num_elements=(num_weights + 1) // (2 * storage_bytes), element_bytes=storage_bytes
    )
    code = KeptTensor(name="code", num_elements=16, element_bytes=4)
    if not double_quant:
        return (KeptTensor(name="absmax", num_elements=blocks, element_bytes=4), packed, code)
    kept = (
        packed,
        code,
        KeptTensor(name="offset", num_elements=1, element_bytes=4),
        KeptTensor(name="nested_absmax", num_elements=-(-blocks // SCALES_BLOCK_SIZE), element_bytes=4),
        KeptTensor(name="absmax", num_elements=blocks, element_bytes=1),
    )
    if release < OPERATORS_SINCE:
        return kept
    return (*kept, KeptTensor(name="nested_code", num_elements=256, element_bytes=4))


def eight_bit_tensors(out_features: int, in_features: int) -> tuple[KeptTensor, ...]:
    """List what an 8-bit layer keeps, in the order of birth (int8_vectorwise_quant, backends/cuda/ops.py)."""
    return (
        KeptTensor(name="SCB", num_elements=out_features, element_bytes=4),
        KeptTensor(name="weight", num_elements=out_features * in_features, element_bytes=1),
    )
