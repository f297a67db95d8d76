"""The largest shapes and devices that are predicted for: what lies beyond them is a slip of the pen.

They also keep what is counted within 63 bits, which fake tensors and the simulated allocator's addresses need.
"""

MOST_ROWS = 2**20
MOST_TOKENS = 2**31  # of a micro-batch, all rows together: their numbers alone take 16 GiB
MOST_GPUS = 2**16
MOST_MEMORY_BYTES = 2**50  # of a device
MOST_MADE_UP = 10_000_000  # rows of a data set that is not there
