"""Divide a run's model among its processes, where that is asked for, and refuse by name what cannot be sharded.

The weights are loaded on the host, and go to the device as this process's part of them, a unit at a time. A rank that
ran out of memory has left a note, by which the next start cuts smaller.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from brim.batching import Cutter
from brim.config.schema import Config
from brim.distributed import Ranks, Sharded, whole_on_first
from brim.errors import ConfigError, Problem
from brim.models import LLM
from brim.notes import Note, Say, warning
from brim.train import RunFolder
from brim.units import format_bytes, format_count

_STRATEGY = "backend.trainer.strategy"


_OPTIMIZERS = ("adam", "adamw", "sgd")  # element by element, as shards allow; in torch, which knows their tensors


def is_sharded_run(config: Config, ranks: Ranks) -> bool:
    """Return whether each process is to hold a part of the model."""
    trainer = getattr(config.backend, "trainer", None)
    return ranks.are_several and getattr(trainer, "strategy", "auto") == "fsdp"


def require_shardable(config: Config) -> None:
    """Raise ConfigError, with all that stands against it, where a run cannot be sharded."""
    problems = [
        Problem(what=f"{_STRATEGY}: fsdp does not go with {what}", where=where, fix=f"{fix}, or set {_STRATEGY}: ddp")
        for what, where, fix in _obstacles(config)
    ]
    if problems:
        raise ConfigError(*problems)


def _obstacles(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield what cannot be sharded, its key, and what would do instead."""
    trainer = config.finetune_trainer
    if config.quantization is not None:
        yield f"weights in {config.quantization.bits} bits", "quantization", "take it out"
    if config.precision == "fp16-mixed":
        yield "a scaled loss", "precision", "set it to bf16-mixed or fp32"
    if trainer.optimizer.type not in _OPTIMIZERS:
        yield trainer.optimizer.type, "trainer.optimizer.type", f"set it to one of {', '.join(_OPTIMIZERS)}"
    if trainer.batch_adaptation is not None:
        yield "a batch that grows with the gradient's noise", "trainer.batch_adaptation", "take it out"
    elif trainer.noise_scale_every is not None:
        yield "measuring the gradient's noise", "trainer.noise_scale_every", "take it out"
    if trainer.batch_size == "auto" and trainer.batch_search != "predict":
        yield "a search for the batch size", "trainer.batch_search", "set it to predict"


def host_of(device: torch.device, *, is_sharded: bool) -> torch.device:
    """Return where the weights are loaded."""
    return torch.device("cpu") if is_sharded else device


def sharded_over(ranks: Ranks, llm: LLM, device: torch.device, say: Say) -> tuple[LLM, Sharded]:
    """Cut the weights over the ranks, in place. Return the model with what runs its passes. All ranks come here.

    device: on which this rank computes. Raises ConfigError where the architecture cannot be sharded.
    """
    whole_bytes = llm.held_bytes
    sharded = Sharded(ranks, llm.model, device)
    llm = replace(llm, device=device, gathers=sharded)
    say(
        Note(
            f"sharded over {format_count(ranks.size, 'rank')}: {format_bytes(llm.held_bytes)} of the weights' "
            f"{format_bytes(whole_bytes)} are here; gradients are reduced after each micro-batch, so that none "
            "stays whole"
        )
    )
    return llm, sharded


def lower_by_notes(run: RunFolder, cutter: Cutter, say: Say) -> bool:
    """Lower the limit on micro-batches to what ranks have noted that ran out of memory; return whether it was."""
    now = cutter.state()["cap"]["now"]
    noted = [each for each in run.take_caps() if each.get("unit") == cutter.unit and each["kind"] == cutter.kind]
    lowest = min(noted, key=lambda each: each["cap"]["now"], default=None)
    if lowest is None or lowest["cap"]["now"] >= now:
        return False
    after = lowest["cap"]["now"]
    cutter.restore({**cutter.state(), "cap": lowest["cap"]})
    told = f"{format_bytes(after)} instead of {format_bytes(now)}" if cutter.unit == "bytes" else f"{after} rows"
    say(warning(f"memory ran out in step {lowest['step']:,}: micro-batches get at most {told}", topic="run"))
    return True


def whole_weights(ranks: Ranks, llm: LLM, sharded: Sharded | None) -> dict[str, torch.Tensor] | None:
    """Gather what is exported, one weight at a time, on the first rank's host; None where its model is whole.

    That is what trains: an adapter; or all weights, those that are tied once.
    """
    if sharded is None:
        return None
    return whole_on_first(ranks, {name: each for name, each in llm.model.named_parameters() if each.requires_grad})
