"""Rows as padded tensors."""

import numpy as np
import torch

from brim.data.tokens import TokenRow, collate, collate_prompts


def row(ids, num_prompt):
    return TokenRow(key=0, input_ids=np.asarray(ids, dtype=np.int32), supervised=np.arange(len(ids)) >= num_prompt)


def test_rows_are_padded_on_the_right_and_learned_by_position():
    pad_and_eos = 1
    batch = collate([row([5, 6, 7, pad_and_eos], 2), row([8, pad_and_eos], 1)], pad_id=pad_and_eos)
    assert batch.input_ids.dtype == batch.targets.dtype == batch.logit_positions.dtype == torch.int64
    assert batch.input_ids.tolist() == [[5, 6, 7, 1], [8, 1, 1, 1]]
    assert batch.targets.tolist() == [7, 1, 1]
    assert batch.target_rows.tolist() == [0, 0, 1]
    assert batch.num_logits == 4
    assert batch.logit_positions.tolist() == [1, 2, 4]


def test_no_logits_are_asked_for_where_all_rows_are_prompt():
    batch = collate([row([5, 6, 7, 8, 9], 3), row([5, 6, 7, 8], 3)], pad_id=1)
    assert batch.num_logits == 3  # positions 2, 3 and 4 predict the tokens 3 and 4, and nothing
    assert batch.targets.tolist() == [8, 9, 8]
    assert batch.logit_positions.tolist() == [0, 1, 3]


def test_the_first_token_of_a_row_is_no_target():
    batch = collate([row([5, 6], 0)], pad_id=1)
    assert batch.targets.tolist() == [6]


def test_prompts_are_padded_on_the_left_and_end_before_the_answer():
    batch = collate_prompts([row([5, 6, 7, 1], 3), row([8, 1], 1), row([9], 0)], pad_id=1)
    assert batch.input_ids.dtype == batch.attention_mask.dtype == torch.int64
    assert batch.input_ids.tolist() == [[5, 6, 7], [1, 1, 8], [1, 1, 1]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 0]]


def test_no_rows_make_an_empty_batch():
    assert collate([], pad_id=0).input_ids.shape == (0, 0)
    assert collate_prompts([], pad_id=0).input_ids.shape == (0, 0)
