"""Define the interface between a job that wants responses and the engine that writes them.

Ludwig's generation keys become transformers' settings, and what transformers and torch say of settings and scores is
explained in brim's words. An engine that draws its own numbers gets a seed for each row.

In a few architectures the response to a prompt wrongly changes with the rows beside it; a check on the model itself
finds these.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from brim.batching.memory import attempt
from brim.config.schema import GenerationConfig
from brim.data.tokens import TokenRows
from brim.errors import BrimError, InputError
from brim.infer.engines.batching import OnSmaller
from brim.infer.engines.capacity import Room
from brim.models import Precision
from brim.models.packing import PackedAttention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from brim.infer.engines.sampling import LabelConstraint


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Pair a prompt with its response."""

    position: int  # of the prompt among those that were given to the engine
    response: Response


OnFinished: TypeAlias = Callable[[Sequence[Finished]], None]


class Engine(Protocol):
    """Write a response to each prompt, many at a time."""

    @property
    def name(self) -> str:
        """Return the name that generation.engine has for it."""
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
    """Return one response a prompt, in the order of the prompts. on_batch: called with how many more are done."""
    responses: dict[int, Response] = {}

    def keep(finished: Sequence[Finished]) -> None:
        responses.update((each.position, each.response) for each in finished)
        on_batch(len(finished))

    engine.run(prompts, on_finished=keep)
    return [responses[position] for position in range(len(prompts))]


class LocalEngine(ABC):
    """Run a model of this process as an Engine. The longest prompts run first; none may be empty.

    settings: what `generation_settings` gives. on_smaller: called each time that memory ran out and fewer rows go on
    together; what it raises ends the run. is_misled: whether the rows of a batch change each other's responses, so that
    they go one by one; None: it is tried. packed: how brim's own engine reads prompts without padding; None: with it.
    """

    name: str

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        settings: Mapping[str, Any],
        room: Room,
        seed: int,
        device: torch.device,
        precision: Precision,
        constraint: LabelConstraint | None = None,
        on_smaller: OnSmaller = lambda smaller: None,
        is_misled: bool | None = None,
        packed: PackedAttention | None = None,
    ) -> None:
        self._model, self._settings, self._room, self._seed = model, settings, room, seed
        self._device, self._precision = device, precision
        self._constraint, self._on_smaller = constraint, on_smaller
        self._is_misled, self._packed = is_misled, packed

    @abstractmethod
    def run(self, prompts: TokenRows, *, on_finished: OnFinished) -> None:
        """Respond to every prompt once, as Engine.run does."""

    def _rows_go_alone(self, prompts: TokenRows) -> bool:
        if self._is_misled is None:
            self._is_misled = is_misled_by_its_batch(
                self._model,
                prompts[0].input_ids.tolist(),
                pad_id=self._settings["pad_token_id"],
                device=self._device,
                precision=self._precision,
            )
        return self._is_misled


@contextmanager
def explained() -> Iterator[None]:
    """Raise InputError for settings that transformers refuses, BrimError for scores that are not finite."""
    try:
        yield
    except ValueError as error:
        raise InputError(
            what=f"transformers cannot generate with these settings: {' '.join(str(error).split())}",
            where="generation",
            fix="change the keys that it names",
        ) from error
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise not_finite() from error


def not_finite() -> BrimError:
    """Return the error of scores from which no token can be chosen."""
    return BrimError(
        what="the probabilities of the next token are not finite",
        where="generation",
        fix="raise generation.temperature, or check that the model's weights are whole",
    )


_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "min_p")


_BEAM_KEYS = ("length_penalty", "early_stopping")


def generation_settings(generation: GenerationConfig, *, pad_id: int, end_ids: Sequence[int]) -> dict[str, Any]:
    """Return keyword arguments of transformers' GenerationConfig, without keys that sampling, or beams, alone use.

    A temperature of 0 means greedy decoding. pad_id, end_ids: used where the configuration names no tokens itself;
    `eos_token_id` is a list in any case.
    """
    # In JSON's types: transformers wants lists where the configuration holds tuples, and refuses empty ones.
    given = generation.model_dump(mode="json", exclude={"engine", "merge_adapter"})
    settings = {key: value for key, value in given.items() if value is not None and value != []}
    if settings.get("temperature") == 0:
        settings["do_sample"] = False
    if settings.get("do_sample"):
        settings.setdefault("top_k", 0)  # null means all; transformers would take 50 for a key that is not there
    else:
        for key in _SAMPLING_KEYS:
            settings.pop(key, None)
    if settings.get("num_beams", 1) == 1:
        for key in _BEAM_KEYS:
            settings.pop(key, None)
    ends = settings.get("eos_token_id", list(end_ids))
    return {"pad_token_id": pad_id, **settings, "eos_token_id": ends if isinstance(ends, list) else [ends]}


_MOST_TOKENS = 8  # recurrent states forget, so that what was read long ago shows less


# Norm of the difference over that of the scores about their mean. Over the families of tests/infer/families.py it is up
# to 2e-6 in fp32 where masks and states are right, and more than 0.7 where padding is read or states are mixed up.
_MOST_IN_FP32, _MOST_ELSE = 1e-3, 0.1


def is_misled_by_its_batch(
    model: PreTrainedModel, prompt: Sequence[int], *, pad_id: int, device: torch.device, precision: Precision
) -> bool:
    """Try whether the rows beside a prompt change its scores: alone, and in a batch with a row of twice the length.

    Both passes are compared, that over the prompt and that over a token: some architectures mask only one of them.
    False where two rows do not fit in memory: whoever runs rows together finds that out, and reports it.
    """
    found = attempt(lambda: _changes(model, prompt, pad_id=pad_id, device=device, precision=precision))
    return found is True


def _changes(
    model: PreTrainedModel, prompt: Sequence[int], *, pad_id: int, device: torch.device, precision: Precision
) -> bool:
    tokens = list(prompt[:_MOST_TOKENS])
    padding = [pad_id] * len(tokens)
    alone = torch.tensor([tokens], device=device)
    batch = torch.tensor([padding + tokens, tokens + tokens], device=device)
    mask = torch.ones_like(batch)
    mask[0, : len(padding)] = 0
    with torch.inference_mode(), precision.autocast(device, keeps_copies=False):
        expected = _scores(model, alone, torch.ones_like(alone), pad_id)
        found = _scores(model, batch, mask, pad_id)
    most = _MOST_IN_FP32 if precision.name == "fp32" else _MOST_ELSE
    changes = (found - expected).norm(dim=1) / (expected - expected.mean(dim=1, keepdim=True)).norm(dim=1)
    return not bool((changes <= most).all())


def _scores(model: PreTrainedModel, input_ids: Tensor, mask: Tensor, pad_id: int) -> Tensor:
    """Return [2, V] fp32, of the first row: after the prompt, and after its last token once more."""
    from transformers import GenerationConfig

    twice: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": pad_id, "eos_token_id": None}
    again = [int(input_ids[0, -1])]
    output = model.generate(
        input_ids=input_ids,
        attention_mask=mask,
        generation_config=GenerationConfig(**twice, return_dict_in_generate=True, output_logits=True),
        prefix_allowed_tokens_fn=lambda row, tokens: again,
    )
    return torch.stack([logits[0] for logits in output.logits]).float()


FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """Hold what the model wrote to one prompt."""

    token_ids: list[int]  # without padding and without the token that ended it
    finish_reason: FinishReason  # "stop": the model ended it; "length": max_new_tokens did
    end_id: int | None = None  # the token that ended it; None where max_new_tokens did

    def to_bytes(self) -> bytes:
        """Pack the response for a journal."""
        head = _HEAD.pack(_REASONS.index(self.finish_reason), _NO_END if self.end_id is None else self.end_id)
        return head + np.asarray(self.token_ids, dtype="<i4").tobytes()

    @classmethod
    def of_bytes(cls, packed: bytes) -> Response:
        """Return the response that `to_bytes` packed."""
        reason, end_id = _HEAD.unpack_from(packed)
        return cls(
            token_ids=np.frombuffer(packed, dtype="<i4", offset=_HEAD.size).tolist(),
            finish_reason=_REASONS[reason],
            end_id=None if end_id == _NO_END else end_id,
        )


_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
_HEAD = struct.Struct("<Bi")  # number of the reason, the token that ended it or _NO_END
_NO_END = -1


_MOST = 2**63 - 1  # signed, as some engines keep it


def row_seed(seed: int, key: int) -> int:
    """Return a row's seed, from 0 to 2^63 - 1: the same for the same seed and row key, whatever else is generated."""
    state = np.random.SeedSequence([abs(seed), abs(key)]).generate_state(1, np.uint64)
    return int(state[0]) & _MOST
