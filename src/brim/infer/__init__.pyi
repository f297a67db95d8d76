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
    exact_match as exact_match,
    label_measures as label_measures,
    label_reader as label_reader,
    rows_to_score as rows_to_score,
    score_batches as score_batches,
    score_rows as score_rows,
    text_measures as text_measures,
)
from .journal import (
    DoneRows as DoneRows,
    HeldRecords as HeldRecords,
    Journal as Journal,
    Records as Records,
    prompt_hash as prompt_hash,
    score_bytes as score_bytes,
    score_of as score_of,
)
from .statistics import (
    Interval as Interval,
    Measure as Measure,
    intervals as intervals,
    paired_intervals as paired_intervals,
)
from .stream import GrowingText as GrowingText, KeptCache as KeptCache, stream_tokens as stream_tokens
