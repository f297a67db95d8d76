"""Generation on a CUDA device, where there is one: the engines agree in fp32, and how often texts flip in bf16."""

import numpy as np
import pytest
import torch
from tests.infer.families import FAMILIES, GREEDY, MOST_NEW, RECURRENT, alone, build, ended, prompts, rows_of

from brim.infer.engines import FixedRoom, SlotsEngine, StaticEngine, respond_to
from brim.models import precision

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")
LONGER = {**GREEDY, "max_new_tokens": 16}


def engine(kind, model, settings, *, name="fp32", rows=3, **more):
    how = {"settings": settings, "seed": 0, "device": CUDA, "precision": precision(name), **more}
    return kind(model, room=FixedRoom(rows, prefill_tokens=24), **how)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - RECURRENT))
def test_greedy_texts_on_a_gpu_are_those_of_a_cpu(family):
    model, rows = build(family), prompts()
    end, expected = ended([alone(model, row) for row in rows])
    model = model.to(CUDA)
    settings = {**GREEDY, "max_new_tokens": MOST_NEW, "eos_token_id": [end]}
    for kind in (SlotsEngine, StaticEngine):
        texts = [response.token_ids for response in respond_to(engine(kind, model, settings), rows)]
        assert texts == expected, kind.name


@pytest.fixture(scope="module")
def larger():
    """80 MB of weights, so that a cache can be made that does not fit beside them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=4096, initializer_range=0.1, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(CUDA)


@pytest.fixture
def little_memory():
    """So many bytes beside what is allocated."""

    def leave(num_bytes):
        torch.cuda.empty_cache()
        allowed_bytes = torch.cuda.memory_reserved() + num_bytes
        torch.cuda.set_per_process_memory_fraction(allowed_bytes / torch.cuda.mem_get_info()[1])

    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("kind", [SlotsEngine, StaticEngine])
def test_what_does_not_fit_is_generated_all_the_same_and_once(larger, little_memory, kind):
    """A token keeps 24 KiB: 32 rows of 1,016 tokens 760 MiB."""
    rows = rows_of(np.random.default_rng(1).integers(500, 1000, 40), vocabulary=1000)
    expected = respond_to(engine(StaticEngine, larger, LONGER, rows=4), rows)
    done, told = [], []
    limited = engine(kind, larger, LONGER, rows=32, on_smaller=told.append)
    little_memory(400 << 20)
    assert respond_to(limited, rows, on_batch=done.append) == expected
    assert told
    assert sum(done) == len(rows)


def test_the_flip_rate_in_bf16_is_below_one_half_and_recorded(larger, record_property):
    """CONTRACT: equal only for recorded, unrefilled batches; up to half of the rows of a random model flip."""
    model = larger.to(torch.bfloat16)
    rows = rows_of(np.random.default_rng(1).integers(5, 200, 64), vocabulary=1000)
    alone_texts = respond_to(engine(SlotsEngine, model, LONGER, name="bf16-true", rows=1), rows)
    for kind in (SlotsEngine, StaticEngine):
        found = respond_to(engine(kind, model, LONGER, name="bf16-true", rows=16), rows)
        rate = np.mean([one != other for one, other in zip(found, alone_texts, strict=True)])
        record_property(f"flip_rate_{kind.name}", float(rate))
        assert rate <= 0.5, kind.name
    larger.to(torch.float32)
