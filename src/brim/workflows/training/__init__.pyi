from .planning import plan as plan
from .training import prepared_for as prepared_for, train as train, train_configuration as train_configuration
