from .check import CheckReport as CheckReport, check_data as check_data
from .labels import slip_notes as slip_notes, with_labels_of_data as with_labels_of_data
from .preparation import (
    Prepared as Prepared,
    prepare as prepare,
    prompts_of as prompts_of,
    texts_as_source as texts_as_source,
)
from .prompts import prompter as prompter
from .split import Split as Split, check_split as check_split, data_problems as data_problems
