from .facts import Watcher as Watcher
from .finding import (
    Bin as Bin,
    Cut as Cut,
    Finding as Finding,
    Slip as Slip,
    in_order as in_order,
    look_at_cuts as look_at_cuts,
    no_room as no_room,
)
from .rows import advise as advise
