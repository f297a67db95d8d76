"""The two passes of generation that take the most: over prompts into a full cache, and over the last token of all."""

from __future__ import annotations

from collections.abc import Callable

from brim.infer.cache_shape import CacheShape
from brim.infer.next_token import NextToken, Writing
from brim.infer.passes import Passes

FILL, PREFILL, DECODE = "prefill 1", "prefill 2", "decode"


def peak_passes(
    passes: Passes,
    chooser: NextToken,
    shape: CacheShape,
    *,
    token_id: int = 0,
    begin: Callable[[str], None] = lambda label: None,
) -> None:
    """Reach the peak of a job in a few passes: what lies between takes less.

    passes: new, of the shape's rows and columns. begin: told FILL, when the cache comes to be, then PREFILL and DECODE.
    """
    cache = passes.cache
    begin(FILL)
    passes.lay_out(columns=shape.columns, end=shape.prompt_tokens)
    passes.prefill([[token_id]])
    passes.remove(0)
    cache.touch()
    begin(PREFILL)
    prompt = [token_id] * shape.prompt_tokens
    writing = [Writing(position=number, key=number, prompt=prompt) for number in range(shape.rows)]
    logits = passes.prefill([prompt] * shape.prompts)
    chooser.choose(logits, writing[: shape.prompts])
    del logits
    begin(DECODE)
    cache.starts = [0] * shape.rows
    passes.skip_to(shape.columns - 1)
    for row in writing:
        row.generated = [token_id] * (chooser.max_new_tokens - 1)
    chooser.choose(passes.decode([token_id] * shape.rows), writing)
    begin("over")
