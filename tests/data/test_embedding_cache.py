"""Embeddings that are kept, and made anew when they are not what is needed."""

import numpy as np
import pytest
from tests.data.letter_encoder import LetterEncoder

from brim.data import nearest_examples as embedding_cache
from brim.data.examples import example_pool
from brim.data.nearest_examples import embeddings_of
from brim.data.read import read
from brim.errors import OutputError

QUESTIONS = ["one", "two", "three"]


@pytest.fixture
def pool(make_config):
    def make(questions=QUESTIONS):
        config = make_config(
            prompt__task="T",
            prompt__retrieval={"type": "random", "k": 1},
            preprocessing__split={"type": "random", "probabilities": [1, 0, 0]},
        )
        return example_pool(config, read({"q": questions, "a": ["x"] * len(questions)}))

    return make


def kept(pool, encoder=None, name=None):
    encoder = encoder or LetterEncoder()
    found = embeddings_of(pool, encoder, index_name=name)
    return found, encoder.asked


@pytest.mark.parametrize("name", [None, "mine"])
def test_what_was_computed_once_is_used_again(pool, cache, name):
    first, asked = kept(pool(), name=name)
    assert asked == QUESTIONS
    assert np.array_equal(first.embeddings, LetterEncoder().encode(QUESTIONS))
    again, asked = kept(pool(), name=name)
    assert asked == []
    assert np.array_equal(again.embeddings, first.embeddings)
    assert isinstance(again.embeddings, np.memmap)
    assert first.notes == again.notes == ()
    (folder,) = (cache / "retrieval").iterdir()
    assert name in (None, folder.name)


@pytest.mark.parametrize("change", ["a text", "their order", "another cut of the same letters", "the model"])
def test_a_named_index_of_something_else_is_made_anew_and_told(pool, change):
    kept(pool(), name="mine")
    questions = {
        "a text": ["one", "two", "four"],
        "their order": QUESTIONS[::-1],
        "another cut of the same letters": ["onet", "wo", "three"],
    }
    asked_for = questions.get(change, QUESTIONS)
    identity = "other letters" if change == "the model" else "letters"
    found, asked = kept(pool(asked_for), LetterEncoder(identity), "mine")
    assert asked == asked_for
    assert found.notes == ("prompt.retrieval: the data or the model changed since mine was made: it is made anew",)
    assert kept(pool(asked_for), LetterEncoder(identity), "mine")[1] == []


def test_without_a_name_each_data_and_model_has_its_own(pool, cache):
    kept(pool())
    found, _ = kept(pool(["another"]))
    kept(pool(), LetterEncoder("other letters"))
    assert found.notes == ()
    assert len(list((cache / "retrieval").iterdir())) == 3


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "embeddings.npy").write_bytes(b"x"), "embeddings.npy changed since it was written"),
        (lambda folder: (folder / "embeddings.npy").unlink(), "embeddings.npy is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "facts.json").write_text("{"), "facts.json changed since it was written"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json is no list of files and digests"),
    ],
)
def test_a_damaged_index_is_made_anew_and_told(pool, cache, damage, reason):
    kept(pool(), name="mine")
    folder = cache / "retrieval" / "mine"
    damage(folder)
    found, asked = kept(pool(), name="mine")
    assert found.notes == (f"prompt.retrieval: what is kept in {folder} is damaged ({reason}): it is made anew",)
    assert asked == QUESTIONS
    assert kept(pool(), name="mine")[1] == []


def test_a_full_disk_is_told(pool, cache, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(embedding_cache, "write_manifest", full)
    with pytest.raises(OutputError) as caught:
        kept(pool(), name="mine")
    assert str(caught.value) == (
        f"{cache / 'retrieval' / 'mine'}: the embeddings of the training split cannot be kept: No space left on device\n"
        "  fix: make room there, or set BRIM_CACHE_DIR to a folder on a larger disk"
    )
