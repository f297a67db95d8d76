__version__: str

from . import errors as errors
from .batching import AdaptiveStep as AdaptiveStep
from .batching.memory import Probe as Probe, Prober as Prober, find_batch_size as find_batch_size
from .errors import (
    BrimError as BrimError,
    ConfigError as ConfigError,
    DataError as DataError,
    InputError as InputError,
    OutOfMemoryError as OutOfMemoryError,
)
from .memory import MemoryPrediction as MemoryPrediction, predict_memory as predict_memory
from .model import Model as Model
from .planning import TrainingPlan as TrainingPlan
from .train import Observer as Observer
from .workflows.compare import CompareResult as CompareResult, compare as compare
from .workflows.export import UploadResult as UploadResult
from .workflows.runs import (
    EvaluateResult as EvaluateResult,
    ExportResult as ExportResult,
    PredictResult as PredictResult,
    TrainResult as TrainResult,
)
from .workflows.training import plan as plan
from .workflows.verify_resume import ResumeProof as ResumeProof, verify_resume as verify_resume
