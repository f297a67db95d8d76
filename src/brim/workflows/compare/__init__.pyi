from .results import CompareResult as CompareResult
from .run import compare as compare
