"""What brim calls of vLLM, with its names and types; it writes the tokens of a function of ours.

As of vLLM 0.17: EngineArgs, LLMEngine.from_engine_args, add_request, step; SamplingParams; LoRARequest; RequestOutput;
AdapterLogitsProcessor, named by module and class.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import torch

RequestOutputKind = Enum("RequestOutputKind", ["CUMULATIVE", "DELTA", "FINAL_ONLY"])


@dataclass(kw_only=True)
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    extra_args: dict[str, Any] | None = None


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass(kw_only=True)
class EngineArgs:
    model: str
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    dtype: str = "auto"
    seed: int = 0
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    generation_config: str = "auto"
    disable_log_stats: bool = False
    enable_lora: bool = False
    max_lora_rank: int = 16
    logits_processors: list[str] | None = None
    async_scheduling: bool | None = None


class AdapterLogitsProcessor(ABC):
    """vLLM's own, but for the batch that it keeps: a request's processor takes the tokens so far, and its scores."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Any] = {}

    @abstractmethod
    def is_argmax_invariant(self) -> bool: ...

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> Any: ...


VOCABULARY = 1000


def install(monkeypatch: Any, write: Any, *, rows: int = 4) -> SimpleNamespace:
    """Put the fake in vLLM's place. write(prompt, params): the tokens of a response. rows: of a step.

    Returns the engines that were made, and what goes wrong with the next.
    """
    engines = SimpleNamespace(made=[], fails_at_start=None, fails_at_step=None)

    class LLMEngine:
        def __init__(self, args):
            self.args, self.submitted, self._in, self.most_in = args, [], {}, 0
            self._processors = [
                _loaded(name)(None, torch.device("cpu"), False) for name in args.logits_processors or ()
            ]

        @classmethod
        def from_engine_args(cls, args):
            if engines.fails_at_start is not None:
                raise engines.fails_at_start
            engines.made.append(cls(args))
            return engines.made[-1]

        def add_request(self, request_id, prompt, params, arrival_time=None, lora_request=None):
            self.submitted.append((request_id, prompt, params, lora_request))
            made = [each.new_req_logits_processor(params) for each in self._processors]
            self._in[request_id] = [prompt["prompt_token_ids"], params, [], [each for each in made if each]]
            self.most_in = max(self.most_in, len(self._in))

        def step(self):
            """One token for each of the first rows."""
            if engines.fails_at_step is not None:
                raise engines.fails_at_step
            outputs = []
            for request_id in list(self._in)[:rows]:
                prompt, params, tokens, processors = self._in[request_id]
                tokens.append(_chosen(write(prompt, params)[len(tokens)], tokens, processors))
                stops = tokens[-1] in params.stop_token_ids
                reason = "stop" if stops else "length" if len(tokens) == params.max_tokens else None
                if reason:
                    del self._in[request_id]
                    completion = SimpleNamespace(index=0, text="", token_ids=tuple(tokens), finish_reason=reason)
                    outputs.append(SimpleNamespace(request_id=request_id, outputs=[completion], finished=True))
            return outputs

    engine = {"EngineArgs": EngineArgs, "LLMEngine": LLMEngine, "SamplingParams": SamplingParams}
    modules = {
        "vllm": {**engine, "__spec__": ModuleSpec("vllm", None)},
        "vllm.sampling_params": {"RequestOutputKind": RequestOutputKind},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": LoRARequest},
        "vllm.v1.sample.logits_processor": {"AdapterLogitsProcessor": AdapterLogitsProcessor},
    }
    for name, contents in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**contents))
    return engines


def _loaded(name: str) -> Any:
    module, _, qualified = name.partition(":")
    return getattr(importlib.import_module(module), qualified)


def _chosen(wanted: int, tokens: list[int], processors: list[Any]) -> int:
    """The likeliest token, where all are less likely the farther they are from the wanted one."""
    scores = -(torch.arange(float(VOCABULARY)) - wanted).abs()
    for process in processors:
        scores = process(tokens, scores)
    return int(scores.argmax())
