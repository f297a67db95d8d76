"""Responses from transformers' own `generate`, in batches of like length that stay together to their end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from brim.batching.random_states import random_states, restore_random_states
from brim.data import TokenRows
from brim.data.collate import collate_prompts
from brim.errors import BrimError, InputError, Problem
from brim.infer.engine import OnFinished
from brim.infer.response import Finished, Response
from brim.infer.rows_at_once import RowsAtOnce, longest_first, rows_at_once
from brim.models.precision import Precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StaticEngine:
    """An Engine (see infer/engine.py) for whatever transformers can generate with, beam search included.

    settings: what `generation_settings` gives. batch_rows: run together, and fewer once memory has run out. The longest
    prompts run first; none may be empty. A batch that samples draws from a seed of its own rows.
    """

    name = "static"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        settings: Mapping[str, Any],
        batch_rows: int | RowsAtOnce,
        seed: int,
        device: torch.device,
        precision: Precision,
    ) -> None:
        self._model, self._settings, self._seed = model, settings, seed
        # All that transformers can do there.
        self._batch_rows = 1 if "prompt_lookup_num_tokens" in settings else batch_rows
        self._device, self._precision = device, precision

    def run(self, prompts: TokenRows, *, on_finished: OnFinished) -> None:
        """See Engine."""
        from transformers import GenerationConfig

        generation = GenerationConfig(**self._settings)
        pad_id, end_ids = self._settings["pad_token_id"], self._settings["eos_token_id"]

        def respond(positions: NDArray[np.intp]) -> None:
            batch = collate_prompts([prompts[int(i)] for i in positions], pad_id=pad_id).to(self._device)
            with (
                _rewound_if_raised(),
                torch.inference_mode(),
                self._precision.autocast(self._device, keeps_copies=False),
                explained(),
            ):
                sequences = self._model.generate(
                    input_ids=batch.input_ids, attention_mask=batch.attention_mask, generation_config=generation
                )
                new = sequences[:, batch.input_ids.shape[1] :].tolist()
            on_finished(
                [
                    Finished(position=int(position), response=_response(token_ids, end_ids))
                    for position, token_ids in zip(positions, new, strict=True)
                ]
            )

        self._model.eval()
        torch.manual_seed(self._seed)
        rows_at_once(self._batch_rows).run(prompts, longest_first(prompts), respond, doing="generation")


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
def explained() -> Iterator[None]:
    """What transformers and torch say of settings and scores, as brim says it. Raises InputError, BrimError."""
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
            return Response(token_ids=token_ids[:position], finish_reason="stop", end_id=token_id)
    return Response(token_ids=token_ids, finish_reason="length")
