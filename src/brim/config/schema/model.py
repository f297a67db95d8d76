"""Declare the sections about the model, what it generates, and the machine.

- `model_parameters`: how the base model is set up.
- `adapter`: train a few added weights instead of all.
- `quantization`: the base model's linear layers in 4 or 8 bits.
- `backend`: where the run takes place.
- `memory`: how much of the device a run may take.
- `generation`: how text is generated, with keys and meaning of transformers' GenerationConfig.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field, Strict
from pydantic_core import PydanticCustomError

from brim.config.schema.base import (
    Fraction,
    Items,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
    Short,
    Text,
    key,
    required,
)
from brim.errors import ConfigError
from brim.units import parse_bytes


class AdapterPostprocessor(Section):
    """The adapter is processed so after training."""

    merge_adapter_into_base_model: bool = key(
        False, "Add the adapter to the base model's weights. `true` is not supported yet."
    )
    progressbar: bool = key(False, "Show a progress bar while merging.")


class LoraConfig(Section):
    """Low-rank adapters (LoRA) are trained, through PEFT."""

    type: Literal["lora"] = required("The kind of adapter. `adapter: lora` is short for `{type: lora}`.")
    r: PositiveInt = key(8, "The rank of the added matrices.")
    alpha: PositiveInt | None = key(None, "The scale: the update is multiplied by alpha / r. null: 2 r.")
    dropout: Annotated[float, Field(ge=0, lt=1)] = key(0.05, "Dropout on the adapter's input while training.")
    bias_type: Literal["none", "all", "lora_only"] = key("none", "Which biases are trained.")
    target_modules: Items[Text] | Text | None = key(
        None,
        "The layers that get an adapter: their names, a regular expression, or `all-linear`. null: PEFT's choice for "
        "the architecture.",
        expected="a list of layer names, a regular expression, all-linear, or null",
    )
    use_rslora: bool = key(False, "Scale by alpha / sqrt(r) (rsLoRA).")
    use_dora: bool = key(False, "Learn magnitude and direction apart (DoRA).")
    init_lora_weights: Literal["default", "gaussian"] | Literal[True] = key(
        "default",
        "How the added matrices start: `default` (or `true`) is PEFT's, `gaussian` draws the first from a normal "
        "distribution.",
        expected="default, gaussian or true",
    )
    pretrained_adapter_weights: Text | None = key(
        None,
        "A folder or Hub id with an adapter to go on from. Its own r, alpha, dropout, bias_type, target_modules, "
        "use_rslora and use_dora count; where one is given here, it must be the same. null: a new adapter.",
    )
    postprocessor: AdapterPostprocessor = key(AdapterPostprocessor(), "What happens to the adapter after training.")


class BackendTrainer(Section):
    """Training is divided among several GPUs so."""

    strategy: Literal["auto", "ddp", "fsdp"] = key(
        "auto",
        "What each GPU holds: the whole model (`ddp`) or its share of it (`fsdp`). `auto`: what the plan finds best.",
    )
    num_workers: PositiveInt | None = key(
        None,
        "GPUs of this machine, each with a process; on a CPU, processes. null: one. `brim train --gpus` wins, and so "
        "does a launcher such as torchrun. With `type: ray`: actors that predict; null: as many as the cluster has "
        "GPUs, or on CPUs machines.",
    )
    dealing: Literal["planned", "claimed"] = key(
        "planned",
        "Which GPU computes which micro-batch of a step: as foretold (`planned`: the same GPUs, the same bits), or the "
        "one that is free takes the next (`claimed`: for cards of several kinds, or shared ones; with `ddp`). What is "
        "learned is the same but for rounding.",
        brim=True,
    )


class BackendConfig(Section):
    """The run takes place here."""

    type: Literal["local", "ray"] = key(
        "local",
        "`local`: this machine, and those of a launcher. `ray`, for `brim predict` and `brim evaluate`: the Ray "
        "cluster that RAY_ADDRESS names, or one that is begun on this machine. `backend: local` is short for "
        "`{type: local}`.",
    )
    trainer: BackendTrainer = key(BackendTrainer(), "Training on several GPUs.")

    def require_local(self) -> None:
        """Raise ConfigError for a Ray cluster, by which rows are predicted and evaluated, not trained on."""
        if self.type == "ray":
            raise ConfigError(
                what="brim does not train on a Ray cluster",
                where="backend.type",
                expected="local",
                fix="set it to local: `brim train --gpus N` on one machine, torchrun on several, and on Kubernetes a "
                "TrainJob or JobSet (docs/several-gpus.md)",
            )


BackendField: TypeAlias = Annotated[BackendConfig, Short(types=("local", "ray"), default="local")]


TokenIds: TypeAlias = Items[NonNegativeInt]


_IDS = "a list of token ids, or null"


class GenerationConfig(Section):
    """Text is generated by these keys. Defaults are Ludwig's, not the base model's."""

    engine: Literal["auto", "slots", "static", "vllm"] = key(
        "auto",
        "What writes the answers: `slots` is brim's own (rows that end leave, waiting ones take their place), `static` "
        "transformers' `generate` in batches that stay together, `vllm` an installed vLLM on a GPU. `auto`: for "
        "`brim predict`, `vllm` on a GPU that has it; else `slots`; `static` where neither can generate what is asked, "
        "see docs/engines.md.",
        brim=True,
    )
    merge_adapter: bool | Literal["auto"] = key(
        "auto",
        "Compute with the adapter in the base's weights while answers are generated; afterwards they are as before, to "
        "the bit. `auto`: where it pays, fits into memory and moves predictions by no more than an export may, see "
        "docs/engines.md.",
        brim=True,
    )
    max_new_tokens: PositiveInt | None = key(
        None,
        "Most tokens of an answer. null: the output feature's max_sequence_length, else global_max_sequence_length, "
        "else 256 (Ludwig: 32). Of a category with `trainer.type: finetune`, unless its feature has a length: its "
        "longest label and the end.",
    )
    min_new_tokens: NonNegativeInt | None = key(None, "Fewest tokens of an answer.")
    max_time: Annotated[float, Field(gt=0)] | None = key(None, "Seconds after which a batch's generation ends.")
    do_sample: bool = key(True, "Draw tokens by their probability; `false` takes the likeliest.")
    temperature: NonNegativeFloat = key(0.1, "Divides the scores before sampling: lower is less varied.")
    top_k: PositiveInt | None = key(50, "Sample from this many of the likeliest tokens. null: all.")
    top_p: Fraction = key(1.0, "Sample from the likeliest tokens that make up this probability together.")
    typical_p: Annotated[float, Field(gt=0, le=1)] = key(
        1.0, "Sample from the most typical tokens that make up this probability together."
    )
    epsilon_cutoff: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0, "Drop tokens that are less probable than this. 0: off."
    )
    eta_cutoff: Annotated[float, Field(ge=0, lt=1)] = key(0.0, "Drop tokens by eta sampling. 0: off.")
    num_beams: PositiveInt = key(1, "Beams of a beam search. 1: none.")
    early_stopping: bool | Literal["never"] = key(
        False,
        "When a beam search ends: `true` at enough candidates, `never` when none can be better.",
        expected="true, false or never",
    )
    length_penalty: float = key(1.0, "Above 0, a beam search prefers long answers; below, short ones.")
    repetition_penalty: Annotated[float, Field(gt=0)] = key(1.0, "Above 1, tokens that occurred become less likely.")
    encoder_repetition_penalty: Annotated[float, Field(gt=0)] = key(
        1.0, "Above 1, tokens that are not in the prompt become less likely."
    )
    no_repeat_ngram_size: NonNegativeInt = key(0, "No run of this many tokens occurs twice. 0: off.")
    bad_words_ids: Items[TokenIds] | None = key(
        None, "Token sequences that are not generated.", expected="a list of lists of token ids, or null"
    )
    suppress_tokens: TokenIds | None = key(None, "Tokens that are not generated.", expected=_IDS)
    begin_suppress_tokens: TokenIds | None = key(None, "Tokens that do not begin an answer.", expected=_IDS)
    forced_bos_token_id: NonNegativeInt | None = key(None, "The token that every answer begins with.")
    forced_eos_token_id: NonNegativeInt | TokenIds | None = key(
        None, "The token that ends an answer of the longest allowed length.", expected=f"a token id, {_IDS}"
    )
    sequence_bias: Items[Annotated[tuple[TokenIds, float], Strict(False)]] | None = key(
        None,
        "Added to the scores of token sequences.",
        expected="a list of pairs, token ids and a number, such as [[[12, 7], -1.5]], or null",
    )
    exponential_decay_length_penalty: Annotated[tuple[NonNegativeInt, float], Strict(False)] | None = key(
        None,
        "From this many tokens on, the end becomes likelier by this factor at each token.",
        expected="a whole number and a number, such as [100, 1.05], or null",
    )
    guidance_scale: Annotated[float, Field(ge=1)] | None = key(
        None, "Above 1, the prompt weighs more (classifier-free guidance)."
    )
    renormalize_logits: bool = key(False, "Normalise the scores after all changes to them.")
    remove_invalid_values: bool = key(False, "Replace NaN and infinite scores.")
    prompt_lookup_num_tokens: PositiveInt | None = key(
        None, "Propose this many tokens at once from matching places in the prompt. One row at a time."
    )
    use_cache: bool = key(True, "Keep keys and values of earlier tokens: faster, more memory.")
    pad_token_id: NonNegativeInt | None = key(None, "The padding token. null: the tokenizer's.")
    bos_token_id: NonNegativeInt | None = key(None, "The token that begins a text. null: the tokenizer's.")
    eos_token_id: NonNegativeInt | TokenIds | None = key(
        None, "The token that ends an answer. null: the tokenizer's.", expected=f"a token id, {_IDS}"
    )


_BUDGET = "auto, a size with its unit such as 14 GiB, or a share of the device above 0 and up to 1 such as 0.9"


_MARGIN = "auto, a size with its unit such as 500 MiB, or a share of the budget of at least 0 and below 1 such as 0.05"


_MOST_GIB = 4096  # a bare number up to here is meant in GiB or MiB, one above in bytes


MOST_BYTES = 2**60


def _budget(value: float | str) -> float | str:
    _require_bytes_or_share(value)
    if value != "auto" and (value <= 0 if isinstance(value, float) else parse_bytes(value) == 0):
        raise _refused("leave it out, or say how much the run may take")
    return value


def _margin(value: float | str) -> float | str:
    _require_bytes_or_share(value)
    if value == 1.0:
        raise _refused("nothing would be left; set 0.05 to leave a twentieth free")
    return value


def _require_bytes_or_share(value: float | str) -> None:
    if isinstance(value, float):
        if not 0 <= value <= 1:
            raise _refused(_with_unit(value) if value > 1 else "")
    elif value != "auto":
        try:
            num_bytes = parse_bytes(value)
        except ValueError:
            raise _refused(_meant(value)) from None
        if num_bytes > MOST_BYTES:
            raise _refused("no device has so much memory")


def _with_unit(number: float) -> str:
    """Return what a bare number above 1 may be meant as."""
    if number <= _MOST_GIB:
        more = f", or {number / 100:g} for the share" if 2 <= number <= 100 else ""
        return f"write the unit: {number:g} GiB or {number:g} MiB{more}"
    return f"write the unit: {number:.0f} B" if number <= MOST_BYTES else ""


def _meant(text: str) -> str:
    bare = text.strip().removesuffix("%").strip()
    try:
        number = float(bare)
    except ValueError:
        return ""
    if text.strip().endswith("%"):
        return f"write {number / 100:g}" if 0 <= number <= 100 else ""
    return f"write {number:g} without quotes" if 0 <= number <= 1 else _with_unit(number) if number > 1 else ""


def _refused(fix: str) -> PydanticCustomError:
    return PydanticCustomError("amount", "not an amount of memory", {"fix": fix})


BudgetValue: TypeAlias = Annotated[Literal["auto"] | float | str, AfterValidator(_budget)]


MarginValue: TypeAlias = Annotated[Literal["auto"] | float | str, AfterValidator(_margin)]


class MemoryConfig(Section):
    """A run may take this much of the device. Memory decides how a batch is partitioned, never what is learned."""

    budget: BudgetValue = key(
        "auto",
        "What the run may take in all, with what lies outside PyTorch. `auto`: all that is free on the device when the "
        "run starts; for a device that is not at hand, all that it has.",
        brim=True,
        expected=_BUDGET,
    )
    margin: MarginValue = key(
        "auto",
        "What of the budget is left free, since a prediction can be off. `auto`: chosen by what was measured on the "
        "device before, and more where nothing was.",
        brim=True,
        expected=_MARGIN,
    )
    offload: Literal["none", "weights", "optimizer"] = key(
        "none",
        "`weights`: while a model is trained, its weights, gradients and the optimizer's states lie in the host's "
        "memory, and each decoder layer is copied to the GPU to compute (FSDP2, on one GPU, too). The optimizer's step "
        "runs on the CPU. It is far slower, and for what fits in no other way. `optimizer`: its states alone lie "
        "there, and its step runs on the CPU, on copies of what trains: gradients and new weights are copied once a "
        "step.",
        brim=True,
    )


class ModelParameters(Section):
    """The base model is set up so."""

    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = key(
        "auto",
        "The attention kernel, by transformers' name. `auto`: `sdpa` where the architecture has it, else `eager`. "
        "`flash_attention_2` needs its package.",
        brim=True,
    )
    kernels: Literal["auto", "torch", "liger"] = key(
        "auto",
        "What norms, gated MLPs and rotary embeddings compute by in training. `liger`: the Triton kernels of the "
        "package liger-kernel (`pip install 'brim[liger]'`), the same but for rounding, with less in memory, on a GPU "
        "of compute capability 8.0 or more. `auto`: `liger` where they are installed and agree with PyTorch's "
        "operators in a trial on the device, else `torch`.",
        brim=True,
    )


class QuantizationConfig(Section):
    """The base model's linear layers are quantised, through bitsandbytes. They stay frozen: training needs an adapter.

    Embeddings, norms and the output layer are not quantised; `precision` says which data type they have.
    """

    backend: Literal["bitsandbytes"] = key(
        "bitsandbytes", "The library that quantises. `torchao` is not supported yet."
    )
    bits: Literal[4, 8] = key(
        4,
        "Of a weight. 4: NF4 or FP4 (QLoRA), dequantised where it is used. 8: LLM.int8, which on a GPU quantises the "
        "activations, too.",
    )
    llm_int8_threshold: NonNegativeFloat = key(
        6.0,
        "Columns of the activations with a value from here on are computed in 16 bits. 0: none. Of 8 bits, on a GPU.",
    )
    llm_int8_has_fp16_weight: Literal[False] = key(
        False, "`true` would keep 16-bit weights and quantise them at each use; not supported yet. Of 8 bits."
    )
    bnb_4bit_compute_dtype: Literal["auto", "float32", "float16", "bfloat16"] = key(
        "auto",
        "The data type in which dequantised weights are multiplied. `auto`: that of `precision`. Ludwig's default is "
        "`float16`. Of 4 bits.",
    )
    bnb_4bit_use_double_quant: bool = key(True, "Quantise the scales, too: 0.37 bits less for each weight. Of 4 bits.")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = key("nf4", "The 4-bit numbers: `nf4` or `fp4`. Of 4 bits.")

    @property
    def keys_without_effect(self) -> list[str]:
        """Return the keys that are set for the other number of bits."""
        others, untouched = ("llm_int8_" if self.bits == 4 else "bnb_4bit_"), type(self)()
        names = [name for name in type(self).model_fields if name.startswith(others)]
        return [name for name in names if getattr(self, name) != getattr(untouched, name)]
