"""Generate with transformers' continuous batching: rows share a paged cache, and come and go at every step.

`why_not_paged` says with which models and settings it does not give the texts of a row alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from brim.batching import free_caches, is_out_of_memory, random_states, restore_random_states
from brim.data.tokens import TokenRows
from brim.errors import BrimError, InputError, Problem
from brim.infer.engines.base import Constraint, Finished, OnFinished, Response
from brim.infer.engines.batching import Smaller, longest_first, too_large
from brim.infer.engines.cache import base_model
from brim.infer.engines.capacity import Room
from brim.infer.engines.transformers import plain
from brim.models import Precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation import ContinuousBatchingConfig


# Tokens of a page. flash-attn's kernels want multiples of 256; the others read tokens one by one, and small pages leave
# less of a row's last one empty.
_PAGE, _PAGE_OF_FLASH = 16, 256


_AHEAD = 256  # prompts that it knows beyond those that it works on, so that a long list costs no memory


_LOOK_S = 1.0  # how often it is looked whether their thread is still there


class PagedEngine:
    """An Engine (see infer/engine.py). Greedy only, and for some architectures: see why_not_paged.

    settings: what `generation_settings` gives. room: the rows that are in at once; their cache is made for so many of
    the longest. on_smaller: told each time that memory ran out and fewer rows go on together; what it raises ends the
    run. The longest prompts are submitted first; none may be empty.

    Raises InputError where it would not do what the settings say.
    """

    name = "paged"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        settings: Mapping[str, Any],
        room: Room,
        seed: int,
        device: torch.device,
        precision: Precision,
        constraint: Constraint | None = None,
        on_smaller: Callable[[Smaller], None] = lambda smaller: None,
    ) -> None:
        self._model, self._settings, self._room, self._seed = model, settings, room, seed
        self._on_smaller = on_smaller
        reason = why_not_paged(model, settings, precision=precision, constraint=constraint)
        if reason:
            raise _refused(reason)

    def run(self, prompts: TokenRows, *, on_finished: OnFinished) -> None:
        """See Engine. Raises BrimError where transformers fails in another way than for lack of memory."""
        waiting = longest_first(prompts).tolist()
        has_retried = False
        while waiting:
            shape = self._shape(prompts, waiting)
            sitting = _Sitting(prompts, waiting, on_finished, most_in=shape.rows + _AHEAD)
            error = self._sit(sitting, shape)
            waiting = sitting.left()
            if error is None:
                continue
            if not is_out_of_memory(error, is_last=has_retried):
                raise _failed(error) from error
            del error, sitting  # their traceback keeps tensors alive
            free_caches()
            if shape.rows > 1:
                self._shrink(prompts, waiting, shape)
            elif has_retried:
                row = prompts[waiting[0]]
                raise too_large(key=row.key, num_tokens=len(row.input_ids), doing="generation")
            else:
                has_retried = True

    def _shape(self, prompts: TokenRows, waiting: Sequence[int]) -> _Shape:
        longest = int(prompts.lengths[waiting[0]])
        columns = longest + self._settings["max_new_tokens"]
        rows = min(self._room.rows(columns), len(waiting))
        # A step of all rows, and a prompt beside it; longer ones are read in parts.
        return _Shape(rows=rows, columns=columns, batch_tokens=rows + min(longest, self._room.prefill_tokens))

    def _shrink(self, prompts: TokenRows, waiting: Sequence[int], shape: _Shape) -> None:
        self._room.shrink(rows=shape.rows, columns=shape.columns)
        after = min(self._room.rows(shape.columns), shape.rows - 1)
        in_it = list(waiting[: shape.rows])
        longest = int(prompts.lengths[in_it].max())
        keys = tuple(prompts.keys[in_it].tolist())
        self._on_smaller(Smaller(doing="generation", keys=keys, longest=longest, after=after))

    def _sit(self, sitting: _Sitting, shape: _Shape) -> BaseException | None:
        """Respond until all have been, or until their thread fails; then what it ran into."""
        from transformers import GenerationConfig

        base = base_model(self._model)
        with _as_it_was(base):
            manager = base.init_continuous_batching(
                generation_config=GenerationConfig(**plain(self._settings)),
                continuous_batching_config=_config(base, shape, self._seed),
            )
            try:
                manager.start()
                failure = sitting.respond(manager, self._settings)
            finally:
                manager.stop(block=True, hard_stop=True)
                manager.destroy()
        if failure is None:
            return None
        recorded: BaseException | None = manager.background_thread_status.fatal_error
        return recorded or RuntimeError(failure)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Of the cache."""

    rows: int
    columns: int
    batch_tokens: int  # of one pass


class _Sitting:
    """Requests that one manager works on. most_in: that it knows of at once."""

    def __init__(self, prompts: TokenRows, waiting: Sequence[int], on_finished: OnFinished, *, most_in: int) -> None:
        self._prompts, self._order, self._on_finished, self._most_in = prompts, waiting, on_finished, most_in
        self._done: set[int] = set()

    def left(self) -> list[int]:
        """Positions without a response, in their order."""
        return [position for position in self._order if position not in self._done]

    def respond(self, manager: Any, settings: Mapping[str, Any]) -> str | None:
        """Returns what failed; None where all have their response."""
        ends, waiting, num_in = settings["eos_token_id"], iter(self._order), 0
        while len(self._done) < len(self._order):
            for position in islice(waiting, self._most_in - num_in):
                self._submit(manager, position, settings)
                num_in += 1
            result = manager.get_result(timeout=_LOOK_S)
            if result is None:
                if not manager.is_running():
                    return "its thread ended"
                continue
            if result.error is not None:
                return str(result.error)
            position = int(result.request_id)
            self._done.add(position)
            num_in -= 1
            self._on_finished([Finished(position=position, response=_response(result.generated_tokens, ends))])
        return None

    def _submit(self, manager: Any, position: int, settings: Mapping[str, Any]) -> None:
        manager.add_request(
            self._prompts[position].input_ids.tolist(),
            request_id=str(position),
            max_new_tokens=settings["max_new_tokens"],
            eos_token_id=list(settings["eos_token_id"]),
        )


def _config(model: PreTrainedModel, shape: _Shape, seed: int) -> ContinuousBatchingConfig:
    from transformers.generation import ContinuousBatchingConfig

    text = model.config.get_text_config(decoder=True)
    page = _PAGE_OF_FLASH if "flash" in model.config._attn_implementation else _PAGE
    # Layers of different kinds get their pages in portions of the least common multiple of their numbers of layers.
    spare = text.num_hidden_layers if len(set(getattr(text, "layer_types", None) or ())) > 1 else 1
    field = page_field(ContinuousBatchingConfig)
    assert field is not None, "why_not_paged has looked"
    return ContinuousBatchingConfig(
        **{field: page},
        num_blocks=shape.rows * math.ceil(shape.columns / page) + spare,
        max_batch_tokens=shape.batch_tokens,
        max_requests_per_batch=shape.rows,
        max_memory_percent=1.0,  # the room has left what else is needed
        auto_switch_to_flash=False,  # would fetch kernels from the Hub
        seed=seed,
    )


@contextmanager
def _as_it_was(model: Any) -> Iterator[None]:
    """The attention's name and the random states are put back; their log, which tells of errors twice, is silent."""
    attention, states = model.config._attn_implementation, random_states()
    log = logging.getLogger("ContinuousBatchingLogger")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)
        restore_random_states(states)
        if model.config._attn_implementation != attention:
            model.set_attn_implementation(attention)


def _response(token_ids: Sequence[int], end_ids: Sequence[int]) -> Response:
    if token_ids and token_ids[-1] in end_ids:
        return Response(token_ids=list(token_ids[:-1]), finish_reason="stop", end_id=token_ids[-1])
    return Response(token_ids=list(token_ids), finish_reason="length")


def _refused(reason: str) -> InputError:
    return InputError(
        Problem(
            what=f"transformers' continuous batching cannot be used: {reason}",
            where="generation.engine: paged",
            fix="set generation.engine: auto, or change what it names",
        )
    )


def _failed(error: BaseException) -> BrimError:
    return BrimError(
        Problem(
            what=f"transformers' continuous batching failed: {' '.join(str(error).split())}",
            where="generation.engine: paged",
            fix="set generation.engine: auto",
        )
    )


_HONOURED = {"max_new_tokens", "do_sample", "num_beams", "use_cache", "renormalize_logits"}  # where it is greedy


_HONOURED |= {"pad_token_id", "bos_token_id", "eos_token_id"}


_OFF: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
    "remove_invalid_values": False,
}


_LAYERS = {"full_attention", "sliding_attention"}


def why_not_paged(
    model: PreTrainedModel, settings: Mapping[str, Any], *, precision: Precision, constraint: Constraint | None = None
) -> str:
    """The reason against it, empty where there is none. settings: what `generation_settings` gives."""
    if constraint is not None:
        return "responses are limited to labels, and it has no place for that"
    return _version() or _settings(settings) or _precision(precision) or _architecture(model)


def _version() -> str:
    from transformers import __version__, generation

    config = getattr(generation, "ContinuousBatchingConfig", None)
    if config is None or page_field(config) is None:
        return f"transformers {__version__} has no ContinuousBatchingConfig that takes a page's tokens; 5.17 has one"
    return ""


def page_field(config: type[Any]) -> str | None:
    """Return what ContinuousBatchingConfig calls the tokens of a page; None where this version has no such field.

    transformers 5.17.0 calls it block_size, later versions page_size.
    """
    fields = getattr(config, "__dataclass_fields__", {})
    return next((name for name in ("page_size", "block_size") if name in fields), None)


def _settings(settings: Mapping[str, Any]) -> str:
    if settings.get("do_sample"):
        return "generation.do_sample: what is drawn would depend on the rows beside it"
    if settings.get("num_beams", 1) > 1:
        return "generation.num_beams: it has no beams"
    if settings.get("use_cache") is False:
        return "generation.use_cache is false"
    for name, value in settings.items():
        if name not in _HONOURED and (name not in _OFF or value != _OFF[name]):
            return f"generation.{name}: it does not honour it for each row by itself"
    return ""


def _precision(precision: Precision) -> str:
    # It runs in a thread of its own; autocast holds in the thread that entered it.
    return "" if precision.autocast_dtype is None else f"precision {precision.name}: it does not run under autocast"


def _architecture(model: PreTrainedModel) -> str:
    base = base_model(model)
    name, config = type(base).__name__, base.config.get_text_config(decoder=True)
    # Those that compute attention by themselves generate without their cache, and say nothing.
    if not base._supports_attention_backend:
        return f"{name} computes attention in a way of its own"
    others = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if others:
        return f"{name} keeps more than keys and values ({', '.join(sorted(others))})"
    if getattr(config, "kv_lora_rank", None) is not None:
        return f"{name} has keys and values of different sizes"
    if base.config._attn_implementation not in ("sdpa", "eager") and "flash" not in base.config._attn_implementation:
        return f"it has no attention {base.config._attn_implementation}"
    return ""
