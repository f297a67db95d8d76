"""Choose the next token of each row from its scores: the likeliest, or one that is drawn.

What is drawn depends on the row alone: its numbers come from (seed, key, token), and what looks back at a row's
tokens sees these without padding. So a row's text is the same in whatever batch it is written. Where only labels may
be written, a constraint says which tokens may follow what has been written of one.

Legend: n rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.infer.engines.base import explained, not_finite
from brim.infer.engines.cache import moved

if TYPE_CHECKING:
    from transformers import LogitsProcessorList


class LabelConstraint:
    """Constrain responses to the texts of labels, each followed by the end.

    Where one label begins with another, the model decides between the end and going on.
    """

    def __init__(self, labels: Mapping[str, Sequence[Sequence[int]]], *, end_ids: Sequence[int]) -> None:
        """Take labels, which `label_tokens` gives, and end_ids, the tokens that end a response."""
        assert end_ids, "a response ends"
        self.end_ids, self._end = tuple(end_ids), (end_ids[0],)
        whole = dict.fromkeys(tuple(form) for forms in labels.values() for form in forms)
        self.forms = tuple(whole)  # the tokens of each label, in each of its spellings
        following: dict[tuple[int, ...], dict[int, None]] = {}
        for form in whole:
            for number, token in enumerate(form):
                following.setdefault(form[:number], {})[token] = None
        self._following = {
            tokens: (*(end_ids if tokens in whole else ()), *allowed) for tokens, allowed in following.items()
        }

    def allowed(self, generated: Sequence[int]) -> Sequence[int]:
        """Return the tokens that may follow, at least one; the ends where the response may end.

        generated: its tokens so far. After a whole label that no other continues, that is one end alone, so that no
        pass is needed to find it. So it is after what no label begins with, such as in beams that were given up.
        """
        return self._following.get(tuple(generated), self._end)


_NOT_FINITE = -1


# Rows are chosen for together up to about so many scores: what is computed of them, in fp32 and fp64, takes 0.2 GiB;
# with a vocabulary of 152,000 words, that of all rows at once would take more than their cache.
_SCORES_AT_ONCE = 2**23


@dataclass(slots=True, kw_only=True)
class Writing:
    """Hold a row that is being written. Only `generated` changes."""

    position: int  # among the prompts
    key: int
    prompt: list[int]
    generated: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Return the prompt and what has been generated."""
        return [*self.prompt, *self.generated]


class NextToken:
    """Choose tokens as transformers' settings say (`generation_settings`), but for what needs beams.

    Raises InputError for settings that transformers refuses: some of them with the first token.
    """

    @explained()
    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        seed: int,
        device: torch.device,
        constraint: LabelConstraint | None = None,
    ) -> None:
        self._settings, self._seed, self._device, self._constraint = settings, seed, device, constraint
        self.max_new_tokens: int = settings["max_new_tokens"]
        self._samples = bool(settings.get("do_sample"))
        self._looks_back = any(_is_set(settings, name) for name in _LOOKING_BACK)
        self._of_all = _of_all(settings, device, first=not self._looks_back)
        self._of_row: dict[int, LogitsProcessorList] = {}  # by position
        self._numbers: dict[int, NDArray[np.float64]] = {}

    @explained()
    def choose(self, scores: Tensor, rows: Sequence[Writing]) -> list[int]:
        """Choose by scores [n, V] of what follows each row. Raises BrimError where they are not finite."""
        together = max(1, _SCORES_AT_ONCE // scores.shape[-1])
        parts = [slice(start, start + together) for start in range(0, len(rows), together)]
        chosen: list[int] = torch.cat([self._chosen(scores[part].float(), rows[part]) for part in parts]).tolist()
        if _NOT_FINITE in chosen:
            raise not_finite()
        return chosen

    def forced(self, row: Writing) -> int | None:
        """Return the next token of a row, where there is no choice."""
        allowed = () if self._constraint is None else self._constraint.allowed(row.generated)
        return allowed[0] if len(allowed) == 1 else None

    def forget(self, row: Writing) -> None:
        """Forget what is kept of a row that is done."""
        self._of_row.pop(row.position, None)
        self._numbers.pop(row.position, None)

    def _chosen(self, scores: Tensor, rows: Sequence[Writing]) -> Tensor:
        """Return tokens [n]. scores: fp32."""
        if self._looks_back:
            scores = torch.cat([self._looked_back(scores[i : i + 1], row) for i, row in enumerate(rows)])
        if self._constraint is not None:
            scores = self._only_allowed(scores, rows)
        for process in self._of_all:
            scores = process(None, scores)
        return self._drawn(scores, rows) if self._samples else _likeliest(scores)

    def _looked_back(self, scores: Tensor, row: Writing) -> Tensor:
        if row.position not in self._of_row:
            self._of_row[row.position] = _of_one(self._settings, row.prompt, self._device)
        (tokens,) = moved(np.array(row.tokens), device=self._device)
        return cast(Tensor, self._of_row[row.position](tokens[None], scores))

    def _only_allowed(self, scores: Tensor, rows: Sequence[Writing]) -> Tensor:
        assert self._constraint is not None, "asked before"
        allowed = [self._constraint.allowed(row.generated) for row in rows]
        rows_of = np.repeat(np.arange(len(rows)), [len(tokens) for tokens in allowed])
        of_rows, tokens = moved(rows_of, np.concatenate(allowed), device=scores.device)
        only = torch.full_like(scores, -torch.inf)
        only[of_rows, tokens] = scores[of_rows, tokens]
        return only

    def _drawn(self, scores: Tensor, rows: Sequence[Writing]) -> Tensor:
        """Draw by the inverse of the distribution function, at one number for each row."""
        (numbers,) = moved(np.array([self._number(row) for row in rows]), device=scores.device)
        sums = scores.softmax(dim=-1).double().cumsum(dim=-1)
        total = sums[:, -1]
        tokens = torch.searchsorted(sums, (numbers * total)[:, None], right=True)[:, 0]
        return tokens.clamp(max=scores.shape[-1] - 1).masked_fill(~total.isfinite(), _NOT_FINITE)

    def _number(self, row: Writing) -> float:
        """Return a number from 0 to 1 for the row's next token."""
        count = len(row.generated)
        known = self._numbers.get(row.position)
        if known is None or len(known) <= count:
            self._numbers[row.position] = known = uniform_numbers(self._seed, row.key, self.max_new_tokens)
        return float(known[count])


def uniform_numbers(seed: int, key: int, count: int) -> NDArray[np.float64]:
    """Draw the numbers that choose a row's tokens: the same for the same seed and key, whatever else is generated."""
    bits = np.random.Philox(key=np.array([seed & _MOST, key & _MOST], dtype=np.uint64))
    return np.random.Generator(bits).random(count)


_MOST = 2**64 - 1


_LOOKING_BACK = (
    "sequence_bias",
    "encoder_repetition_penalty",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "min_new_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "begin_suppress_tokens",
)


# With these values, as with null, a setting leaves the scores as they are.
OFF: dict[str, Any] = {
    "encoder_repetition_penalty": 1.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
    "remove_invalid_values": False,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "renormalize_logits": False,
}


_Makers: TypeAlias = Mapping[str, Callable[[Any], Any]]  # what to make of a setting's value, by its name


def _is_set(settings: Mapping[str, Any], name: str) -> bool:
    value = settings.get(name)
    return value is not None and value != OFF.get(name)


def _chain(settings: Mapping[str, Any], makers: _Makers) -> LogitsProcessorList:
    from transformers import LogitsProcessorList

    return LogitsProcessorList([make(settings[name]) for name, make in makers.items() if _is_set(settings, name)])


def _of_one(settings: Mapping[str, Any], prompt: Sequence[int], device: torch.device) -> LogitsProcessorList:
    """Build the processors that look at one row's tokens, in the order of transformers' `generate`."""
    from transformers.generation import logits_process as made

    ends = torch.tensor(settings["eos_token_id"], device=device)
    length, most, on = len(prompt), len(prompt) + settings["max_new_tokens"], str(device)
    makers: _Makers = {
        "sequence_bias": lambda bias: made.SequenceBiasLogitsProcessor(sequence_bias=bias),
        "encoder_repetition_penalty": lambda penalty: made.EncoderRepetitionPenaltyLogitsProcessor(
            penalty=penalty, encoder_input_ids=torch.tensor([list(prompt)], device=device)
        ),
        "repetition_penalty": made.RepetitionPenaltyLogitsProcessor,
        "no_repeat_ngram_size": made.NoRepeatNGramLogitsProcessor,
        "bad_words_ids": lambda words: made.NoBadWordsLogitsProcessor(words, ends),
        "min_new_tokens": lambda fewest: made.MinNewTokensLengthLogitsProcessor(length, fewest, ends, device=on),
        "forced_bos_token_id": made.ForcedBOSTokenLogitsProcessor,
        "forced_eos_token_id": lambda last: made.ForcedEOSTokenLogitsProcessor(most, last, device=on),
        "remove_invalid_values": lambda _: made.InfNanRemoveLogitsProcessor(),
        "exponential_decay_length_penalty": lambda decay: made.ExponentialDecayLengthPenalty(
            tuple(decay), ends, length
        ),
        "suppress_tokens": lambda tokens: made.SuppressTokensLogitsProcessor(tokens, device=on),
        "begin_suppress_tokens": lambda tokens: made.SuppressTokensAtBeginLogitsProcessor(tokens, length, device=on),
    }
    return _chain(settings, makers)


def _of_all(settings: Mapping[str, Any], device: torch.device, *, first: bool) -> LogitsProcessorList:
    """Build the processors that treat each row's scores alike. first: none that look at tokens come before."""
    from transformers.generation import logits_process as made

    makers: dict[str, Callable[[Any], Any]] = {}
    if first:
        makers |= {
            "remove_invalid_values": lambda _: made.InfNanRemoveLogitsProcessor(),
            "suppress_tokens": lambda tokens: made.SuppressTokensLogitsProcessor(tokens, device=str(device)),
        }
    if settings.get("do_sample"):
        makers |= {
            "temperature": made.TemperatureLogitsWarper,
            "top_k": made.TopKLogitsWarper,
            "top_p": made.TopPLogitsWarper,
            "min_p": made.MinPLogitsWarper,
            "typical_p": made.TypicalLogitsWarper,
            "epsilon_cutoff": made.EpsilonLogitsWarper,
            "eta_cutoff": lambda epsilon: made.EtaLogitsWarper(epsilon=epsilon, device=str(device)),
        }
    return _chain(settings, {**makers, "renormalize_logits": lambda _: made.LogitNormalization()})


def _likeliest(scores: Tensor) -> Tensor:
    best = scores.max(dim=-1)
    return best.indices.masked_fill(best.values.isnan(), _NOT_FINITE)
