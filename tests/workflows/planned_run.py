"""Runs on uneven rows: trained, stopped, and read again; planned and loaded; on a device that runs out of memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from tests.gallery import OUT, stopped_after, usual
from tests.integration.conftest import steps

import brim
from brim.config import load_config
from brim.data import prepare
from brim.data.read import read
from brim.models import LLM, load_llm
from brim.planning import TrainingPlan, plan_run
from brim.session import open_session, say_nothing, with_choices
from brim.workflows.training.planning import request_of


def settings(base: Any, *, trainer: Any = None, **changes: Any) -> dict[str, Any]:
    """Adaptive batches of 8 rows; LoRA without dropout."""
    ours = {"batch_size": "auto", "skip_all_evaluation": True, "enable_gradient_checkpointing": False}
    return usual(base, trainer={**ours, **(trainer or {})}, **changes)


def uneven() -> pd.DataFrame:
    """24 rows to train on, the longest seven times as long as the shortest, so that cuts differ."""
    return pd.DataFrame(
        [{"question": f"add {n} and 1 =", "answer": f" {n + 1}" * (1 + (7 * n) % 24), "split": 0} for n in range(24)]
    )


def train(
    config: Any, folder: Path, *, data: Any = None, said: list[str] | None = None, overrides: Any = (), **how: Any
) -> Path:
    """Train on the uneven rows, or on others. how: resume, replan, observer."""
    heard: list[str] = [] if said is None else said
    rows = uneven() if data is None else data
    brim.Model(config, overrides=overrides).train(rows, output_directory=folder, say=heard.append, **how)
    return folder


def stopped(config: Any, folder: Path, *, after: int, **how: Any) -> Path:
    """Train until a step after which the run is interrupted."""
    with stopped_after(after) as observer, pytest.raises(KeyboardInterrupt, match=f"stopped after step {after}\n"):
        train(config, folder, observer=observer, **how)
    torch.manual_seed(999)  # another process would not have these random states either
    return folder


def of(folder: Path, name: str) -> list[Any]:
    """Return one figure of each step."""
    return [step[name] for step in steps(folder)]


def plan_of(folder: Path) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return plan


def assert_same_weights(one: Path, other: Path) -> None:
    """Fail unless the adapters of two runs are equal to the bit."""
    first, second = (load_file(folder / "model" / "adapter_model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def ready(base: Any, *, trainer: Any = None, **changes: Any) -> SimpleNamespace:
    """All that `launch` is given."""
    session = open_session(load_config(settings(base, trainer=trainer, **changes)).config)
    prepared = prepare(read(uneven()), session.config, session.encoder, context_length=session.folder.context_length)
    request = request_of(session, prepared)
    planned = plan_run(request, every_way=False, replan=False, say=say_nothing)
    session = with_choices(session, planned.choices)
    llm = load_llm(session.config, session.folder, session.device, trainable=True)
    return SimpleNamespace(session=session, prepared=prepared, request=request, plan=planned.plan, llm=llm)


def tight(plan: TrainingPlan, *, cap_bytes: int | None = None) -> TrainingPlan:
    """The plan with no more memory than it needs, so that it is tried."""
    assert plan.chosen is not None
    assert plan.chosen.total_bytes is not None
    chosen = plan.chosen if cap_bytes is None else replace(plan.chosen, cap_bytes=cap_bytes, cap_binds=True)
    budget = replace(plan.budget, limit_bytes=plan.chosen.total_bytes, margin_bytes=0)
    return replace(plan, budget=budget, chosen=chosen, candidates=(chosen,))


@contextmanager
def scarce(llm: LLM, *, most_tokens: int) -> Iterator[list[tuple[int, int]]]:
    """Forward passes of more padded tokens run out of memory; the shapes that were tried."""
    tried: list[tuple[int, int]] = []

    def watch(module: Any, arguments: Any) -> None:
        shape = tuple(arguments[0].shape)
        tried.append(shape)
        if shape[0] * shape[1] > most_tokens:
            raise torch.OutOfMemoryError(OUT)

    hook = llm.model.get_input_embeddings().register_forward_pre_hook(watch)
    try:
        yield tried
    finally:
        hook.remove()
