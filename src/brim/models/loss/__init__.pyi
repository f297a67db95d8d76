from .chunked import chunk_rows as chunk_rows, fullest_chunks as fullest_chunks
from .next_token import (
    LogitHead as LogitHead,
    NoLogitHead as NoLogitHead,
    base_model as base_model,
    logit_head as logit_head,
    next_token_loss as next_token_loss,
    next_token_scores as next_token_scores,
    positions_of as positions_of,
    target_logits as target_logits,
)
