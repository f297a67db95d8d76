from .arrow import read_columns as read_columns
from .columns import (
    cell_texts as cell_texts,
    kind_of as kind_of,
    nested_type as nested_type,
    nested_values as nested_values,
    nested_word as nested_word,
)
from .files import (
    Data as Data,
    Files as Files,
    absolute_files as absolute_files,
    is_files as is_files,
    named_files as named_files,
    read as read,
)
from .json import DECODER as DECODER
from .ledger import EVENTS as EVENTS, WAY_OUT as WAY_OUT, Entry as Entry, Ledger as Ledger, RowFaults as RowFaults
from .source import SPLITS as SPLITS, Source as Source, spellings as spellings, split_code as split_code
from .spill import BATCH_ROWS as BATCH_ROWS, blocks as blocks, gather as gather
