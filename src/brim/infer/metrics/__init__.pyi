from .answers import (
    Interval as Interval,
    LabelCounts as LabelCounts,
    Measure as Measure,
    exact_match as exact_match,
    intervals as intervals,
    label_measures as label_measures,
    label_reader as label_reader,
    paired_intervals as paired_intervals,
    text_measures as text_measures,
)
from .scores import (
    BATCH_TOKENS as BATCH_TOKENS,
    Divergence as Divergence,
    Runner as Runner,
    Scores as Scores,
    rows_to_score as rows_to_score,
    score_batches as score_batches,
    score_rows as score_rows,
)
