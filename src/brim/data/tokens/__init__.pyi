from .encoder import (
    TextEncoder as TextEncoder,
    load_encoder as load_encoder,
    require_same_tokens as require_same_tokens,
)
from .rows import (
    Batch as Batch,
    PromptBatch as PromptBatch,
    TokenRow as TokenRow,
    TokenRows as TokenRows,
    collate as collate,
    collate_prompts as collate_prompts,
    pack as pack,
    random_order as random_order,
    rows_of_step as rows_of_step,
)
from .tokenization import (
    Chat as Chat,
    Findings as Findings,
    Limit as Limit,
    Limits as Limits,
    Piece as Piece,
    Texts as Texts,
    label_room as label_room,
    label_tokens as label_tokens,
    learned_label_room as learned_label_room,
    tokenize as tokenize,
)
