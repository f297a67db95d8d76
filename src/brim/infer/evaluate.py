"""Score rows in one forward pass each, and compute the metrics that people compare.

Losses and hits are means over supervised tokens. For a category, labels are read from the model's texts, and their
accuracy and F1 are computed. Generated texts are compared with references by BLEU, ROUGE and exact match. How
probable the model finds responses is computed by a pass over each prompt and its response, after all are written.

How far one model's predictions are from another's is computed on the same tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from brim.config.prompts import MAX_STEPS, LabelReader
from brim.config.schema import Config, OutputFeature
from brim.data.tokens import TokenRow, TokenRows, collate
from brim.infer.engines import Batches, Response, RowsAtOnce, longest_first
from brim.infer.statistics import Floats, Measure
from brim.models import Precision
from brim.models.loss import LogitHead, next_token_scores, target_logits

_MOST_TOKENS = 4096


_MOST_BYTES = 512 << 20  # of logits kept in main memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Measure what separates two models, over the tokens that both predicted."""

    num_tokens: int
    mean_kl: float  # nats a token: what the second model's loss exceeds the first's by, were the first one the truth
    same_top: float  # share of tokens whose likeliest prediction is the same
    max_logit_difference: float

    @classmethod
    def between(cls, first: Sequence[Tensor], second: Iterator[Tensor]) -> Divergence:
        """Compare logits [S, V] of the same tokens, batch by batch; sums in fp64. NaN where either model gives NaN."""
        num_tokens = num_same = 0
        kl = largest = 0.0
        for one, other in zip(first, second, strict=True):
            log_p, log_q = (logits.double().log_softmax(dim=-1) for logits in (one, other))
            kl += float((log_p.exp() * (log_p - log_q)).sum())
            difference = float((one - other).abs().max()) if len(one) else 0.0
            largest = difference if math.isnan(difference) else max(largest, difference)
            num_same += int((one.argmax(dim=-1) == other.argmax(dim=-1)).sum())
            num_tokens += len(one)
        return cls(
            num_tokens=num_tokens,
            mean_kl=max(0.0, kl / num_tokens) if num_tokens and not math.isnan(kl) else math.nan,
            same_top=num_same / num_tokens if num_tokens else math.nan,
            max_logit_difference=largest,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Run rows through a model, some at a time."""

    pad_id: int
    batch_rows: int
    device: torch.device

    def logits(self, model: nn.Module, rows: TokenRows, precision: Precision) -> Iterator[Tensor]:
        """Yield logits [S, V], fp32 in main memory, of the supervised tokens, batch by batch in the order of the rows.

        After 4,096 tokens, or half a GiB, there are no more. A batch that runs out of memory is run in parts, and comes
        out as one. Raises OutOfMemoryError when a row alone runs out of memory.
        """
        left: int | None = None
        at_once = RowsAtOnce(self.batch_rows)
        for start in range(0, len(rows), self.batch_rows):
            parts: list[Tensor] = []

            def run(positions: NDArray[np.intp], parts: list[Tensor] = parts) -> None:
                nonlocal left
                batch = collate([rows[int(i)] for i in positions], pad_id=self.pad_id).to(self.device)
                with torch.no_grad(), precision.autocast(self.device, keeps_copies=False):
                    logits = target_logits(model, batch)
                if left is None:
                    left = max(1, min(_MOST_TOKENS, _MOST_BYTES // (4 * logits.shape[-1])))
                parts.append(logits[:left].float().cpu())
                left -= len(parts[-1])

            at_once.run(rows, np.arange(start, min(start + self.batch_rows, len(rows))), run, doing="evaluation")
            yield parts[0] if len(parts) == 1 else torch.cat(parts)
            if left == 0:
                return


def label_measures(predictions: Sequence[str], references: Sequence[str]) -> dict[str, Measure]:
    """Return accuracy, and F1 as the mean over the labels that occur on either side, whatever their number of rows."""
    names = sorted({*predictions, *references})
    number = {name: position for position, name in enumerate(names)}
    predicted = np.array([number[name] for name in predictions], dtype=np.int64)
    wanted = np.array([number[name] for name in references], dtype=np.int64)
    # Rows with the same two labels are alike, so that few pairs stand for all rows.
    pairs, pair_of_row = np.unique(wanted * len(names) + predicted, return_inverse=True)
    pairs_wanted, pairs_predicted = np.divmod(pairs, len(names))
    is_right = (pairs_wanted == pairs_predicted).astype(np.float64)
    is_wanted, is_predicted = np.eye(len(names))[pairs_wanted], np.eye(len(names))[pairs_predicted]

    def pair_counts(counts: Floats) -> Floats:
        return np.stack([np.bincount(pair_of_row, weights=each, minlength=len(pairs)) for each in counts])

    def accuracy(counts: Floats) -> Floats:
        return np.asarray(pair_counts(counts) @ is_right / counts.sum(axis=1))

    def macro_f1(counts: Floats) -> Floats:
        by_pair = pair_counts(counts)
        right = (by_pair * is_right) @ is_wanted
        # 2 TP / (2 TP + FP + FN): what was wanted and what was predicted, together.
        there = by_pair @ is_wanted + by_pair @ is_predicted
        with np.errstate(invalid="ignore"):
            f1 = np.where(there > 0, 2 * right / there, 0.0)
        return np.asarray(f1.sum(axis=1) / (there > 0).sum(axis=1))

    once = np.ones((1, len(predicted)))
    return {
        "category_accuracy": Measure(value=float(accuracy(once)[0]), of=accuracy),
        "macro_f1": Measure(value=float(macro_f1(once)[0]), of=macro_f1),
    }


_CONSTRAIN = "output_features.0.decoder.constrain_to_vocabulary"


@dataclass(slots=True, kw_only=True)
class LabelCounts:
    """Count labels, and the texts that named none."""

    labels: Counter[str] = field(default_factory=Counter)
    num_fallback: int = 0  # texts in which no rule finds a label
    num_partial: int = 0  # texts of which a regular expression saw only the beginning, and no rule before it fits

    def extract(self, texts: Sequence[str], reader: LabelReader) -> list[str]:
        """Return the label of each text, which depends on the text alone, and count them."""
        labels = []
        for text in texts:
            reading = reader.read(text)
            self.labels[reading.label] += 1
            self.num_fallback += reading.is_fallback
            self.num_partial += reading.is_partial
            labels.append(reading.label)
        return labels

    def record(self) -> dict[str, Any]:
        """Return the counts for a summary, the most frequent label first."""
        return {
            "labels": dict(self.labels.most_common()),
            "num_fallback": self.num_fallback,
            "num_looked_at_in_part": self.num_partial,
        }

    def notes(self, feature: OutputFeature) -> list[str]:
        """Return notes for people on the labels; where responses name none, with the setting that leads to one."""
        num_texts = self.labels.total()
        decoder = feature.categories
        notes = []
        if self.num_fallback:
            note = f"{self.num_fallback:,} of {num_texts:,} responses name no label and got the fallback label"
            if decoder is None or not decoder.constrain_to_vocabulary:
                note += f"; with {_CONSTRAIN}=true the model can write nothing but labels"
            notes.append(note)
        if self.num_partial:
            notes.append(
                f"{self.num_partial:,} of {num_texts:,} responses are so long that a regular expression could take "
                f"over {MAX_STEPS:,} steps; only their beginning was searched"
            )
        return notes


def label_reader(config: Config) -> LabelReader | None:
    """Return what finds labels in the model's texts; None where these are the answers themselves."""
    is_category = config.chat is None and config.output_features[0].categories is not None
    return LabelReader(config.output_features[0]) if is_category else None


_LARGEST = 700.0  # exp of more overflows


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Hold sums over the supervised tokens of each row, in the order of the rows."""

    keys: NDArray[np.int64]  # row numbers in the data
    loss: NDArray[np.float64]  # nats
    num_correct: NDArray[np.int64]  # tokens that the model finds most probable
    num_supervised: NDArray[np.int64]

    def summary(self) -> dict[str, float]:
        """Return loss (nats per supervised token), perplexity, token and sequence accuracy, and what they are made of.

        Sequence accuracy is the share of rows of which every supervised token is the most probable one.
        """
        num_tokens = int(self.num_supervised.sum())
        loss = float(self.loss.sum()) / num_tokens
        return {
            "loss": loss,
            "perplexity": math.inf if loss > _LARGEST else math.exp(loss),
            "token_accuracy": int(self.num_correct.sum()) / num_tokens,
            "sequence_accuracy": float((self.num_correct == self.num_supervised).mean()),
            "num_rows": len(self.keys),
            "num_supervised_tokens": num_tokens,
        }

    def measures(self) -> dict[str, Measure]:
        """Return the same figures, without what they are made of."""
        figures = self.summary()
        loss = Measure.ratio(self.loss, self.num_supervised)

        def perplexity(counts: Floats) -> Floats:
            losses = loss.of(counts)
            return np.where(losses > _LARGEST, math.inf, np.exp(np.minimum(losses, _LARGEST)))

        return {
            "loss": loss,
            "perplexity": Measure(value=figures["perplexity"], of=perplexity),
            "token_accuracy": Measure.ratio(self.num_correct, self.num_supervised),
            "sequence_accuracy": Measure.ratio(self.num_correct == self.num_supervised),
        }


def score_rows(
    model: nn.Module,
    rows: TokenRows,
    *,
    pad_id: int,
    batches: Batches,
    device: torch.device,
    precision: Precision,
    head: LogitHead | None = None,
    on_batch: Callable[[int], None] = lambda rows: None,
) -> Scores:
    """Score each row under teacher forcing, without gradients; the model's training mode is left as it was.

    Rows of like length share a batch, and fewer of them once memory has run out. Logits are reduced where they arise;
    in chunks, where the model's head is given. on_batch: called with how many more rows are done.
    Raises OutOfMemoryError when a row alone runs out of memory.
    """
    num_rows = len(rows)
    loss = np.zeros(num_rows)
    num_correct, num_supervised = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)

    def score(positions: NDArray[np.intp]) -> None:
        batch = collate([rows[int(i)] for i in positions], pad_id=pad_id).to(device)
        with torch.no_grad(), precision.autocast(device, keeps_copies=False):
            scores = next_token_scores(model, batch, head=head)
        loss[positions] = scores.loss.cpu().numpy()
        num_correct[positions] = scores.num_correct.cpu().numpy()
        num_supervised[positions] = scores.num_supervised.cpu().numpy()
        on_batch(len(positions))

    was_training = model.training
    model.eval()
    try:
        batches.run(rows, longest_first(rows), score, doing="evaluation")
    finally:
        model.train(was_training)
    return Scores(keys=np.asarray(rows.keys), loss=loss, num_correct=num_correct, num_supervised=num_supervised)


# Of a batch, padding included. A pass saturates a device at 1,000 to 4,000 tokens (DESIGN.md, where speed comes from).
# A plan lowers it only where memory holds less: which rows share a batch changes the last bits of their sums.
BATCH_TOKENS = 4096


_BLOCK_ROWS = 1024


def rows_to_score(prompts: TokenRows, response: Callable[[int], Response]) -> TokenRows:
    """Join each prompt with its response and the token that ended it; these are supervised."""
    return TokenRows.from_blocks(_batches(prompts, response))


def score_batches(lengths: NDArray[np.int64], *, most_tokens: int = BATCH_TOKENS) -> Iterator[NDArray[np.intp]]:
    """Yield positions of rows of like length, the longest first: rows × longest is at most `most_tokens`, or one row.

    They depend on the lengths alone.
    """
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        end = start + max(1, most_tokens // max(1, int(lengths[order[start]])))
        yield order[start:end]
        start = end


def _batches(prompts: TokenRows, response: Callable[[int], Response]) -> Iterator[list[TokenRow]]:
    for start in range(0, len(prompts), _BLOCK_ROWS):
        end = min(start + _BLOCK_ROWS, len(prompts))
        yield [_joined(prompts[position], response(position)) for position in range(start, end)]


def _joined(prompt: TokenRow, response: Response) -> TokenRow:
    ending = [] if response.end_id is None else [response.end_id]
    written = np.asarray([*response.token_ids, *ending], dtype=np.int32)
    tokens = np.concatenate([prompt.input_ids, written])
    return replace(prompt, input_ids=tokens, supervised=np.arange(len(tokens)) >= len(prompt.input_ids))


_ROUGE = ("rouge1", "rouge2", "rougeL")


_ORDERS = 4  # of BLEU's n-grams


def text_measures(responses: Sequence[str], references: Sequence[str]) -> dict[str, Measure]:
    """Return corpus BLEU (sacrebleu, 0 to 100), mean ROUGE-1, -2 and -L F-measures (rouge-score, 0 to 1), exact match.

    responses, references: texts in the same order. Both are compared with outer white space taken off.
    """
    from rouge_score.rouge_scorer import RougeScorer

    responses, references = [text.strip() for text in responses], [text.strip() for text in references]
    scorer = RougeScorer(list(_ROUGE))
    rouge = [scorer.score(reference, response) for reference, response in zip(references, responses, strict=True)]
    return {
        "bleu": _bleu(_bleu_counts(responses, references)),
        **{name: Measure.ratio(np.array([scores[name].fmeasure for scores in rouge])) for name in _ROUGE},
        "exact_match": exact_match(responses, references),
    }


def exact_match(responses: Sequence[str], references: Sequence[str]) -> Measure:
    """Return the share of texts that are equal but for outer white space."""
    pairs = zip(responses, references, strict=True)
    return Measure.ratio(np.array([response.strip() == reference.strip() for response, reference in pairs]))


def _bleu_counts(responses: Sequence[str], references: Sequence[str]) -> Floats:
    """Return [N, 10]: right n-grams and all n-grams of each row, of four orders; words; words of the reference."""
    from sacrebleu.metrics import BLEU

    bleu = BLEU()
    found = [
        bleu.corpus_score([response], [[reference]]) for response, reference in zip(responses, references, strict=True)
    ]
    return np.array([[*score.counts, *score.totals, score.sys_len, score.ref_len] for score in found], dtype=np.float64)


def _bleu(counts: Floats) -> Measure:
    def of(rows: Floats) -> Floats:
        return _bleu_of_sums(rows @ counts)

    return Measure(value=float(_bleu_of_sums(counts.sum(axis=0)[None])[0]), of=of)


def _bleu_of_sums(sums: Floats) -> Floats:
    """Return [B] of [B, 10], as sacrebleu does: orders without a hit count as 1/2, 1/4, … of a hit (Lin, Och 2004).

    Without a hit of any order, and where no text has so many words that there is an n-gram of an order, it is 0.
    """
    right, there = sums[:, :_ORDERS], sums[:, _ORDERS : 2 * _ORDERS]
    words, wanted = sums[:, -2], sums[:, -1]
    halvings = np.cumsum(right == 0, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        precisions = np.where(right == 0, 0.5**halvings, right) / there
        penalty = np.exp(np.minimum(1 - wanted / words, 0))
        scores = 100 * penalty * np.exp(np.log(precisions).mean(axis=1))
    return np.where(right.any(axis=1) & there.all(axis=1), scores, 0.0)
