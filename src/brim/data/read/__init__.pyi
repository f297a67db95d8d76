from .arrow import read_columns as read_columns
from .columns import (
    cell_texts as cell_texts,
    kind_of as kind_of,
    nested_type as nested_type,
    nested_values as nested_values,
    nested_word as nested_word,
    of_one_kind as of_one_kind,
    without_origin as without_origin,
)
from .csv import has_decimal_commas as has_decimal_commas
from .files import (
    Data as Data,
    Files as Files,
    absolute_files as absolute_files,
    is_files as is_files,
    named_files as named_files,
    read as read,
)
from .json import DECODER as DECODER
from .ledger import (
    EVENTS as EVENTS,
    SCHEMA as SCHEMA,
    WAY_OUT as WAY_OUT,
    BadRowPolicy as BadRowPolicy,
    Entry as Entry,
    Ledger as Ledger,
    RowFaults as RowFaults,
    require_minority as require_minority,
)
from .source import (
    FIXED_VALUES as FIXED_VALUES,
    INPUT as INPUT,
    MAX_PLACES as MAX_PLACES,
    OUTPUT as OUTPUT,
    SPLITS as SPLITS,
    Column as Column,
    Source as Source,
    answer_column as answer_column,
    input_columns as input_columns,
    missing as missing,
    missing_of as missing_of,
    normal_split_value as normal_split_value,
    notes_on_mixed as notes_on_mixed,
    places as places,
    require_columns as require_columns,
    require_filled as require_filled,
    require_text as require_text,
    spellings as spellings,
)
from .spill import BATCH_ROWS as BATCH_ROWS, Keys as Keys, blocks as blocks, gather as gather
