from .keys import (
    DATA_FILES as DATA_FILES,
    ForeignKey as ForeignKey,
    Help as Help,
    Lines as Lines,
    foreign_keys as foreign_keys,
    foreign_values as foreign_values,
)
