"""A journal holds what was written to it, whatever it was broken off in; responses and scores come back from bytes."""

import os

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.properties import examples

from brim.errors import OutputError, WriteError
from brim.infer import HeldRecords, Journal, prompt_hash, score_bytes, score_of
from brim.infer.engines import Response
from brim.infer.journal import Record

RECORDS = [
    Record(key=2**64 - 1, prompt=0, body=b""),
    Record(key=7, prompt=2**64 - 1, body=b"abc"),
    Record(key=0, prompt=5, body=b"\0" * 9),
]


def held(records):
    """Key, prompt and body of each record that counts."""
    keys = records.keys()
    numbers = records.find(keys)
    return {
        int(key): (int(prompt), records.body(int(number)))
        for key, prompt, number in zip(keys, records.prompts(numbers), numbers, strict=True)
    }


def as_held(records):
    return {record.key: (record.prompt, record.body) for record in records}


def test_records_are_there_at_once_and_after_opening_again_and_of_one_key_the_later_counts(tmp_path):
    in_memory = HeldRecords()
    in_memory.append(RECORDS)
    with Journal(tmp_path / "j") as journal:
        journal.append(RECORDS[:2])
        journal.append(RECORDS[2:])
        assert held(journal) == as_held(RECORDS)
    with Journal(tmp_path / "j") as journal:
        assert (len(journal), journal.num_torn_bytes) == (3, 0)
        assert held(journal) == as_held(RECORDS)
        for records in (journal, in_memory):
            assert records.find(np.array([8, 2**64 - 1, 7, 0], dtype=np.uint64)).tolist() == [-1, 0, 1, 2]
            assert records.prompts(np.arange(3)).tolist() == [record.prompt for record in RECORDS]
            assert [records.body(number) for number in range(3)] == [record.body for record in RECORDS]
        journal.append([Record(key=7, prompt=2, body=b"later")])
        assert held(journal)[7] == (2, b"later")


@examples(60)
@given(data=st.data(), bodies=st.lists(st.binary(max_size=20), min_size=1, max_size=6))
def test_what_is_whole_before_a_cut_is_kept_and_the_journal_goes_on(tmp_path_factory, data, bodies):
    path = tmp_path_factory.mktemp("cut") / "j"
    records = [Record(key=number, prompt=number, body=body) for number, body in enumerate(bodies)]
    ends = []
    for record in records:
        with Journal(path) as journal:
            journal.append([record])
        ends.append(path.stat().st_size)
    cut = data.draw(st.integers(0, ends[-1]))
    os.truncate(path, cut)
    whole = sum(end <= cut for end in ends)
    with Journal(path) as journal:
        assert held(journal) == as_held(records[:whole])
        journal.append(records[whole:])
    with Journal(path) as journal:
        assert held(journal) == as_held(records)
    assert path.stat().st_size == ends[-1]


@given(data=st.data())
@examples(60)
def test_a_flipped_bit_ends_what_is_read(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("flip") / "j"
    with Journal(path) as journal:
        start = path.stat().st_size
        journal.append(RECORDS)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(start, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with Journal(path) as journal:
        assert len(journal) < 3
        assert held(journal) == as_held(RECORDS[: len(journal)])


def test_a_write_that_fails_halfway_leaves_what_was_there(tmp_path, monkeypatch):
    with Journal(tmp_path / "j") as journal:
        journal.append(RECORDS[:1])
        write = os.write

        def full(file, data):
            if len(data) < 20:
                raise OSError(28, "No space left on device")
            return write(file, data[:17])

        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            with pytest.raises(WriteError, match=r"the journal could not be written: No space left.*\n.*--resume"):
                journal.append(RECORDS[1:2])
        assert held(journal) == as_held(RECORDS[:1])
        journal.append(RECORDS[2:])
    with Journal(tmp_path / "j") as journal:
        assert held(journal) == as_held([RECORDS[0], RECORDS[2]])


def test_another_file_is_no_journal(tmp_path):
    (tmp_path / "j").write_text("a file of somebody else's")
    with pytest.raises(OutputError, match="this file is not the journal of a prediction"):
        Journal(tmp_path / "j")
    assert (tmp_path / "j").read_text() == "a file of somebody else's"


@given(
    token_ids=st.lists(st.integers(0, 2**31 - 1)),
    end_id=st.none() | st.integers(0, 2**31 - 1),
    finish_reason=st.sampled_from(["stop", "length"]),
)
def test_a_response_comes_back(token_ids, end_id, finish_reason):
    response = Response(token_ids=token_ids, finish_reason=finish_reason, end_id=end_id)
    assert Response.of_bytes(response.to_bytes()) == response


def test_a_score_comes_back_and_a_prompt_is_known_by_its_tokens_not_by_their_type():
    for score in (-1.2345678901234567, -1e300, float("-inf")):
        assert score_of(score_bytes(score)) == score
    assert prompt_hash([1, 2, 3]) == prompt_hash(np.array([1, 2, 3], dtype=np.int32))
    assert len({prompt_hash(tokens) for tokens in ([], [0], [0, 0], [1, 2], [2, 1], [258])}) == 6
