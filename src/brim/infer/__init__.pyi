from .activations import (
    LayerName as LayerName,
    Pooling as Pooling,
    VectorStore as VectorStore,
    collect_activations as collect_activations,
    first_vectors as first_vectors,
    named_layers as named_layers,
)
from .evaluate import (
    BATCH_TOKENS as BATCH_TOKENS,
    Divergence as Divergence,
    LabelCounts as LabelCounts,
    Runner as Runner,
    Scores as Scores,
    divergence as divergence,
    exact_match as exact_match,
    extract as extract,
    label_column as label_column,
    label_measures as label_measures,
    label_reader as label_reader,
    logits_of as logits_of,
    rows_to_score as rows_to_score,
    score_batches as score_batches,
    score_measures as score_measures,
    score_rows as score_rows,
    summarize as summarize,
    text_measures as text_measures,
)
from .journal import (
    EMPTY_BYTES as EMPTY_BYTES,
    DoneRows as DoneRows,
    HeldRecords as HeldRecords,
    Journal as Journal,
    Records as Records,
    prompt_hash as prompt_hash,
    response_bytes as response_bytes,
    response_of as response_of,
    score_bytes as score_bytes,
    score_of as score_of,
)
from .statistics import (
    Interval as Interval,
    Measure as Measure,
    intervals as intervals,
    mean_interval as mean_interval,
    paired_intervals as paired_intervals,
    ratio as ratio,
)
from .stream import GrowingText as GrowingText, KeptCache as KeptCache, stream_tokens as stream_tokens
