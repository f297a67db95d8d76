from .keys import FOREIGN_KEYS as FOREIGN_KEYS, FOREIGN_VALUES as FOREIGN_VALUES, ForeignKey as ForeignKey
from .values import DATA_FILES as DATA_FILES, Help as Help, Lines as Lines
