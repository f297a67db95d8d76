"""A tiny model in fp32 and rows of very different lengths."""

import gc
import weakref

import pytest
from tests.infer.families import rows_of

from brim.batching import step
from brim.batching.memory import oom
from brim.infer import stream
from brim.infer.engines import Passes, continuous

LENGTHS = [3, 60, 9, 1, 31, 9, 2, 44, 17, 5, 28]


@pytest.fixture(scope="module", autouse=True)
def freed():
    """One entry each time that caches are freed, which would take a third of a second."""
    entries = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (stream, oom, step, continuous):
            patch.setattr(module, "free_caches", lambda: entries.append("freed"))
        yield entries


@pytest.fixture(scope="module")
def model():
    """Large random weights, so that each token depends on all before it and no two are nearly as likely."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.4, bos_token_id=None, eos_token_id=0,
        pad_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def prompts():
    return rows_of(LENGTHS, first_key=100, vocabulary=300)


@pytest.fixture
def rows():
    """The same tokens, of which all but the first are to be learned."""
    return rows_of(LENGTHS, first_key=100, vocabulary=300, num_prompt_tokens=1)


@pytest.fixture
def caches(monkeypatch):
    """Weak references to every cache that is made. What is freed is freed at once, not when Python looks for cycles."""
    made, begin = [], Passes.__init__

    def watched(self, *args, **how):
        begin(self, *args, **how)
        made.append(weakref.ref(self.cache))

    monkeypatch.setattr(Passes, "__init__", watched)
    gc.collect()
    gc.disable()
    yield made
    gc.enable()
