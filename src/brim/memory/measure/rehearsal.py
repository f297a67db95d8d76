"""The same work on a tiny model first: what is imported and set up at first use is then there before anything counts.

On a CPU it would stand in the first phase that happens to need it: transformers' and PEFT's modules, the compiler that
PyTorch's optimizers import, thread pools, kernels that are generated. Together they came to 180 MB beside a model of
120 kB. The GPU's memory has none of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from brim.config import Config
from brim.memory.measure.request import Request
from brim.memory.measure.result import PhasePeak
from brim.memory.prediction import Phase

_TOKENS = 8
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 0,
}


class NoMeter:
    """Reads nothing."""

    kind = "cpu"
    baseline_bytes = 0

    def begin(self) -> None: ...

    def peak(self, phase: Phase, step: int | None = None) -> PhasePeak:
        return PhasePeak(
            phase=phase,
            step=step,
            allocated_bytes=None,
            reserved_bytes=None,
            outside_bytes=None,
            total_bytes=0,
            end_bytes=0,
            baseline_bytes=0,
        )


@contextmanager
def tiny(request: Request) -> Iterator[Request]:
    """The same phases, one step of each, on a Llama of 20,000 random weights."""
    _import_architecture(request)
    with TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(_LLAMA), encoding="utf-8")
        folder = replace(
            request.folder, path=Path(name), name=name, config=_LLAMA, context_length=64, has_weights=False
        )
        yield replace(
            request,
            config=_on_any_model(request.config),
            folder=folder,
            batch_size=1,
            sequence_length=_TOKENS,
            step_lengths=((_TOKENS,),),
            num_steps=1,
            records=False,
            snapshot=None,
            looks_for_leaks=False,
        )


def _import_architecture(request: Request) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = AutoConfig.from_pretrained(request.folder.name, trust_remote_code=request.config.trust_remote_code)
    _ = AutoModelForCausalLM._model_mapping.get(type(architecture), None)


def _on_any_model(config: Config) -> Config:
    adapter = config.adapter
    if adapter is not None:
        adapter = adapter.model_copy(update={"target_modules": "all-linear", "pretrained_adapter_weights": None})
    generation = config.generation.model_copy(update={"max_new_tokens": 2})
    return config.model_copy(
        update={"initialize": "random", "quantization": None, "adapter": adapter, "generation": generation}
    )
