"""BLEU, ROUGE and exact match of generated texts against references."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from brim.infer.bootstrap import Floats, Measure, ratio

_ROUGE = ("rouge1", "rouge2", "rougeL")
_ORDERS = 4  # of BLEU's n-grams


def text_metrics(responses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """The values of `text_measures`."""
    return {name: measure.value for name, measure in text_measures(responses, references).items()}


def text_measures(responses: Sequence[str], references: Sequence[str]) -> dict[str, Measure]:
    """Corpus BLEU (sacrebleu, 0 to 100), mean ROUGE-1, -2 and -L F-measures (rouge-score, 0 to 1), exact match.

    responses, references: texts in the same order. Both are compared with outer white space taken off.
    """
    from rouge_score.rouge_scorer import RougeScorer

    responses, references = [text.strip() for text in responses], [text.strip() for text in references]
    scorer = RougeScorer(list(_ROUGE))
    rouge = [scorer.score(reference, response) for reference, response in zip(references, responses, strict=True)]
    return {
        "bleu": _bleu(_bleu_counts(responses, references)),
        **{name: ratio(np.array([scores[name].fmeasure for scores in rouge])) for name in _ROUGE},
        "exact_match": exact_match(responses, references),
    }


def exact_match(responses: Sequence[str], references: Sequence[str]) -> Measure:
    """The share of texts that are equal but for outer white space."""
    pairs = zip(responses, references, strict=True)
    return ratio(np.array([response.strip() == reference.strip() for response, reference in pairs]))


def _bleu_counts(responses: Sequence[str], references: Sequence[str]) -> Floats:
    """[N, 10]: of each row, n-grams that are right and n-grams that there are, of four orders; words; words wanted."""
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
    """[B] from [B, 10], as sacrebleu computes it: orders without a hit count as 1/2, 1/4, … of a hit (Lin, Och 2004).

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
