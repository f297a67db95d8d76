"""A cache and a pass over prompts into it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """A cache, and the prompts of a pass."""

    rows: int
    columns: int
    prompts: int  # that are read together; no more than rows
    prompt_tokens: int  # of each; fewer than there are columns

    def __post_init__(self) -> None:
        assert 0 < self.prompts <= self.rows, "each prompt has a slot"
        assert 0 < self.prompt_tokens <= self.columns, "each prompt has its columns"
