from .keys import ForeignKey as ForeignKey, foreign_keys as foreign_keys, foreign_values as foreign_values
from .values import DATA_FILES as DATA_FILES, Help as Help, Lines as Lines
