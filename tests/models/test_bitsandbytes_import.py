"""bitsandbytes as we import it: quiet, offline, and with its 4-bit kernel right on CPUs with AVX-512."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from brim.errors import ModelError
from brim.models import require_bitsandbytes
from brim.models.quantization import _compiled_when_called


@pytest.mark.parametrize("shape", [(64, 688), (3, 96), (5, 32), (16, 64), (7, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_is_no_whole_number_of_blocks_is_dequantised_right(shape, dtype):
    require_bitsandbytes()
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    torch.manual_seed(0)
    weight = torch.randn(shape)
    packed, state = quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
    flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).reshape(-1, 64)
    scales = flat.abs().amax(dim=1, keepdim=True)
    nearest = (flat / scales).unsqueeze(-1).sub(state.code).abs().argmin(dim=-1)
    expected = (state.code[nearest] * scales).flatten()[: weight.numel()].reshape(shape)
    state.dtype = dtype
    torch.testing.assert_close(dequantize_4bit(packed, state), expected.to(dtype), rtol=1e-2, atol=1e-6)


def test_without_bitsandbytes_the_install_command_is_given(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(
        ModelError, match=r"cannot be imported: .*\n  fix: install it with `pip install 'bitsandbytes>="
    ):
        require_bitsandbytes()


def test_importing_bitsandbytes_says_nothing_and_fetches_nothing(tmp_path):
    """With a package `kernels` at hand, it would have native code from the Hub run on some CPUs."""
    (tmp_path / "kernels.py").write_text("def get_kernel(*a, **k):\n    raise SystemExit('fetched')\n")
    code = (
        "import kernels, sys\n"
        "from brim.models import require_bitsandbytes\n"
        "require_bitsandbytes()\n"
        "assert sys.modules['kernels'] is kernels and 'bitsandbytes' in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_importing_it_leaves_the_compiler_alone_until_a_function_is_called():
    code = (
        "import sys, torch; from brim.models import require_bitsandbytes\n"
        "before = torch.compile; require_bitsandbytes(); print('torch._inductor' in sys.modules, torch.compile is before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_a_function_is_compiled_once_when_it_is_first_called():
    asked = []

    def compiler(function, **options):
        asked.append(options)
        return function

    add = _compiled_when_called(compiler, lambda a, b: a + b, dynamic=False)
    assert asked == []
    assert (add(1, 2), add(3, b=4)) == (3, 7)
    assert asked == [{"dynamic": False}]
