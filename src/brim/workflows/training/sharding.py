"""Divide a run's model among its processes, where that is asked for, and refuse by name what cannot be sharded.

The weights are loaded on the host, and go to the device as this process's part of them, a unit at a time. A rank that
ran out of memory has left a note, by which the next start cuts smaller.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import partial

import torch

from brim.batching import Cutter
from brim.config.schema import Config, FinetuneTrainer, MemoryConfig
from brim.distributed import Ranks, Sharded, mesh_of, part_of, sharding_obstacles, whole_on_first
from brim.errors import ConfigError, Problem
from brim.memory.closed_form import counted_state_bytes
from brim.memory.devices import budget_of, cpu_device
from brim.models import LLM, load_llm
from brim.notes import Note, Say, warning
from brim.planning import TrainingPlan
from brim.session import Session
from brim.train import RunFolder, host_obstacles
from brim.units import format_bytes, format_count

_STRATEGY, _OFFLOAD = "backend.trainer.strategy", "memory.offload"

_IN_VAIN = {"weights": "layers are copied in vain", "optimizer": "what trains and its gradients are there twice"}


def nothing_saved(config: Config) -> Note:
    """Warn that a CPU has no other memory to which anything could be offloaded."""
    asked = config.memory.offload
    why = f"saves nothing on a CPU, whose memory holds all in any case: {_IN_VAIN[asked]}"
    return warning(f"{_OFFLOAD}: {asked} {why}", topic="memory")


def is_sharded_run(config: Config, num_ranks: int) -> bool:
    """Return whether FSDP runs the model: each of several processes holds a part of it, or one offloads it."""
    is_asked = config.memory.offload == "weights" or (num_ranks > 1 and config.backend.trainer.strategy == "fsdp")
    return is_asked and isinstance(config.trainer, FinetuneTrainer)  # else nothing is trained


def require_places(config: Config, num_ranks: int) -> None:
    """Raise ConfigError, with all that stands against it, where a run cannot be sharded or offloaded as it asks for."""
    if not isinstance(config.trainer, FinetuneTrainer):
        return
    if config.memory.offload == "optimizer" or is_sharded_run(config, num_ranks):
        require_shardable(config)


def require_shardable(config: Config) -> None:
    """Raise ConfigError, with all that stands against it, where a run cannot be sharded, or offloaded."""
    asked, instead = f"{_STRATEGY}: fsdp", f"{_STRATEGY}: ddp"
    if config.memory.offload != "none":
        asked, instead = f"{_OFFLOAD}: {config.memory.offload}", f"{_OFFLOAD}: none"
    obstacles = host_obstacles if config.memory.offload == "optimizer" else sharding_obstacles
    problems = [
        Problem(what=f"{asked} does not go with {what}", where=where, fix=f"{fix}, or set {instead}")
        for what, where, fix in obstacles(config)
    ]
    if problems:
        raise ConfigError(*problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Hold a run's model, whole or this process's part of it."""

    llm: LLM
    sharded: Sharded | None  # what runs its passes; None: it is whole
    state_bytes: int  # of the optimizer, here
    digest: str = ""  # of the weights that train, where it is a part

    @property
    def beside_bytes(self) -> int:
        """Return what an evaluation finds on the device beside the weights; less than 0 where they are not there."""
        if self.sharded is None:
            return self.state_bytes
        elsewhere_bytes = self.state_bytes + self.llm.held_bytes if self.sharded.is_beside_device else 0
        return self.state_bytes + self.sharded.gathered_bytes - elsewhere_bytes


def loaded_for(ranks: Ranks, session: Session) -> Loaded:
    """Load the model to train, and shard it where that is asked for; all ranks come here then.

    A frozen base lies in the host's memory as it does in its files, once for all processes; one that is quantised is so
    on the device, weight by weight, of which each process keeps its part. Weights that train are copies of the file's,
    in the precision of training: so one process of a machine after the other has all of them.
    Raises ConfigError where the architecture cannot be sharded.
    """
    config, device = session.config, session.device
    if not is_sharded_run(config, ranks.size):
        llm = load_llm(config, session.folder, device, trainable=True)
        state_bytes = counted_state_bytes(config.finetune_trainer, llm.model)
        if config.memory.offload == "optimizer" and device.type == "cuda":
            state_bytes = 0  # here
        if ranks.are_several:  # gradients stay in their buckets
            state_bytes += sum(weight.nbytes for weight in llm.model.parameters() if weight.requires_grad)
        return Loaded(llm=llm, sharded=None, state_bytes=state_bytes)
    mesh, found = mesh_of(ranks, device), list[Loaded]()
    host, offloads = torch.device("cpu"), config.memory.offload == "weights"

    def load() -> bool:
        at, cut = host, None
        if config.quantization is not None:  # where they will compute; each is cut before the next one comes
            at, cut = device, partial(part_of, ranks=ranks, at=host if offloads else None)
        llm = load_llm(config, session.folder, device, trainable=True, at=at, cut=cut)
        state_bytes = counted_state_bytes(config.finetune_trainer, llm.model) // ranks.size
        sums = [float(weight.detach().double().sum()) for weight in llm.model.parameters() if weight.requires_grad]
        sharded = Sharded(ranks, llm.model, mesh, parts=llm.parts, offloads=offloads)
        llm = replace(llm, parts={}, gathers=sharded)
        digest = hashlib.sha256(json.dumps(sums).encode()).hexdigest()
        found.append(Loaded(llm=llm, sharded=sharded, state_bytes=state_bytes, digest=digest))
        return True

    place = ranks.place
    num_turns = max(ranks.exchanged("turns", lambda: place.local_world_size if config.adapter is None else 1))
    for turn in range(num_turns):
        is_ours = turn == place.local_rank % num_turns
        ranks.exchanged("loading", lambda is_ours=is_ours: is_ours and load())  # type: ignore[misc]
    return found[0]


def require_host_room(plan: TrainingPlan | None, *, num_processes: int) -> None:
    """Raise ConfigError where so many processes of this machine offload more to its memory than that may hold."""
    if plan is None or plan.chosen is None or plan.chosen.host is None:
        return
    host, offload = plan.chosen.host, plan.chosen.way.offload
    there = budget_of(MemoryConfig(), cpu_device().among(num_processes), is_at_hand=True)
    if host.num_bytes > there.reserved_bytes:
        shared = "" if num_processes == 1 else f" a process, of which there are {num_processes} here"
        raise ConfigError(
            what=f"{_OFFLOAD}: {offload} puts {format_bytes(host.num_bytes)} of weights, gradients and optimizer "
            f"states into this machine's memory{shared}; "
            f"{format_bytes(there.reserved_bytes)} may be used ({there.limit_reason})",
            where="memory.offload",
            fix="free memory, train an adapter (adapter.type: lora), take more machines, or set memory.offload: none",
        )


def sharding_note(ranks: Ranks, session: Session, loaded: Loaded) -> Note | None:
    """Say what of the weights is here, and warn where nothing could be offloaded; None where all is here."""
    if session.config.memory.offload != "none" and session.device.type != "cuda":
        return nothing_saved(session.config)
    if loaded.sharded is None:
        return None
    here, whole = format_bytes(loaded.llm.held_bytes), format_bytes(loaded.sharded.whole_bytes)
    over = format_count(ranks.size, "process", "processes")
    if not ranks.are_several:
        return Note(f"{here} of weights lie on the host; training stands still while a checkpoint is written")
    return Note(
        f"sharded over {over}: {here} of the weights' {whole} are here; gradients are reduced after each micro-batch, "
        "so that none stays whole; training stands still while a checkpoint is written, of which each process writes "
        "its part"
    )


def lower_by_notes(run: RunFolder, cutter: Cutter, say: Say) -> bool:
    """Lower the limit on micro-batches to what ranks have noted that ran out of memory; return whether it was."""
    now = cutter.limit
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
    with ranks.awaited():
        return whole_on_first(ranks, {name: each for name, each in llm.model.named_parameters() if each.requires_grad})
