"""The seam between a job that wants responses and what writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from brim.data import TokenRows
from brim.infer.response import Finished, Response

OnFinished: TypeAlias = Callable[[Sequence[Finished]], None]


class Engine(Protocol):
    """Writes a response to each prompt, many at a time."""

    @property
    def name(self) -> str:
        """As the configuration calls it: generation.engine."""
        ...

    def run(self, prompts: TokenRows, *, on_finished: OnFinished) -> None:
        """Respond to every prompt once, in an order of the engine's own.

        on_finished: called as responses end, each prompt in one call; what it raises ends the work.
        Raises OutOfMemoryError, naming the row, when a prompt alone runs out of memory; InputError for settings that
        the engine refuses.
        """
        ...


def respond_to(
    engine: Engine, prompts: TokenRows, *, on_batch: Callable[[int], None] = lambda rows: None
) -> list[Response]:
    """One response a prompt, in the order of the prompts. on_batch: told how many more have got theirs."""
    responses: dict[int, Response] = {}

    def keep(finished: Sequence[Finished]) -> None:
        responses.update((each.position, each.response) for each in finished)
        on_batch(len(finished))

    engine.run(prompts, on_finished=keep)
    return [responses[position] for position in range(len(prompts))]


class Constraint(Protocol):
    """Which tokens may come next, where not every text is an answer."""

    def allowed(self, generated: Sequence[int]) -> Sequence[int]:
        """Token ids, at least one; the end's where the answer may be over. generated: tokens of the answer so far."""
        ...
