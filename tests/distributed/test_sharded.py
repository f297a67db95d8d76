"""A run whose weights are sharded over processes is the run in one, and its checkpoints know no ranks."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
import torch
import torch._dynamo  # which FSDP imports, in each process that has not
import torch.distributed.fsdp
from tests.distributed.several import results
from tests.distributed.test_replicated import LORA, assert_alike, train
from tests.gallery import usual

from brim.workflows.training import following, training

pytestmark = [
    pytest.mark.run,
    pytest.mark.skipif(torch.cuda.is_available() or not hasattr(os, "fork"), reason="a fork, where no CUDA has begun"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Python 3.12: other threads, which do nothing here
]

FULL = {"adapter": None}
KINDS = {
    "lora": (LORA, {"dropout_by_row": True}),
    "packed": (LORA, {"dropout_by_row": True, "packing": True, "chunked_loss": True}),
    "sgd": (FULL, {"optimizer": {"type": "sgd", "momentum": 0.9}, "learning_rate": 0.1}),
    "adam": (FULL, {"learning_rate": 0.001, "enable_gradient_checkpointing": True}),
}


def sharded(rank):
    for module in (training, following):
        patch.object(module, "is_sharded_run", lambda config, ranks: ranks.are_several).start()


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_one_process(kind, tiny_base, sums_file, tmp_path):
    changes, trainer = KINDS[kind]
    config = usual(tiny_base, dataset=str(sums_file), trainer={**trainer, "batch_size": 2}, **changes)
    alone = train(config, tmp_path / "1", ranks=1)[0]
    for ranks in (2, 4) if kind == "lora" else (2,):
        told = results(train(config, tmp_path / str(ranks), ranks=ranks, each=sharded))
        assert_alike(tmp_path / "1", tmp_path / str(ranks), within=1e-4 if kind == "adam" else 1e-5)
        assert all(each == told[0] for each in told)
        assert told[0]["steps"] == alone["steps"]
        assert told[0]["best"] == alone["best"]
