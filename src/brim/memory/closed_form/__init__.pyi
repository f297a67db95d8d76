from .bound import forward_bound as forward_bound
from .breakdown import (
    Line as Line,
    Napkin as Napkin,
    napkin as napkin,
    optimizer_of as optimizer_of,
    settings_of as settings_of,
)
from .trained import Trained as Trained, optimizer_state as optimizer_state
