"""Data sets: read, rendered, tokenized, split; and a record of what was cut or dropped."""

from brim.data.check import CheckReport, check_data
from brim.data.encoder import TextEncoder, load_encoder
from brim.data.known_labels import slip_notes, with_labels_of_data
from brim.data.ledger import Entry, Ledger
from brim.data.order import rows_of_step
from brim.data.prepare import Prepared, Tokenized, prepare, prompts_of, texts_as_source
from brim.data.read import Data, read
from brim.data.rows import TokenRow, TokenRows, made_up_rows
from brim.data.source import Source
from brim.data.usable import data_problems

__all__ = [
    "CheckReport",
    "Data",
    "Entry",
    "Ledger",
    "Prepared",
    "Source",
    "TextEncoder",
    "TokenRow",
    "TokenRows",
    "Tokenized",
    "check_data",
    "data_problems",
    "load_encoder",
    "made_up_rows",
    "prepare",
    "prompts_of",
    "read",
    "rows_of_step",
    "slip_notes",
    "texts_as_source",
    "with_labels_of_data",
]
