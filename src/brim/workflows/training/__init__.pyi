from .following import among as among
from .planning import plan as plan
from .training import (
    export_trained as export_trained,
    prepared_for as prepared_for,
    train as train,
    train_configuration as train_configuration,
)
