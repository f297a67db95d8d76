"""`adapter`: train a few added weights instead of all."""

from typing import Annotated, Literal

from pydantic import Field

from brim.config.schema.base import Items, PositiveInt, Section, Text, key, required


class AdapterPostprocessor(Section):
    """What happens to the adapter after training."""

    merge_adapter_into_base_model: bool = key(
        False, "Add the adapter to the base model's weights. `true` is not supported yet."
    )
    progressbar: bool = key(False, "Show a progress bar while merging.")


class LoraConfig(Section):
    """Low-rank adapters (LoRA), through PEFT."""

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
