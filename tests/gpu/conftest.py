"""A base model for kernels that want aligned widths."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import make_llama, make_tokenizer


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twice as wide as elsewhere: bitsandbytes multiplies by 4-bit weights of whole blocks of 64 inputs. Never written to."""
    folder = tmp_path_factory.mktemp("base")
    make_tokenizer(folder)
    make_llama(folder, hidden_size=64)
    return folder
