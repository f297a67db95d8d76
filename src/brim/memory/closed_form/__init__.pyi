from .activations import kept_in_a_layer as kept_in_a_layer
from .architecture import (
    Architecture as Architecture,
    Trained as Trained,
    optimizer_state as optimizer_state,
    read_architecture as read_architecture,
)
from .breakdown import (
    Line as Line,
    Napkin as Napkin,
    Settings as Settings,
    napkin as napkin,
    optimizer_of as optimizer_of,
    settings_of as settings_of,
)
