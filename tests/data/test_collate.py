"""Rows as padded tensors."""

import numpy as np
import torch

from brim.data.collate import collate, collate_prompts
from brim.data.rows import TokenRow


def row(ids, num_prompt):
    return TokenRow(key=0, input_ids=np.asarray(ids, dtype=np.int32), supervised=np.arange(len(ids)) >= num_prompt)


def test_rows_are_padded_on_the_right_and_learned_by_position():
    pad_and_eos = 1
    batch = collate([row([5, 6, 7, pad_and_eos], 2), row([8, pad_and_eos], 1)], pad_id=pad_and_eos)
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert batch.input_ids.tolist() == [[5, 6, 7, 1], [8, 1, 1, 1]]
    assert batch.labels.tolist() == [[-100, -100, 7, 1], [-100, 1, -100, -100]]


def test_prompts_are_padded_on_the_left_and_end_before_the_answer():
    batch = collate_prompts([row([5, 6, 7, 1], 3), row([8, 1], 1), row([9], 0)], pad_id=1)
    assert batch.input_ids.dtype == batch.attention_mask.dtype == torch.int64
    assert batch.input_ids.tolist() == [[5, 6, 7], [1, 1, 8], [1, 1, 1]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 0]]


def test_no_rows_make_an_empty_batch():
    assert collate([], pad_id=0).input_ids.shape == (0, 0)
    assert collate_prompts([], pad_id=0).input_ids.shape == (0, 0)
