from .cells import Feature as Feature
from .columns import (
    Output as Output,
    Scale as Scale,
    TableColumn as TableColumn,
    TableColumns as TableColumns,
)
from .preparation import PreparedTable as PreparedTable, prepare_table as prepare_table
from .rows import TableBatch as TableBatch, TableRows as TableRows
