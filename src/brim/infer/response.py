"""What a model says to a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What the model said to one prompt."""

    token_ids: list[int]  # without padding and without the token that ended it
    finish_reason: FinishReason  # "stop": the model ended it; "length": max_new_tokens did
    end_id: int | None = None  # the token that ended it; None where max_new_tokens did


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A prompt that has its response."""

    position: int  # of the prompt among those that were given to the engine
    response: Response
