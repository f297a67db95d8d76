"""Quantised layers with biases, where the arithmetic is not in the precision in which the base is stored."""

import pytest
from tests.memory.tiny_architectures import write_folder

import brim


@pytest.mark.parametrize("bits", [4, 8])
def test_a_bias_is_cast_once_and_not_in_every_step(tmp_path, bits):
    """A card without bf16: bitsandbytes casts the biases of a Qwen2 in the first pass of all, for good."""
    folder = write_folder(tmp_path, "qwen2", dtype="bfloat16")
    config = {
        "base_model": str(folder),
        "adapter": {"type": "lora", "r": 1},
        "quantization": {"bits": bits},
        "trainer": {"type": "finetune", "optimizer": {"type": "sgd"}},
    }
    for device in ("t4", "a100-80gb"):
        found = brim.predict_memory(config, batch_size=2, sequence_length=8, device=device)
        first, second = found.step_peaks_bytes
        # Without an optimizer's state steps are alike, but for a block that each 8-bit layer keeps of its first pass.
        assert second - first == (9 * 7 * 512 if bits == 8 else 0), device
