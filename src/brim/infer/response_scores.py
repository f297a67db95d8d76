"""How probable the model itself finds responses: a pass over each prompt and its response, after all are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from brim.data import TokenRow, TokenRows
from brim.data.rows import SCHEMA, batch_of
from brim.data.spill import gather
from brim.infer.response import Response

# Of a batch, padding included. A pass saturates a device at 1,000 to 4,000 tokens (DESIGN.md, where speed comes from).
# A plan has a say in it only where memory holds less: what rows share a batch changes the last bits of their sums.
BATCH_TOKENS = 4096
_BLOCK_ROWS = 1024


def rows_to_score(prompts: TokenRows, response: Callable[[int], Response]) -> TokenRows:
    """Each prompt with its response, and the token that ended it, which are to be predicted."""
    return TokenRows(gather(_batches(prompts, response), schema=SCHEMA))


def score_batches(lengths: NDArray[np.int64], *, most_tokens: int = BATCH_TOKENS) -> Iterator[NDArray[np.intp]]:
    """Positions of rows of like length, the longest first: rows × longest is at most `most_tokens`, or it is one row.

    Nothing but the lengths has a say in them.
    """
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        end = start + max(1, most_tokens // max(1, int(lengths[order[start]])))
        yield order[start:end]
        start = end


def _batches(prompts: TokenRows, response: Callable[[int], Response]) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(prompts), _BLOCK_ROWS):
        end = min(start + _BLOCK_ROWS, len(prompts))
        yield batch_of([_joined(prompts[position], response(position)) for position in range(start, end)])


def _joined(prompt: TokenRow, response: Response) -> TokenRow:
    ending = [] if response.end_id is None else [response.end_id]
    written = np.asarray([*response.token_ids, *ending], dtype=np.int32)
    tokens = np.concatenate([prompt.input_ids, written])
    return replace(prompt, input_ids=tokens, supervised=np.arange(len(tokens)) >= len(prompt.input_ids))
