"""The most that generating with a cache of R rows × C columns takes, reached by its first and its last pass."""

from __future__ import annotations

from brim.infer.next_token import NextToken, Writing
from brim.infer.passes import Passes
from brim.infer.refill import prefill_groups


def worst_case(
    passes: Passes, chooser: NextToken, *, rows: int, prompt_tokens: int, prefill_tokens: int, token_id: int = 0
) -> None:
    """Read `rows` prompts of `prompt_tokens` as a job would, and write the last token that the columns have room for.

    passes: new, of the rows and columns that are meant. The tokens between the first and the last are left out: each
    takes less than the last, and the cache's memory is there from the beginning.
    """
    prompt = [token_id] * prompt_tokens
    writing = [Writing(position=number, key=number, prompt=prompt) for number in range(rows)]
    passes.lay_out(columns=passes.cache.columns, end=prompt_tokens)
    for group in prefill_groups([prompt_tokens] * rows, most_tokens=prefill_tokens):
        chooser.choose(passes.prefill([prompt] * len(group)), [writing[number] for number in group])
    last = passes.cache.columns
    if last > prompt_tokens:
        passes.skip_to(last - 1)
        chooser.choose(passes.decode([token_id] * rows), writing)
