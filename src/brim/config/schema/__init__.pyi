from .base import Section as Section, Short as Short
from .data import (
    ChatConfig as ChatConfig,
    FeaturePreprocessing as FeaturePreprocessing,
    FixedSplit as FixedSplit,
    HashSplit as HashSplit,
    InputFeature as InputFeature,
    MatchRule as MatchRule,
    OutputFeature as OutputFeature,
    PreprocessingConfig as PreprocessingConfig,
    PromptConfig as PromptConfig,
    RandomSplit as RandomSplit,
    RetrievalConfig as RetrievalConfig,
)
from .model import (
    GenerationConfig as GenerationConfig,
    LoraConfig as LoraConfig,
    MemoryConfig as MemoryConfig,
    QuantizationConfig as QuantizationConfig,
)
from .optimizer import AdamWConfig as AdamWConfig, OptimizerConfig as OptimizerConfig, SGDConfig as SGDConfig
from .root import Config as Config
from .trainer import (
    FinetuneTrainer as FinetuneTrainer,
    GradientClippingConfig as GradientClippingConfig,
    LearningRateScheduler as LearningRateScheduler,
    NoTrainer as NoTrainer,
)
