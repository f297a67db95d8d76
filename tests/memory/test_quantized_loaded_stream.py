"""Loading put into a recorded stream."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from brim.config.schema import QuantizationConfig
from brim.memory.bitsandbytes import LoadedTensor, loaded_tensors, of_all_layers, quantize_stand_in, with_loading
from brim.memory.bitsandbytes.loading import base_path
from brim.memory.trace import EventStream, Place

FOUR = QuantizationConfig(bits=4, bnb_4bit_compute_dtype="bfloat16")


def llama(num_layers: int, settings: QuantizationConfig | None) -> Any:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=172, num_hidden_layers=num_layers, num_attention_heads=4, vocab_size=100
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if settings is not None:
        quantize_stand_in(model, settings)
    return model


def recorded(model: Any) -> EventStream:
    """A load in the model's order, then a forward pass that gives birth and death to one storage."""
    stream = EventStream()
    stream.mark("load")
    for name, module in model.named_modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                stream.birth(tensor.nbytes, "weights", Place(phase="load", module=name))
    stream.mark("step 1")
    stream.death(stream.birth(7, "activations", Place(phase="forward")), Place(phase="forward"))
    stream.mark("end")
    return stream


def named(stream: EventStream) -> list[tuple[str, int]]:
    """Module and bytes of each event; a death has negative bytes."""
    return [
        (place.module, stream.sizes[storage] if storage >= 0 else -stream.sizes[~storage])
        for storage, place in zip(stream.storages, stream.places, strict=True)
    ]


@pytest.mark.parametrize("settings", [FOUR, None])
def test_the_weights_come_in_loadings_order_and_the_rest_after_them(settings: QuantizationConfig | None) -> None:
    base = llama(2, settings)
    tensors = loaded_tensors(base, arriving_bytes=2 if settings else None)
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))
    before = recorded(adapted)
    after = with_loading(before, tensors, "quantized" if settings else "moved")
    positions = {label: position for position, label in after.marks}
    load = named(after)[positions["load"] : positions["step 1"]]
    expected = sorted(named(before)[: {label: at for at, label in before.marks}["step 1"]])
    alive = {storage for storage in after.storages[: positions["step 1"]] if storage >= 0}
    alive -= {~storage for storage in after.storages if storage < 0}
    assert alive == set(range(len(expected)))  # the storages of before, each once
    assert [module.rpartition(".")[0].endswith(("lora_A", "lora_B")) for module, _ in load[-4:]] == [True] * 4
    assert named(after)[positions["step 1"] :] == [("", 7), ("", -7)]
    assert positions["end"] == len(after.storages)
    if settings is None:
        assert sorted(load) == expected


def test_a_tensor_that_the_stream_does_not_load_is_named() -> None:
    missing = LoadedTensor(name="a.weight", num_elements=3, element_bytes=2)
    with pytest.raises(LookupError, match=r"a\.weight, 6 bytes"):
        with_loading(recorded(llama(1, None)), [missing], "moved")


@pytest.mark.parametrize("settings", [FOUR, None])
def test_a_few_layers_tensors_are_expanded_to_all(settings: QuantizationConfig | None) -> None:
    few, all_layers = (loaded_tensors(llama(count, settings)) for count in (2, 5))
    path = "base_model.model.model.layers"
    assert of_all_layers(few, layers_path=path, num_layers=5, template=lambda layer: min(layer, 1)) == all_layers


def test_a_path_in_the_base_model() -> None:
    assert base_path("base_model.model.model.layers.0.mlp.up_proj.base_layer") == "model.layers.0.mlp.up_proj"
    assert base_path("model.norm") == "model.norm"
    assert base_path("base_model.model") == base_path("") == ""
