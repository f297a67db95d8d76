"""The first and the last pass of a job, as the job would make them."""

import torch

from brim.infer.engines import NextToken, Passes
from brim.memory.trace.generation import worst_case

SETTINGS = {"max_new_tokens": 6, "do_sample": False, "num_beams": 1, "pad_token_id": 1, "eos_token_id": [0]}


def test_prompts_are_read_in_groups_and_the_last_token_sees_every_column(model, on_cpu):
    seen = []
    handle = model.register_forward_pre_hook(
        lambda module, args, given: seen.append((*given["input_ids"].shape, given["attention_mask"].shape[1])),
        with_kwargs=True,
    )
    passes = Passes(model, rows=5, columns=15, pad_id=1, **on_cpu)
    chooser = NextToken(SETTINGS, seed=0, device=torch.device("cpu"))
    try:
        worst_case(passes, chooser, rows=5, prompt_tokens=10, prefill_tokens=25)
    finally:
        handle.remove()
    assert seen == [(2, 10, 10), (2, 10, 10), (1, 10, 10), (5, 1, 15)]
