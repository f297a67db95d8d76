"""From row scores to the figures that people compare: means over supervised tokens, with their uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brim.infer.evaluate import Scores

_NUM_RESAMPLES = 2000
_DRAWS_AT_ONCE = 2_000_000  # rows; bounds the memory on large data


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A 95% confidence interval."""

    low: float
    high: float


def summarize(scores: Scores) -> dict[str, float]:
    """Loss (nats a supervised token), perplexity, token accuracy, sequence accuracy, and what they are made of.

    Sequence accuracy is the share of rows of which every supervised token is the most probable one.
    """
    num_tokens = int(scores.num_supervised.sum())
    loss = float(scores.loss.sum()) / num_tokens
    return {
        "loss": loss,
        "perplexity": math.inf if loss > 700 else math.exp(loss),
        "token_accuracy": int(scores.num_correct.sum()) / num_tokens,
        "sequence_accuracy": float((scores.num_correct == scores.num_supervised).mean()),
        "num_rows": len(scores.keys),
        "num_supervised_tokens": num_tokens,
    }


def loss_interval(scores: Scores, *, seed: int = 0) -> Interval:
    """The loss's interval. Whole rows are drawn (percentile bootstrap), since the tokens of a row go together."""
    return ratio_interval(scores.loss, scores.num_supervised, seed=seed)


def ratio_interval(numerator: NDArray[np.floating], denominator: NDArray[np.integer], *, seed: int = 0) -> Interval:
    """The 95% percentile-bootstrap interval of sum(numerator) / sum(denominator) over rows drawn with replacement."""
    generator = np.random.default_rng(seed)
    num_rows = len(numerator)
    ratios = []
    at_once = max(1, _DRAWS_AT_ONCE // num_rows)
    for done in range(0, _NUM_RESAMPLES, at_once):
        drawn = generator.integers(0, num_rows, size=(min(at_once, _NUM_RESAMPLES - done), num_rows))
        ratios.append(numerator[drawn].sum(axis=1) / denominator[drawn].sum(axis=1))
    low, high = np.quantile(np.concatenate(ratios), [0.025, 0.975])
    return Interval(low=float(low), high=float(high))
