"""Declare the whole configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from brim.config.schema.base import Items, Section, Short, Text, key, required
from brim.config.schema.data import ChatConfig, InputFeature, OutputFeature, PreprocessingConfig, PromptConfig
from brim.config.schema.model import (
    BackendConfig,
    BackendField,
    GenerationConfig,
    LoraConfig,
    MemoryConfig,
    ModelParameters,
    QuantizationConfig,
)
from brim.config.schema.trainer import FinetuneTrainer, NoTrainer, TrainerField


class Config(Section):
    """The configuration has these keys at its root."""

    model_type: Literal["llm"] = key("llm", "The kind of model. Ludwig's default is `ecd`, brim's `llm`.")
    base_model: Text = required("A folder with a transformers causal language model, or its Hub id.")
    initialize: Literal["pretrained", "random"] = key(
        "pretrained", "`random` starts from new weights: only config.json and the tokenizer are read.", brim=True
    )
    precision: Literal["auto", "fp32", "bf16-true", "bf16-mixed", "fp16-mixed"] = key(
        "auto",
        "The data types of weights and arithmetic, named as in Lightning. `auto`: fp32 on a CPU; on a GPU with "
        "bfloat16 bf16-true with an adapter (bf16-mixed where that trains biases) and bf16-mixed without; on other "
        "GPUs fp16-mixed.",
        brim=True,
    )
    model_parameters: ModelParameters = key(ModelParameters(), "How the base model is set up.")
    input_features: Annotated[tuple[InputFeature, ...], Field(strict=False, min_length=1)] = key(
        (InputFeature(name="prompt", type="text"),),
        "What the model reads. Ludwig requires it, and exactly one; brim's default is the column `prompt`. Several are "
        "put together by `prompt.template`; without one, a line each: `name: value`.",
        expected="a list with at least one feature",
    )
    output_features: Annotated[tuple[OutputFeature], Field(strict=False)] = key(
        (OutputFeature(name="completion", type="text"),),
        "What the model learns to write: exactly one feature, a text or a category. Ludwig requires it; brim's default "
        "is the column `completion`.",
        expected="a list with exactly one text or category feature",
    )
    prompt: PromptConfig = key(PromptConfig(), "How a row becomes the text that the model reads.")
    chat: ChatConfig | None = key(
        None,
        "Conversations instead of prompts and answers: `{}` with all defaults. Not together with `input_features`, "
        "`output_features` and `prompt`.",
        brim=True,
        expected="{} for all defaults, a mapping such as {messages: COLUMN}, or null",
    )
    adapter: Annotated[LoraConfig | None, Short(types=("lora",))] = key(
        None, "Train a few added weights instead of all. null: all weights are trained."
    )
    quantization: QuantizationConfig | None = key(
        None, "Load the base model's linear layers in 4 or 8 bits. null: as they are stored, or as `precision` says."
    )
    trainer: TrainerField = key(NoTrainer(), "Whether and how the model is trained.")
    preprocessing: PreprocessingConfig = key(
        PreprocessingConfig(), "Which rows are used, and how they are cut and split."
    )
    generation: GenerationConfig = key(GenerationConfig(), "How text is generated.")
    memory: MemoryConfig = key(MemoryConfig(), "How much of the device the run may take.", brim=True)
    backend: BackendField = key(BackendConfig(), "Where the run takes place.")
    dataset: Text | Items[Text] | None = key(
        None,
        "The data: a file or a saved `datasets` folder; or several in a list. `*` and `?` in a name make it a glob. "
        "The rows of several files follow each other in their order, those of a glob in alphabetical order.",
        brim=True,
        expected="text, a list of texts, or null",
    )
    random_seed: Annotated[int, Field(ge=0, lt=2**32)] = key(42, "The seed of everything that is drawn by chance.")
    trust_remote_code: bool = key(False, "Run Python code that comes with the base model. Only for models you trust.")

    @property
    def finetune_trainer(self) -> FinetuneTrainer:
        """Return the trainer of a configuration that trains."""
        assert isinstance(self.trainer, FinetuneTrainer), "nothing is trained"
        return self.trainer

    @property
    def trained_adapter(self) -> str | None:
        """Return the folder or Hub id of the adapter whose trained weights are taken; None where there is none."""
        return None if self.adapter is None else self.adapter.pretrained_adapter_weights

    @property
    def answer_name(self) -> str:
        """Return the name of what the model writes: the output feature or, with `chat`, the assistant."""
        return self.output_features[0].name if self.chat is None else "assistant"
