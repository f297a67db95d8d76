"""The configuration's sections, as frozen pydantic models with a description for every key."""

from brim.config.schema.adapter import AdapterPostprocessor, LoraConfig
from brim.config.schema.backend import BackendConfig
from brim.config.schema.base import Section
from brim.config.schema.batch_schedule import NoiseScaleAdaptation, RampupConfig
from brim.config.schema.chat import ChatConfig
from brim.config.schema.clipping import GradientClippingConfig
from brim.config.schema.features import FeaturePreprocessing, InputFeature, OutputFeature
from brim.config.schema.generation import GenerationConfig
from brim.config.schema.memory import MemoryConfig
from brim.config.schema.model import ModelParameters
from brim.config.schema.optimizer import AdafactorConfig, AdamConfig, AdamWConfig, OptimizerConfig, SGDConfig
from brim.config.schema.preprocessing import PreprocessingConfig
from brim.config.schema.prompt import PromptConfig, RetrievalConfig
from brim.config.schema.quantization import QuantizationConfig
from brim.config.schema.root import Config
from brim.config.schema.schedule import LearningRateScheduler
from brim.config.schema.split import FixedSplit, HashSplit, RandomSplit, SplitConfig, StratifySplit
from brim.config.schema.trainer import FinetuneTrainer, NoTrainer, TrainerConfig

__all__ = [
    "AdafactorConfig",
    "AdamConfig",
    "AdamWConfig",
    "AdapterPostprocessor",
    "BackendConfig",
    "ChatConfig",
    "Config",
    "FeaturePreprocessing",
    "FinetuneTrainer",
    "FixedSplit",
    "GenerationConfig",
    "GradientClippingConfig",
    "HashSplit",
    "InputFeature",
    "LearningRateScheduler",
    "LoraConfig",
    "MemoryConfig",
    "ModelParameters",
    "NoTrainer",
    "NoiseScaleAdaptation",
    "OptimizerConfig",
    "OutputFeature",
    "PreprocessingConfig",
    "PromptConfig",
    "QuantizationConfig",
    "RampupConfig",
    "RandomSplit",
    "RetrievalConfig",
    "SGDConfig",
    "Section",
    "SplitConfig",
    "StratifySplit",
    "TrainerConfig",
]
