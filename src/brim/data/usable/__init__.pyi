from .labels import (
    counted as counted,
    require_labels as require_labels,
    rows_at as rows_at,
    rows_with as rows_with,
)
from .rows import (
    Column as Column,
    assign_splits as assign_splits,
    leaving_none_unasked as leaving_none_unasked,
    require_filled as require_filled,
    sampled_rows as sampled_rows,
    usable as usable,
    with_usable_splits as with_usable_splits,
)
from .unusable import (
    bad_rows as bad_rows,
    bounded as bounded,
    few_of as few_of,
    require_fitting as require_fitting,
    require_learnable as require_learnable,
    without_faulty as without_faulty,
    without_missing as without_missing,
    without_unusable as without_unusable,
)
