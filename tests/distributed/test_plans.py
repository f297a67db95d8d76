"""What a run of several processes is planned with: the least memory of all, and what each holds and sends."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest
import torch
from faults.several import together
from tests.gallery import usual

import brim

pytestmark = [
    pytest.mark.run,
    pytest.mark.skipif(torch.cuda.is_available() or not hasattr(os, "fork"), reason="a fork, where no CUDA has begun"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Python 3.12: other threads, which do nothing here
]

GIB = 2**30


def test_a_run_takes_what_the_rank_with_least_memory_may_take(tiny_base, sums_file, tmp_path):
    trainer = {"batch_size": "auto", "skip_all_evaluation": True, "train_steps": 2}
    config = usual(tiny_base, dataset=str(sums_file), trainer=trainer)

    def work(rank: int) -> None:
        if rank == 1:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + GIB, resource.RLIM_INFINITY))
        brim.Model(config).train(output_directory=tmp_path / "run", say=None)

    first, _ = together(2, work, folder=tmp_path / "ranks")
    assert first.code == 0, first.error
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())["plan"]
    assert plan["budget"]["limit_reason"].startswith("rank 1 may take ")
    assert plan["budget"]["limit_reason"].endswith(" less than rank 0: RLIMIT_AS")
    assert plan["budget"]["limit_bytes"] - plan["budget"]["outside_bytes"] < GIB
    chosen = plan["chosen"]
    assert (chosen["wire"]["num_ranks"], chosen["way"]["is_sharded"]) == (2, False)
    assert 0.5 <= chosen["busy_share"] <= 1
