"""Generate as transformers does: in batches of a fixed size, and by continuous batching."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

Way = Literal["static", "by_length", "continuous"]

PAGE_TOKENS = 32  # of the continuous batches' cache
_MOST_PASS_TOKENS = 512  # that a pass of continuous batching reads, of prompts and of rows that write


def load(folder: Path) -> tuple[Any, Any]:
    """Load the model in fp32 and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def respond(
    way: Way, model: Any, prompts: Sequence[list[int]], *, batch_rows: int, settings: dict[str, Any]
) -> list[list[int]]:
    """Token ids after each prompt, up to and without the end token. settings: of transformers' GenerationConfig.

    static: in the order of the prompts. by_length: the longest first. continuous: batch_rows requests at most.
    """
    if way == "continuous":
        return _continuous(model, prompts, batch_rows, settings)
    order = list(range(len(prompts)))
    if way == "by_length":
        order.sort(key=lambda position: -len(prompts[position]))
    responses: dict[int, list[int]] = {}
    for start in range(0, len(order), batch_rows):
        chosen = order[start : start + batch_rows]
        responses.update(zip(chosen, generate(model, [prompts[i] for i in chosen], settings), strict=True))
    return [responses[position] for position in range(len(prompts))]


def generate(model: Any, prompts: Sequence[list[int]], settings: dict[str, Any]) -> Iterator[list[int]]:
    """Generate for one batch, padded on the left."""
    import torch
    from transformers import GenerationConfig

    longest = max(map(len, prompts))
    pad, end = settings["pad_token_id"], settings["eos_token_id"]
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    ids, mask = ids.to(model.device), mask.to(model.device)
    with torch.inference_mode():
        written = model.generate(input_ids=ids, attention_mask=mask, generation_config=GenerationConfig(**settings))
    return (_before(end, row) for row in written[:, longest:].tolist())


def _continuous(model: Any, prompts: Sequence[list[int]], batch_rows: int, settings: dict[str, Any]) -> list[list[int]]:
    """Generate with a cache that holds all requests at their longest, and no more: the rest takes 60% of the memory.

    Raises RuntimeError where a request comes back without its answer.
    """
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    pages = -(-(max(map(len, prompts)) + settings["max_new_tokens"]) // PAGE_TOKENS)
    config = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=pages * batch_rows,
        max_requests_per_batch=batch_rows,
        max_batch_tokens=max(_MOST_PASS_TOKENS, batch_rows),
        allow_block_sharing=False,  # no two prompts begin with a page of the same tokens
    )
    found = model.generate_batch(
        list(prompts),
        generation_config=GenerationConfig(**settings),
        continuous_batching_config=config,
    )
    errors = {answer.error for answer in found.values() if answer.error is not None}
    if errors or len(found) != len(prompts):
        raise RuntimeError(f"{len(found)} of {len(prompts)} requests came back; {'; '.join(sorted(errors))}")
    return [_before(settings["eos_token_id"], answer.generated_tokens) for answer in found.values()]


def _before(end: int, tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens
