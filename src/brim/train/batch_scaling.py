"""By what the learning rate is multiplied at another batch than the final one."""

from __future__ import annotations

import math
from typing import Literal

BatchScaling = Literal["none", "sqrt", "linear"]


def batch_factor(scaling: BatchScaling, *, size: int, final_size: int) -> float:
    """1 at the final size, and always with `none`.

    size: rows of a step as the schedule says, not those that the end of an epoch leaves of it.
    The square root suits Adam (Malladi et al. 2022, arXiv 2205.10287), the linear rule SGD (Goyal et al. 2017,
    arXiv 1706.02677); both keep the gradient's noise in an epoch, and neither holds above the noise scale.
    """
    if scaling == "none" or size == final_size:
        return 1.0
    share = size / final_size
    return math.sqrt(share) if scaling == "sqrt" else share
