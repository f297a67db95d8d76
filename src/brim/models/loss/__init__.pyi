from .chunked import chunk_rows as chunk_rows, fullest_chunks as fullest_chunks
from .next_token import (
    LogitHead as LogitHead,
    NextToken as NextToken,
    NoLogitHead as NoLogitHead,
    base_model as base_model,
    logit_head as logit_head,
    positions_of as positions_of,
    target_logits as target_logits,
)
