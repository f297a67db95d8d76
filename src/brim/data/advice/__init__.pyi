from .all import advise as advise, eos_text as eos_text
from .boundaries import Watcher as Watcher
from .finding import Bin as Bin, Finding as Finding, Slip as Slip, histogram as histogram, in_order as in_order
from .lengths import (
    Cut as Cut,
    cut_findings as cut_findings,
    cuts as cuts,
    lengths_before as lengths_before,
    no_room as no_room,
)
