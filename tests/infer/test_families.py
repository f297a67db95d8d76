"""A row's greedy text is the one that it has alone, in every family of decoders: masks, positions and caches are right."""

import numpy as np
import pytest
import torch

from brim.data.tokens import TokenRow, TokenRows
from brim.infer.engines import FixedRoom, SlotsEngine, StaticEngine, respond_to, why_not_slots
from brim.infer.engines.base import is_misled_by_its_batch
from brim.models import precision

from .families import FAMILIES, VOCABULARY, build

LENGTHS = [3, 14, 9, 1, 9, 2, 11, 5, 7]
MOST_NEW = 6
# Keep a state other than keys and values, or nothing, so that transformers' `generate` writes for them.
RECURRENT = {
    "openai_gpt",
    "mamba",
    "mamba2",
    "falcon_mamba",
    "rwkv",
    "recurrent_gemma",
    "jamba",
    "bamba",
    "granitemoehybrid",
    "falcon_h1",
    "lfm2",
    "qwen3_next",
    "minimax",
}
# Of them, those whose batches are wrong: transformers' RWKV mixes up states and reads padding, its MiniMax reads padding.
MISLED = {"rwkv", "minimax"}
ON_CPU = {"device": torch.device("cpu"), "precision": precision("fp32")}


def prompts():
    generator = np.random.default_rng(0)
    return TokenRows.from_rows(
        TokenRow(
            key=number,
            input_ids=generator.integers(2, VOCABULARY, length).astype(np.int32),
            supervised=np.zeros(length, dtype=bool),
        )
        for number, length in enumerate(LENGTHS)
    )


def alone(model, row):
    """The oracle: argmax after argmax, without padding, cache or transformers' generate."""
    ids, new = torch.tensor([row.input_ids.tolist()]), []
    for _ in range(MOST_NEW):
        with torch.no_grad():
            new.append(int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax()))
        ids = torch.cat([ids, torch.tensor([[new[-1]]])], dim=1)
    return new


def ended(texts):
    """A token that ends some texts, early and late, but not all; and the texts without it and what follows."""
    places = {token: [text.index(token) for text in texts if token in text] for text in texts for token in text}
    end = max(places, key=lambda token: (len(places[token]) < len(texts), len(set(places[token]))))
    return end, [text[: text.index(end)] if end in text else text for text in texts]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_do_not_depend_on_the_batch(family):
    model, rows = build(family), prompts()
    texts = [alone(model, row) for row in rows]
    assert len({token for text in texts for token in text}) > 12  # a model that repeats itself would prove nothing
    end, expected = ended(texts)
    assert 0 < sum(map(len, expected)) < MOST_NEW * len(texts)
    settings = {
        "max_new_tokens": MOST_NEW,
        "do_sample": False,
        "num_beams": 1,
        "pad_token_id": 1,
        "eos_token_id": [end],
    }
    how = {"settings": settings, "seed": 0, **ON_CPU}
    assert bool(why_not_slots(type(model), model.config, settings)) == (family in RECURRENT)
    engines = [StaticEngine(model, room=FixedRoom(4, prefill_tokens=1), **how)]
    if family not in RECURRENT:
        engines.append(SlotsEngine(model, room=FixedRoom(3, prefill_tokens=24), **how))
    for engine in engines:
        assert [response.token_ids for response in respond_to(engine, rows)] == expected, engine.name
    if family not in RECURRENT:
        statistics = engines[1].statistics
        assert statistics.num_prefills > 4  # rows took the place of others
        assert statistics.num_layouts > 1  # and the cache was laid out anew


@pytest.mark.parametrize("family", sorted({*RECURRENT, "llama", "gpt2", "bloom"}))
def test_what_its_batch_misleads_is_found_out(family):
    misled = is_misled_by_its_batch(build(family), [5, 17, 33, 8, 90], pad_id=1, **ON_CPU)
    assert misled == (family in MISLED)
