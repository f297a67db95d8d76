"""BLEU and ROUGE of generated texts against references."""

from __future__ import annotations

from collections.abc import Sequence


def text_metrics(responses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Corpus BLEU (sacrebleu, 0 to 100), mean ROUGE-1, -2 and -L F-measures (rouge-score, 0 to 1), exact match.

    responses, references: texts in the same order. Both are compared with outer white space taken off.
    """
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU

    responses, references = [text.strip() for text in responses], [text.strip() for text in references]
    names = ["rouge1", "rouge2", "rougeL"]
    scorer = RougeScorer(names)
    rouge = [scorer.score(reference, response) for reference, response in zip(references, responses, strict=True)]
    return {
        "bleu": BLEU().corpus_score(responses, [references]).score,
        **{name: sum(scores[name].fmeasure for scores in rouge) / len(rouge) for name in names},
        "exact_match": sum(a == b for a, b in zip(references, responses, strict=True)) / len(references),
    }
