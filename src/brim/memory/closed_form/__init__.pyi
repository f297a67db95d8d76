from .bound import forward_bound as forward_bound
from .breakdown import (
    Line as Line,
    Napkin as Napkin,
    counted_state_bytes as counted_state_bytes,
    napkin as napkin,
    settings_of as settings_of,
)
