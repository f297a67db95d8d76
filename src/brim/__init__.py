"""brim: fine-tune large language models, and run them over data sets, on the GPU that you have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brim.errors import (
    BrimError,
    CheckpointError,
    ConfigError,
    DataError,
    ExportError,
    InputError,
    ModelError,
    NothingFitsError,
    OutOfMemoryError,
    OutputError,
    ProbeError,
    Problem,
    WriteError,
)

if TYPE_CHECKING:
    __version__: str
    from brim.api.compare import compare
    from brim.api.compare_results import CompareResult
    from brim.api.memory import predict_memory
    from brim.api.model import Model
    from brim.api.plan import plan
    from brim.api.results import EvaluateResult, ExportResult, PredictResult, TrainResult
    from brim.api.resume_proof import ResumeProof
    from brim.api.upload import UploadResult
    from brim.api.verify_resume import verify_resume
    from brim.batching.adaptive_step import AdaptiveStep
    from brim.batching.finder import Found, find_batch_size
    from brim.batching.probe import Probe
    from brim.batching.prober import Prober
    from brim.memory.prediction import MemoryPrediction
    from brim.planning.plan import TrainingPlan
    from brim.train.observer import Observer

__all__ = [
    "AdaptiveStep",
    "BrimError",
    "CheckpointError",
    "CompareResult",
    "ConfigError",
    "DataError",
    "EvaluateResult",
    "ExportError",
    "ExportResult",
    "Found",
    "InputError",
    "MemoryPrediction",
    "Model",
    "ModelError",
    "NothingFitsError",
    "Observer",
    "OutOfMemoryError",
    "OutputError",
    "PredictResult",
    "Probe",
    "ProbeError",
    "Prober",
    "Problem",
    "ResumeProof",
    "TrainResult",
    "TrainingPlan",
    "UploadResult",
    "WriteError",
    "compare",
    "find_batch_size",
    "plan",
    "predict_memory",
    "verify_resume",
]

_LAZY = {
    "AdaptiveStep": "brim.batching.adaptive_step",
    "CompareResult": "brim.api.compare_results",
    "compare": "brim.api.compare",
    "MemoryPrediction": "brim.memory.prediction",
    "Model": "brim.api.model",
    "EvaluateResult": "brim.api.results",
    "ExportResult": "brim.api.results",
    "PredictResult": "brim.api.results",
    "ResumeProof": "brim.api.resume_proof",
    "TrainResult": "brim.api.results",
    "TrainingPlan": "brim.planning.plan",
    "Observer": "brim.train.observer",
    "UploadResult": "brim.api.upload",
    "Found": "brim.batching.finder",
    "Probe": "brim.batching.probe",
    "Prober": "brim.batching.prober",
    "find_batch_size": "brim.batching.finder",
    "plan": "brim.api.plan",
    "predict_memory": "brim.api.memory",
    "verify_resume": "brim.api.verify_resume",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch only when it is asked for, so that `import brim` and `brim --help` stay quick."""
    if name == "__version__":
        return _version()
    if name not in _LAZY:
        raise AttributeError(f"module 'brim' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def _version() -> str:
    """Return the installed version; 0+unknown where brim runs from its source without being installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("brim")
    except PackageNotFoundError:
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted(__all__)
