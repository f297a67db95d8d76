"""Generate with transformers' own `generate`, in batches of like length that stay together to their end.

brim chooses the tokens inside `generate`, so that a row's text is the same in whatever batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.batching import CapChange, MicroBatch
from brim.batching.memory import random_states, restore_random_states
from brim.data.tokens import TokenRows, collate_prompts
from brim.infer.engines.base import Finished, LocalEngine, OnFinished, Response, explained, row_seed
from brim.infer.engines.batching import longest_first, run_rows, together
from brim.infer.engines.sampling import NextToken, Writing

Positions = NDArray[np.intp]


class StaticEngine(LocalEngine):
    """Generate with whatever transformers can, beam search included.

    room: one of its rows is a prompt with all its beams.
    What is sampled depends on the row alone. Where transformers draws for several rows from one generator and nothing
    can be put in its place (beam search that samples), rows go one by one, each from its own seed.
    """

    name = "static"

    @staticmethod
    def why_alone(settings: Mapping[str, Any]) -> str:
        """Say why `generate` takes one row at a time with these settings; empty where it takes several."""
        if settings.get("num_beams", 1) > 1 and settings.get("do_sample"):
            return "beams that sample draw from one generator, so rows go one by one"
        if settings.get("prompt_lookup_num_tokens") is not None:
            return "prompt lookup takes one row at a time"
        return ""

    def run(self, prompts: TokenRows, *, on_finished: OnFinished) -> None:
        """Respond to every prompt once, as Engine.run does."""
        self._model.eval()
        most = len(prompts)

        def divide(left: Positions) -> Iterator[MicroBatch]:
            nonlocal most
            while len(left):
                batch = together(prompts, left[: self._num_together(prompts, left, most)])
                yield batch
                left, most = left[batch.num_rows :], len(prompts)

        def lower(failed: MicroBatch) -> CapChange:
            nonlocal most
            columns = failed.padded_length + self._settings["max_new_tokens"]
            self._room.shrink(rows=failed.num_rows, columns=columns)
            most = min(self._room.rows(columns), failed.num_rows - 1)
            return CapChange(before=failed.num_rows, after=most, unit="rows")

        def done(batch: MicroBatch, responses: list[Response]) -> None:
            pairs = zip(batch.rows.tolist(), responses, strict=True)
            on_finished([Finished(position=position, response=response) for position, response in pairs])

        run_rows(
            prompts,
            longest_first(prompts),
            doing="generation",
            divide=divide,
            work=lambda batch: self._respond(prompts.take(batch.rows)),
            done=done,
            lower=lower,
            on_smaller=self._on_smaller,
        )

    def _num_together(self, prompts: TokenRows, order: Positions, most: int) -> int:
        """Count the prompts of the next batch. order: of those that wait, the longest first."""
        columns = int(prompts.lengths[order[0]]) + self._settings["max_new_tokens"]
        rows = min(self._room.rows(columns), most)
        return 1 if rows > 1 and (self.why_alone(self._settings) or self._rows_go_alone(prompts)) else rows

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
        """Return arguments of `generate`; brim chooses tokens where it can. width: tokens of a prompt."""
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


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Let the program's own random numbers go on as if beam search that samples had set no seed."""
    states = random_states()
    try:
        yield
    finally:
        restore_random_states(states)


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
    """Process logits so that each row is left one token: the one that NextToken chooses.

    prompts: of the batch, in its order.
    """

    def __init__(self, chooser: NextToken, prompts: TokenRows, *, end_ids: Sequence[int]) -> None:
        self._chooser, self._end_ids = chooser, frozenset(end_ids)
        self._rows = [
            Writing(position=number, key=row.key, prompt=row.input_ids.tolist()) for number, row in enumerate(prompts)
        ]
        self._writing = list(range(len(self._rows)))  # those that have not ended

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores [B, V] that leave one token a row. input_ids [B, T] are known to the rows already."""
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
    """Return settings of a `generate` that takes the likeliest token and leaves all else to ChosenByRow."""
    return {**{name: settings[name] for name in _THEIRS if name in settings}, "do_sample": False, "num_beams": 1}
