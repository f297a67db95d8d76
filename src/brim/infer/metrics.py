"""From row scores to the figures that people compare: means over supervised tokens."""

from __future__ import annotations

import math

import numpy as np

from brim.infer.bootstrap import Floats, Interval, Measure, ratio, ratio_interval
from brim.infer.evaluate import Scores

_LARGEST = 700.0  # exp of more is no number


def summarize(scores: Scores) -> dict[str, float]:
    """Loss (nats a supervised token), perplexity, token accuracy, sequence accuracy, and what they are made of.

    Sequence accuracy is the share of rows of which every supervised token is the most probable one.
    """
    num_tokens = int(scores.num_supervised.sum())
    loss = float(scores.loss.sum()) / num_tokens
    return {
        "loss": loss,
        "perplexity": math.inf if loss > _LARGEST else math.exp(loss),
        "token_accuracy": int(scores.num_correct.sum()) / num_tokens,
        "sequence_accuracy": float((scores.num_correct == scores.num_supervised).mean()),
        "num_rows": len(scores.keys),
        "num_supervised_tokens": num_tokens,
    }


def score_measures(scores: Scores) -> dict[str, Measure]:
    """The same figures, but for what they are made of."""
    figures = summarize(scores)
    loss = ratio(scores.loss, scores.num_supervised)

    def perplexity(counts: Floats) -> Floats:
        losses = loss.of(counts)
        return np.where(losses > _LARGEST, math.inf, np.exp(np.minimum(losses, _LARGEST)))

    return {
        "loss": loss,
        "perplexity": Measure(value=figures["perplexity"], of=perplexity),
        "token_accuracy": ratio(scores.num_correct, scores.num_supervised),
        "sequence_accuracy": ratio(scores.num_correct == scores.num_supervised),
    }


def loss_interval(scores: Scores, *, seed: int = 0) -> Interval:
    """The loss's interval. Whole rows are drawn, since the tokens of a row go together."""
    return ratio_interval(scores.loss, scores.num_supervised, seed=seed)
