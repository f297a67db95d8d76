"""Generate with transformers' own `generate`, in batches of like length that stay together to their end.

brim chooses the tokens inside `generate`, so that a row's text is the same in whatever batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.batching import free_caches, is_out_of_memory, random_states, restore_random_states
from brim.data.tokens import TokenRows, collate_prompts
from brim.infer.engines.base import (
    Constraint,
    Finished,
    OnFinished,
    Response,
    explained,
    is_misled_by_its_batch,
    row_seed,
)
from brim.infer.engines.batching import Smaller, longest_first, too_large
from brim.infer.engines.capacity import Room
from brim.infer.engines.sampling import NextToken, Writing
from brim.models import Precision

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel


Positions = NDArray[np.intp]


class StaticEngine:
    """An Engine (see infer/engine.py) for whatever transformers can generate with, beam search included.

    settings: what `generation_settings` gives. room: a row of it is a prompt with all its beams. on_smaller: told each
    time that memory ran out and fewer rows go on together; what it raises ends the run. is_misled: whether the
    architecture's batches are not right, so that rows go one by one; None: it is tried. The longest prompts run first;
    none may be empty.

    What is sampled depends on the row alone. Where transformers draws for several rows from one generator and nothing
    can be put in its place (beam search that samples), rows go one by one, each from its own seed.
    """

    name = "static"

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
        is_misled: bool | None = None,
    ) -> None:
        self._model, self._settings, self._room, self._seed = model, settings, room, seed
        self._device, self._precision = device, precision
        self._constraint, self._on_smaller = constraint, on_smaller
        self._is_misled = is_misled

    def run(self, prompts: TokenRows, *, on_finished: OnFinished) -> None:
        """See Engine."""
        self._model.eval()
        order = longest_first(prompts)
        most, has_retried = len(order), False
        while len(order):
            positions = order[: self._num_together(prompts, order, most)]
            finished = self._fitting(prompts, positions, is_last=has_retried)
            if finished is not None:
                on_finished(finished)
                order, most, has_retried = order[len(positions) :], len(order), False
                continue
            # Here, after the `except` block: its traceback keeps tensors alive.
            free_caches()
            if len(positions) > 1:
                most = self._shrink(prompts, positions)
            elif has_retried:
                row = prompts[int(positions[0])]
                raise too_large(key=row.key, num_tokens=len(row.input_ids), doing="generation")
            else:
                has_retried = True

    def _num_together(self, prompts: TokenRows, order: Positions, most: int) -> int:
        """How many make the next batch. order: of those that wait, the longest first."""
        columns = int(prompts.lengths[order[0]]) + self._settings["max_new_tokens"]
        rows = min(self._room.rows(columns), most)
        return 1 if rows > 1 and self._rows_go_alone(prompts) else rows

    def _rows_go_alone(self, prompts: TokenRows) -> bool:
        if why_alone(self._settings):
            return True
        if self._is_misled is None:
            self._is_misled = is_misled_by_its_batch(
                self._model,
                prompts[0].input_ids.tolist(),
                pad_id=self._settings["pad_token_id"],
                device=self._device,
                precision=self._precision,
            )
        return self._is_misled

    def _shrink(self, prompts: TokenRows, positions: Positions) -> int:
        """Fewer rows from now on. Returns how many at most may go on together."""
        longest = int(prompts.lengths[positions].max())
        columns = longest + self._settings["max_new_tokens"]
        self._room.shrink(rows=len(positions), columns=columns)
        most = min(self._room.rows(columns), len(positions) - 1)
        keys = tuple(prompts.keys[positions].tolist())
        self._on_smaller(Smaller(doing="generation", keys=keys, longest=longest, after=most))
        return most

    def _fitting(self, prompts: TokenRows, positions: Positions, *, is_last: bool) -> list[Finished] | None:
        """The responses; None where memory ran out. is_last: a row alone has failed before."""
        try:
            responses = self._respond(prompts.take(positions))
        except Exception as error:
            if not is_out_of_memory(error, is_last=is_last):
                raise
            return None
        return [
            Finished(position=int(position), response=response)
            for position, response in zip(positions, responses, strict=True)
        ]

    def _respond(self, prompts: TokenRows) -> list[Response]:
        batch = collate_prompts(prompts, pad_id=self._settings["pad_token_id"]).to(self._device)
        width = batch.input_ids.shape[1]
        autocast = self._precision.autocast(self._device, keeps_copies=False)
        kept = nullcontext() if self._chooses_itself or not self._settings.get("do_sample") else _random_states_kept()
        with kept, torch.inference_mode(), autocast, explained():
            sequences = self._model.generate(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, **self._how(prompts, width)
            )
            new = sequences[:, width:].tolist()
        return [_response(token_ids, self._settings["eos_token_id"]) for token_ids in new]

    @property
    def _chooses_itself(self) -> bool:
        return self._settings.get("num_beams", 1) == 1 and "prompt_lookup_num_tokens" not in self._settings

    def _how(self, prompts: TokenRows, width: int) -> dict[str, Any]:
        """Arguments of `generate`: brim chooses the tokens, but where transformers must. width: tokens of a prompt."""
        from transformers import GenerationConfig, LogitsProcessorList

        if self._chooses_itself:
            chooser = NextToken(self._settings, seed=self._seed, device=self._device, constraint=self._constraint)
            chosen = ChosenByRow(chooser, prompts, end_ids=self._settings["eos_token_id"])
            return {
                "generation_config": GenerationConfig(**plain(self._settings)),
                "logits_processor": LogitsProcessorList([chosen]),
            }
        if self._settings.get("do_sample"):
            torch.manual_seed(row_seed(self._seed, int(prompts.keys[0])))
        how: dict[str, Any] = {"generation_config": GenerationConfig(**self._settings)}
        if (constraint := self._constraint) is not None:
            how["prefix_allowed_tokens_fn"] = lambda row, tokens: list(constraint.allowed(tokens[width:].tolist()))
        return how


def why_alone(settings: Mapping[str, Any]) -> str:
    """Why transformers' `generate` takes one row at a time with these settings; empty where it takes several."""
    if settings.get("num_beams", 1) > 1 and settings.get("do_sample"):
        return "beams that sample draw from one generator, so rows go one by one"
    if settings.get("prompt_lookup_num_tokens") is not None:
        return "prompt lookup takes one row at a time"
    return ""


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Beam search that samples sets a seed: the program's own numbers go on as if it had not."""
    states = random_states()
    try:
        yield
    finally:
        restore_random_states(states)


def end_ids(model: PreTrainedModel, eos_id: int) -> list[int]:
    """The token that training put at the end, and those at which the model itself was made to stop."""
    return end_ids_of(model.generation_config, eos_id)


def end_ids_of(generation: GenerationConfig, eos_id: int) -> list[int]:
    """As above, where the model is not loaded. generation: its own settings."""
    own = generation.eos_token_id
    return list(dict.fromkeys([eos_id, *(own if isinstance(own, list) else [own] if own is not None else [])]))


def _response(token_ids: list[int], end_ids: Sequence[int]) -> Response:
    for position, token_id in enumerate(token_ids):
        if token_id in end_ids:
            return Response(token_ids=token_ids[:position], finish_reason="stop", end_id=token_id)
    return Response(token_ids=token_ids, finish_reason="length")


# What stays transformers' own: lengths, tokens, the cache, and a second pass of the model.
_THEIRS = (
    "max_new_tokens",
    "max_time",
    "guidance_scale",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)


class ChosenByRow:
    """A logits processor that leaves each row one token: the one that NextToken chooses.

    prompts: of the batch, in its order.
    """

    def __init__(self, chooser: NextToken, prompts: TokenRows, *, end_ids: Sequence[int]) -> None:
        self._chooser, self._end_ids = chooser, frozenset(end_ids)
        self._rows = [
            Writing(position=number, key=row.key, prompt=row.input_ids.tolist()) for number, row in enumerate(prompts)
        ]
        self._writing = list(range(len(self._rows)))  # those that have not ended

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: [B, T], of which the rows know all but the padding. scores: [B, V]."""
        rows = [self._rows[number] for number in self._writing]
        tokens = self._chooser.choose(scores[self._writing].float(), rows)
        for row, token in zip(rows, tokens, strict=True):
            row.generated.append(token)
        only = torch.full_like(scores, -torch.inf)
        only[:, 0] = 0  # of rows that have ended; `generate` pads them
        only[self._writing, 0] = -torch.inf
        only[self._writing, tokens] = 0
        self._writing = [number for number in self._writing if self._rows[number].generated[-1] not in self._end_ids]
        return only


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a `generate` that takes the likeliest token and leaves all else to ChosenByRow."""
    return {**{name: settings[name] for name in _THEIRS if name in settings}, "do_sample": False, "num_beams": 1}
