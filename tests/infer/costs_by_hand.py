"""What a cache takes, in numbers that can be checked by hand."""

from brim.batching import Surface
from brim.infer.engines import CacheCosts

# A pass takes 10 bytes for each token of a prompt; a step 100 for each row and 1 for each of its columns.
PREFILL = Surface(base=0.0, lengths=(8,), tokens=((1, 1000),), values=((10.0, 10_000.0),))
STEP = Surface(
    base=0.0,
    lengths=(10, 30),
    tokens=((1, 1000), (1, 1000)),  # rows
    values=((110.0, 110_000.0), (130.0, 130_000.0)),
)


def costs(**given):
    return CacheCosts(
        **{
            "static_bytes": 1000,
            "cell_bytes": 2.0,
            "prefill": PREFILL,
            "step": STEP,
            "prefill_tokens": 40,
            "response_columns": 10,
            "shortest_tokens": 20,
            **given,
        }
    )
