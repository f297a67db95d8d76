"""The rows that are scored, and the batches that they are scored in."""

import itertools

import numpy as np
from hypothesis import given, strategies as st

from brim.data.tokens import TokenRow, TokenRows
from brim.infer import rows_to_score, score_batches
from brim.infer.engines import Response


def test_a_response_and_its_end_stand_behind_the_prompt():
    prompts = TokenRows.from_rows(
        [
            TokenRow(key=key, input_ids=np.array(ids, np.int32), supervised=np.zeros(len(ids), np.bool_))
            for key, ids in ((3, [5, 6]), (9, [7]))
        ]
    )
    responses = [
        Response(token_ids=[8], finish_reason="stop", end_id=1),
        Response(token_ids=[8, 9], finish_reason="length"),
    ]
    rows = rows_to_score(prompts, responses.__getitem__)
    assert [(row.key, row.input_ids.tolist(), row.supervised.tolist()) for row in rows] == [
        (3, [5, 6, 8, 1], [False, False, True, True]),
        (9, [7, 8, 9], [False, True, True]),
    ]


@given(lengths=st.lists(st.integers(1, 40), max_size=60), most_tokens=st.integers(1, 100))
def test_batches_are_every_row_once_by_length_and_within_the_tokens(lengths, most_tokens):
    batches = [batch.tolist() for batch in score_batches(np.array(lengths, np.int64), most_tokens=most_tokens)]
    every = [position for batch in batches for position in batch]
    assert sorted(every) == list(range(len(lengths)))
    assert [lengths[position] for position in every] == sorted(lengths, reverse=True)
    for batch, following in itertools.zip_longest(batches, batches[1:]):
        assert len(batch) == 1 or len(batch) * lengths[batch[0]] <= most_tokens
        assert following is None or (len(batch) + 1) * lengths[batch[0]] > most_tokens
