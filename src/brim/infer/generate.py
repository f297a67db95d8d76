"""Texts from prompts, in batches of like length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from brim.batching.random_states import random_states, restore_random_states
from brim.data import TokenRows
from brim.data.collate import collate_prompts
from brim.errors import BrimError, InputError, Problem
from brim.infer.rows_at_once import RowsAtOnce, longest_first, rows_at_once
from brim.models.precision import Precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What the model said to one prompt."""

    token_ids: list[int]  # without padding and without the end-of-sequence token
    finish_reason: str  # "stop": the model ended it; "length": max_new_tokens did


def generate(
    model: PreTrainedModel,
    prompts: TokenRows,
    *,
    settings: Mapping[str, Any],
    batch_rows: int | RowsAtOnce,
    seed: int,
    device: torch.device,
    precision: Precision,
    on_batch: Callable[[int], None] = lambda rows: None,
) -> list[Response]:
    """One response a prompt, in the order of the prompts.

    settings: what `generation_settings` gives. The longest prompts run first; none may be empty.
    batch_rows: run together, and fewer once memory has run out.
    on_batch: called after each batch with its number of rows.
    Raises InputError when transformers refuses the settings, OutOfMemoryError when a prompt alone runs out of memory.
    """
    from transformers import GenerationConfig

    generation = GenerationConfig(**settings)
    responses: list[Response | None] = [None] * len(prompts)
    if "prompt_lookup_num_tokens" in settings:
        batch_rows = 1  # all that transformers can do there

    def respond(positions: NDArray[np.intp]) -> None:
        batch = collate_prompts([prompts[int(i)] for i in positions], pad_id=settings["pad_token_id"]).to(device)
        with (
            _rewound_if_raised(),
            torch.inference_mode(),
            precision.autocast(device, keeps_copies=False),
            _explained(),
        ):
            sequences = model.generate(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, generation_config=generation
            )
            new = sequences[:, batch.input_ids.shape[1] :].tolist()
        for position, token_ids in zip(positions, new, strict=True):
            responses[int(position)] = _response(token_ids, settings["eos_token_id"])
        on_batch(len(positions))

    model.eval()
    torch.manual_seed(seed)
    rows_at_once(batch_rows).run(prompts, longest_first(prompts), respond, doing="generation")
    return [response for response in responses if response is not None]


def end_ids(model: PreTrainedModel, eos_id: int) -> list[int]:
    """The token that training put at the end, and those at which the model itself was made to stop."""
    own = model.generation_config.eos_token_id
    return list(dict.fromkeys([eos_id, *(own if isinstance(own, list) else [own] if own is not None else [])]))


@contextmanager
def _rewound_if_raised() -> Iterator[None]:
    """What a batch has drawn that ran out of memory must not tell in the texts."""
    before = random_states()
    try:
        yield
    except BaseException:
        restore_random_states(before)
        raise


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise InputError(
            Problem(
                what=f"transformers cannot generate with these settings: {' '.join(str(error).split())}",
                where="generation",
                fix="change the keys that it names",
            )
        ) from error
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise BrimError(
            Problem(
                what="the probabilities of the next token are not finite",
                where="generation",
                fix="raise generation.temperature, or check that the model's weights are whole",
            )
        ) from error


def _response(token_ids: list[int], end_ids: list[int]) -> Response:
    for position, token_id in enumerate(token_ids):
        if token_id in end_ids:
            return Response(token_ids=token_ids[:position], finish_reason="stop")
    return Response(token_ids=token_ids, finish_reason="length")
