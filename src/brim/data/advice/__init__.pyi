from .facts import Watcher as Watcher
from .finding import Bin as Bin, Finding as Finding, Slip as Slip, in_order as in_order
from .lengths import Cut as Cut, look_at_cuts as look_at_cuts, no_room as no_room
from .rows import advise as advise
