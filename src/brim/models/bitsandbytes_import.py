"""bitsandbytes as we use it: without chatter, without code from the Hub, and right on every CPU."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from brim.errors import ModelError, Problem

if TYPE_CHECKING:
    import torch


def require_bitsandbytes() -> None:
    """Import bitsandbytes, or take it as it is imported already.

    Raises ModelError, with the command that installs it.
    """
    log = logging.getLogger("bitsandbytes")
    if log.level == logging.NOTSET:  # else somebody wants to hear of each cast, in every layer and step
        log.setLevel(logging.ERROR)
    try:
        _import()
    except (ImportError, OSError, RuntimeError) as error:  # the package, a library of its own, one of its backends
        raise ModelError(
            Problem(
                what=f"bitsandbytes, which quantises, cannot be imported: {' '.join(str(error).split())}",
                fix="install it with `pip install 'bitsandbytes>=0.49'`, or remove quantization and 8-bit or paged "
                "optimizers",
            )
        ) from error
    _mend_dequantization()


def _import() -> None:
    """Import it with the package `kernels` out of its sight, and PyTorch's compiler left alone until it is needed.

    On CPUs with AVX512-BF16 it would have that package fetch native code from the Hub and run it, unasked. What needs
    that code is switched off (see models/quantization.py). The compiler takes more than a second to import, for four
    functions that most runs never call.
    """
    if sys.modules.get("bitsandbytes") is not None:
        return
    import torch

    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "kernels"}
    sys.modules.update(dict.fromkeys({"kernels", *hidden}))  # type: ignore[arg-type]
    try:
        with patch.object(torch, "compile", partial(_compiled_when_called, torch.compile)):
            import bitsandbytes  # noqa: F401
    finally:
        del sys.modules["kernels"]
        sys.modules.update(hidden)


def _compiled_when_called(
    compiler: Callable[..., Any], function: Callable[..., Any], **options: Any
) -> Callable[..., Any]:
    """What the compiler would make of the function; it is asked at the first call."""
    compiled = cache(partial(compiler, function, **options))

    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


@cache
def _mend_dequantization() -> torch.library.Library:
    """Have 4-bit weights dequantised block by block, where a row of theirs is no whole number of blocks.

    bitsandbytes (0.50 at least) counts blocks by row on CPUs with AVX-512, and takes the scales of other blocks then:
    a layer of 688 inputs comes out quite wrong, without a word. Its GPU kernels are right. Returns what must be kept
    alive.
    """
    import torch

    theirs = torch.library.get_kernel("bitsandbytes::dequantize_4bit", "CPU")

    def dequantize(
        keys: torch._C.DispatchKeySet,
        packed: torch.Tensor,
        scales: torch.Tensor,
        blocksize: int,
        kind: str,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        rows = list(shape)
        if shape[-1] % blocksize:
            size = prod(shape)  # each core works on rows of its own
            rows = [1, size] if size % blocksize else [size // blocksize, blocksize]
        weight: torch.Tensor = theirs.call_boxed(keys, packed, scales, blocksize, kind, rows, dtype)
        return weight.reshape(list(shape))

    library = torch.library.Library("bitsandbytes", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        library.impl(  # type: ignore[no-untyped-call]
            "dequantize_4bit", dequantize, "CPU", with_keyset=True, allow_override=True
        )
    return library
