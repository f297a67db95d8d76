"""brim: fine-tune large language models, and run them over data sets, on the GPU that you have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brim.errors import (
    BrimError,
    CheckpointError,
    ConfigError,
    DataError,
    InputError,
    Interrupted,
    ModelError,
    OutputError,
    Problem,
    WriteError,
)

if TYPE_CHECKING:
    from brim.api.model import Model
    from brim.api.results import EvaluateResult, PredictResult, TrainResult

__all__ = [
    "BrimError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EvaluateResult",
    "InputError",
    "Interrupted",
    "Model",
    "ModelError",
    "OutputError",
    "PredictResult",
    "Problem",
    "TrainResult",
    "WriteError",
]

_LAZY = {
    "Model": "brim.api.model",
    "EvaluateResult": "brim.api.results",
    "PredictResult": "brim.api.results",
    "TrainResult": "brim.api.results",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for, so that `import brim` and `brim --help` stay quick."""
    if name not in _LAZY:
        raise AttributeError(f"module 'brim' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
