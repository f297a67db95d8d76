"""Generate with an installed vLLM, which loads the weights itself: they must not be on the GPU already.

A LoRA adapter is handed over as its folder. Labels are handed over as their tokens, to a logits processor of brim's own
in vLLM's process: vLLM's structured outputs would need a tokenizer there, and could spell a label in other tokens than
the other engines. Settings that vLLM would not honour are reasons against it.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from brim.batching.memory import is_out_of_memory
from brim.data.tokens import TokenRows
from brim.errors import BrimError, InputError, OutOfMemoryError
from brim.infer.engines.base import Finished, OnFinished, Response, row_seed
from brim.infer.engines.batching import longest_first
from brim.infer.engines.sampling import OFF, LabelConstraint
from brim.models import Precision

_WHERE = "generation.engine: vllm"


_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that it has kernels for


_AHEAD = 1024  # prompts submitted ahead, so that a long list costs no memory


@dataclass(frozen=True, kw_only=True)
class VllmEngine:
    """Generate with vLLM, as an Engine.

    Greedy texts are those of the other engines where the arithmetic is (fp32); what is sampled comes from a seed of the
    row, but not of the same numbers as in the other engines.
    """

    folder: str  # of the model, a local one
    precision: Precision
    device: torch.device
    memory_share: float  # of all that the GPU has: weights, cache and everything else of vLLM
    settings: Mapping[str, Any]  # what `generation_settings` gives
    seed: int
    constraint: LabelConstraint | None = None
    adapter: Path | None = None
    adapter_rank: int = 0
    trust_remote_code: bool = False
    rows: int | None = None  # at once; None: as many as it thinks best
    name: ClassVar[str] = "vllm"

    def __post_init__(self) -> None:
        reason = _why_not(self)
        if reason:
            raise InputError(what=f"vLLM cannot be used: {reason}", where=_WHERE, fix="set generation.engine: auto")
        _import_vllm()
        if self.constraint is not None:
            _label_processor()

    def run(self, prompts: TokenRows, *, on_finished: OnFinished) -> None:
        """Respond as Engine.run does. Raises BrimError where vLLM fails in another way than for lack of memory."""
        with closing(self._batches(prompts)) as batches:
            for finished in batches:
                on_finished(finished)

    def _batches(self, prompts: TokenRows) -> Generator[list[Finished], None, None]:
        """Yield what ends at each step. What the caller raises between two steps does not pass through here."""
        if not len(prompts):
            return
        longest = int(prompts.lengths.max()) + int(self.settings["max_new_tokens"])
        with _explained(), _started(self, longest) as engine:
            waiting, num_in = iter(longest_first(prompts).tolist()), 0
            while True:
                for position in islice(waiting, _AHEAD - num_in):
                    self._submit(engine, prompts, position)
                    num_in += 1
                if not num_in:
                    return
                finished = [_finished(output) for output in engine.step() if output.finished]
                num_in -= len(finished)
                if finished:
                    yield finished

    def _submit(self, engine: Any, prompts: TokenRows, position: int) -> None:
        row = prompts[position]
        engine.add_request(
            str(position),
            {"prompt_token_ids": row.input_ids.tolist()},
            _sampling(self.settings, seed=row_seed(self.seed, row.key), constraint=self.constraint),
            lora_request=_lora(self),
        )


def _finished(output: Any) -> Finished:
    completion = output.outputs[0]
    response = Response(token_ids=list(completion.token_ids), finish_reason="length")
    if completion.finish_reason == "stop":
        *token_ids, end_id = completion.token_ids
        response = Response(token_ids=token_ids, finish_reason="stop", end_id=end_id)
    return Finished(position=int(output.request_id), response=response)


def _sampling(settings: Mapping[str, Any], *, seed: int, constraint: LabelConstraint | None) -> Any:
    """Return settings of one row. Only the ids in `settings` end a response, not those in the model's files."""
    vllm = _import_vllm()
    from vllm.sampling_params import RequestOutputKind

    drawn, shape = bool(settings.get("do_sample")), {}
    if drawn:
        shape = {"top_k": settings.get("top_k", 0) or -1, "top_p": settings.get("top_p", 1.0), "seed": seed}
    if constraint is not None:
        shape["extra_args"] = {_LABELS: [list(form) for form in constraint.forms], _ENDS: list(constraint.end_ids)}
    return vllm.SamplingParams(
        temperature=settings.get("temperature", 1.0) if drawn else 0.0,
        repetition_penalty=settings.get("repetition_penalty", 1.0),
        max_tokens=settings["max_new_tokens"],
        min_tokens=settings.get("min_new_tokens", 0),
        stop_token_ids=list(settings["eos_token_id"]),
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **shape,
    )


def _lora(given: VllmEngine) -> Any:
    if given.adapter is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, str(given.adapter))


@contextmanager
def _started(given: VllmEngine, max_model_len: int) -> Iterator[Any]:
    vllm = _import_vllm()
    arguments: dict[str, Any] = {
        "model": given.folder,
        "skip_tokenizer_init": True,
        "trust_remote_code": given.trust_remote_code,
        "dtype": "float32" if given.precision.name == "fp32" else "bfloat16",
        "seed": given.seed,
        "gpu_memory_utilization": given.memory_share,
        "max_model_len": max_model_len,
        "generation_config": "vllm",  # the model's own defaults are not ours
        "disable_log_stats": True,
    }
    if given.rows is not None:
        arguments["max_num_seqs"] = given.rows
    if given.adapter is not None:
        rank = next(rank for rank in _LORA_RANKS if rank >= given.adapter_rank)
        arguments |= {"enable_lora": True, "max_lora_rank": rank}
    if given.constraint is not None:
        # A step that is scheduled before the last one has ended does not know that one's tokens.
        arguments |= {"logits_processors": [f"{__name__}:{_PROCESSOR}"], "async_scheduling": False}
    engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
    try:
        yield engine
    finally:
        del engine  # ends its process
        gc.collect()


@contextmanager
def _explained() -> Iterator[None]:
    """Raise what vLLM raises as errors of brim."""
    try:
        yield
    except Exception as error:
        message = " ".join(str(error).split())
        fix = "raise memory.budget, lower generation.max_new_tokens, or set generation.engine: slots"
        # vLLM has words of its own for a cache that does not fit beside the weights.
        if is_out_of_memory(error) or "KV cache" in message or "cache blocks" in message:
            raise OutOfMemoryError(what=f"vLLM has too little memory: {message}", where=_WHERE, fix=fix) from error
        raise BrimError(what=f"vLLM failed: {message}", where=_WHERE, fix="set generation.engine: slots") from error


def _import_vllm() -> Any:
    try:
        import vllm
    except Exception as error:  # whatever its extensions raise where they do not fit this torch
        raise InputError(
            what=f"vLLM cannot be imported: {error}",
            where=_WHERE,
            fix="pip install 'brim[vllm]', or set generation.engine: auto",
        ) from error
    return vllm


_HONOURED = {
    "max_new_tokens",
    "min_new_tokens",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
}


def _why_not(given: VllmEngine) -> str:
    """Return the reason against vLLM, or an empty text."""
    if given.device.type != "cuda":
        return f"it is for a CUDA GPU, and the device is {given.device.type}"
    if given.precision.autocast_dtype is not None:
        return f"precision is {given.precision.name}, and it has no mixed one (bf16-true or fp32 would do)"
    if given.adapter is not None and given.precision.name == "fp32":
        return "precision is fp32, and it computes adapters in 16 bits alone (bf16-true would do)"
    if given.adapter_rank > _LORA_RANKS[-1]:
        return f"the adapter's rank is {given.adapter_rank:,}, and it goes up to {_LORA_RANKS[-1]}"
    if given.constraint is not None and given.settings.get("min_new_tokens"):
        return "generation.min_new_tokens may exclude the end of a label, which it does not notice"
    for name, value in given.settings.items():
        if name not in _HONOURED and value != {**OFF, "num_beams": 1, "use_cache": True}.get(name):
            return f"generation.{name} is not passed on to it"
    return ""


# Labels


_LABELS, _ENDS = "brim_labels", "brim_ends"  # names in the arguments of a request


_PROCESSOR = "LabelProcessor"


def __getattr__(name: str) -> Any:
    """Return the class that vLLM's process looks up here by name; it is made of one of vLLM's."""
    if name == _PROCESSOR:
        return _label_processor()
    raise AttributeError(name)


@cache
def _label_processor() -> Any:
    try:
        from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
    except ImportError as error:
        raise InputError(
            what=f"vLLM cannot be used: responses are limited to labels, for which this version is too old ({error})",
            where=_WHERE,
            fix="pip install --upgrade vllm, or set generation.engine: auto",
        ) from error

    class LabelProcessor(AdapterLogitsProcessor):  # type: ignore[misc]  # vLLM's class is not known here
        """Leave each request only the tokens that its labels allow, as LabelConstraint does in the other engines."""

        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            labels = (params.extra_args or {}).get(_LABELS)
            if labels is None:
                return None
            constraint = LabelConstraint({"": labels}, end_ids=params.extra_args[_ENDS])

            def only(generated: Sequence[int], scores: Tensor) -> Tensor:
                allowed = list(constraint.allowed(generated))
                kept = scores[allowed]
                scores.fill_(-torch.inf)
                scores[allowed] = kept
                return scores

            return only

    return LabelProcessor
