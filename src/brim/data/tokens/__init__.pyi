from .encoder import (
    TextEncoder as TextEncoder,
    load_encoder as load_encoder,
    require_same_tokens as require_same_tokens,
)
from .rows import (
    SCHEMA as SCHEMA,
    Batch as Batch,
    Chat as Chat,
    Piece as Piece,
    PromptBatch as PromptBatch,
    Texts as Texts,
    TokenRow as TokenRow,
    TokenRows as TokenRows,
    batch_of as batch_of,
    collate as collate,
    collate_prompts as collate_prompts,
    made_up_rows as made_up_rows,
    random_order as random_order,
    rows_of_step as rows_of_step,
)
from .tokenization import (
    Findings as Findings,
    Limit as Limit,
    Limits as Limits,
    Policy as Policy,
    Tokens as Tokens,
    label_room as label_room,
    label_tokens as label_tokens,
    learned_label_room as learned_label_room,
    tokenize as tokenize,
)
