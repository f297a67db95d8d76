"""Predict by several processes, one a GPU, of this machine or a Ray cluster: a coordinator, and members with a model.

The coordinator is the process that the user started. It reads the data, keeps the job and deals leases (brim.infer
says how), and loads no weights. A member is `serve` in a child process, which holds the model. A lease carries the
tokens of its rows, so that nothing need be shared but the model's files.
"""

from __future__ import annotations

import os
import select
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from brim.config.schema import Config
from brim.data.tokens import TokenRows
from brim.distributed import num_processes, timeout_of_environment
from brim.errors import BrimError
from brim.infer import (
    Actors,
    DoneRows,
    LayerName,
    Members,
    Pooling,
    Team,
    VectorStore,
    Work,
    first_vectors,
    num_actors,
    score_bytes,
)
from brim.infer.engines import Batches, Finished, Response, RowsAtOnce
from brim.infer.metrics import Scores, rows_to_score, score_batches
from brim.notes import OnBatch, Say, planned, status
from brim.session import Session
from brim.storage import scratch_folder
from brim.units import format_count
from brim.workflows.prediction.job import fingerprint
from brim.workflows.prediction.member import array_of, packed, serve, text_of
from brim.workflows.prediction.scoring import batches_for, batches_made
from brim.workflows.runs import Child

_COMPARED = 4  # prompts, by which it is decided whether to merge an adapter

_WAIT_S = 0.2

_AGAIN = "`brim predict --resume` goes on with what is left"

_NAMED = 8  # rows

_SHOWN = 20  # lines of what a process printed that has died

Bodies: TypeAlias = Callable[[Sequence[int], Sequence[bytes]], None]

Lost: TypeAlias = Callable[[int, BrimError], None]  # gets a position, and how the last process ended that had it


def num_members(
    config: Config, gpus: int | str | None, *, is_here: bool = True, let_go: Callable[[], None] = lambda: None
) -> int:
    """Return how many processes predict: of this machine, one by default, or actors of a Ray cluster, all by default.

    let_go: frees the weights of this process, which it does not need where others predict.
    Raises InputError as num_processes and Actors do.
    """
    number = _asked(config, gpus, is_here=is_here)
    if not is_one_process(config, number):
        let_go()
    return number


def _asked(config: Config, gpus: int | str | None, *, is_here: bool) -> int:
    if config.backend.type == "local":
        return num_processes(str(1 if gpus is None else gpus), None, is_here=is_here)
    asked = config.backend.trainer.num_workers if gpus is None else gpus
    if asked in (None, "all"):
        return num_actors(torch.cuda.is_available())
    return num_processes(str(asked), None, is_here=False)


def is_one_process(config: Config, number: int) -> bool:
    """Return whether this process predicts itself: a Ray cluster may also be there for a lone actor's GPU."""
    return number == 1 and config.backend.type == "local"


class Several(AbstractContextManager["Several"]):
    """Respond to prompts, score responses or collect vectors by several processes, started when there is work.

    is_spent: nothing is computed after the responses. `about`: facts on it for the job, once it is `ready`.
    """

    name = "members"  # as an Engine

    def __init__(self, session: Session, number: int, *, is_spent: bool, say: Say) -> None:
        self._session, self._number, self._is_spent, self._say = session, number, is_spent, say
        self._members: Members | None = None
        self._stack = ExitStack()
        self._cluster: Mapping[str, Any] = {}
        self.about: dict[str, Any] = {}

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def ready(self, prompts: TokenRows, *, on_finished: Bodies, on_lost: Lost) -> None:
        """Wait until the first member is ready to respond to the prompts.

        on_finished: gets positions, and their responses as the journal has them. on_lost: called with a prompt on which
        two members have died; what it raises ends the work. Raises what the members raised where none can.
        """
        generation, lengths = self._session.config.generation, prompts.lengths
        compared = packed(prompts.take(np.arange(min(len(prompts), _COMPARED))))

        def job(first: Mapping[str, Any] | None) -> dict[str, Any]:
            merged = None if first is None else first.get("merge_adapter")
            how = {"lengths": text_of(lengths, "<i4"), "compared": compared, "is_spent": self._is_spent}
            return {"does": "generate", "merge_adapter": merged, **how}

        def keep(positions: Sequence[int], values: Mapping[str, Any]) -> None:
            packed, ends = b64decode(values["bodies"]), [0, *accumulate(values["sizes"])]
            on_finished(positions, [packed[first:end] for first, end in pairwise(ends)])

        assert generation.max_new_tokens is not None, "resolved before"
        costs = (lengths + generation.max_new_tokens).astype(np.float64)
        work = Work(
            costs=costs, job=job, lease=lambda units: {"rows": packed(prompts.take(units))}, keep=keep, lose=on_lost
        )
        first = self._team().begin(work)
        rows = first.get("rows_at_once")
        about = {**first, **self._cluster, "num_members": self._number}
        self.about = {**about, "rows_at_once": rows and rows * self._number}
        self._say(status("generating", is_planned=True))

    def run(self, prompts: TokenRows, *, on_finished: Callable[[Sequence[Finished]], None]) -> None:
        """Respond to every prompt, as Engine.run does."""

        def keep(positions: Sequence[int], bodies: Sequence[bytes]) -> None:
            found = map(Response.of_bytes, bodies)
            on_finished([Finished(position=each, response=of) for each, of in zip(positions, found, strict=True)])

        self.ready(prompts, on_finished=keep, on_lost=partial(_refuse, prompts.keys[:, None]))
        self.generate()

    def generate(self) -> float:
        """Respond to the prompts that it is ready for. Return the seconds."""
        started = time.perf_counter()
        self._team().run()
        seconds = time.perf_counter() - started
        self.about["members"] = self._team().facts(seconds)
        return seconds

    def score(self, prompts: TokenRows, responses: DoneRows, scores: DoneRows) -> None:
        """Score the responses that have no score, in the batches that one process would make of all of them."""
        is_missing = np.zeros(len(prompts), dtype=np.bool_)
        is_missing[scores.to_do()] = True
        rows = rows_to_score(prompts, lambda position: Response.of_bytes(responses.body(position)))
        every = list(score_batches(rows.lengths))
        batches = [positions for positions in every if is_missing[positions].any()]
        # Members plan by the batch that takes most, and by the shortest row, which a first pass takes.
        shape = rows.take(np.append(every[0], every[-1][-1]))

        def keep(units: Sequence[int], values: Sequence[Sequence[float]]) -> None:
            for unit, losses in zip(units, values, strict=True):
                positions = batches[unit]
                new = is_missing[positions]  # a score that is there stays, to the bit
                found = np.asarray(losses)[new].tolist()
                scores.add(positions[new].tolist(), [score_bytes(-loss) for loss in found])

        self._team().begin(_in_batches(rows, batches, {"does": "score", "shape": packed(shape)}, keep))
        self._say(status("scoring"))
        self._team().run()

    def batches_for(self, rows: TokenRows) -> Batches:
        """Return the batches that one process would make of rows, planned before there are any members."""
        session, number = self._session, self._number
        is_shared = session.config.backend.type == "local" and session.device.type == "cpu"
        # Members divide the cores of a CPU among them, unless the variable says how many each has.
        parts = 1 if is_shared and "OMP_NUM_THREADS" not in os.environ else number
        self._say(planned("runs", f"{format_count(number, 'process', 'processes')}; memory is of each, time of all"))
        session = replace(session, num_processes=number if is_shared else 1)
        return batches_for(session, [rows], llm=None, say=self._say, side_by_side=parts)

    def embed(
        self,
        rows: TokenRows,
        into: Mapping[str, VectorStore],
        *,
        batches: Batches,
        pooling: Pooling,
        layers: Sequence[LayerName],
        normalize: bool,
        on_batch: OnBatch,
    ) -> float:
        """Put the outputs of layers for each row into stores, as collect_activations does. Return the seconds.

        Rows that would share a batch do, whoever gets it: their vectors are those of one process, to the bit. It is
        divided only where a member's memory does not allow it.
        """
        starts, made = first_vectors(rows, pooling), batches_made(batches, rows)

        def keep(units: Sequence[int], values: Mapping[str, Any]) -> None:
            positions = made[values["unit"]]
            ranges = [np.arange(starts[position], starts[position + 1]) for position in positions]
            places = np.concatenate(ranges)[values["first"] : values["end"]]
            for name, text in values["vectors"].items():
                into[name].put_at(places, array_of(text, "<f4").reshape(len(places), -1))
            for unit in units:
                on_batch(len(made[unit]))

        longest = np.array([rows.lengths[positions].max() for positions in made])
        # So many that a whole number of the longest rows has no fewer tokens than any batch has, padding included.
        most_tokens = int((longest * list(map(len, made))).max() + longest.max())
        ends = [int(np.argmax(rows.lengths)), int(np.argmin(rows.lengths))]
        job = {
            "does": "embed",
            "layers": list(layers),
            "lengths": text_of(rows.lengths, "<i4"),
            "shape": packed(rows.take(ends)),
            "whole_tokens": None if isinstance(batches, RowsAtOnce) else most_tokens,  # else it takes what is set
            "how": {"pooling": pooling, "normalize": normalize},
        }
        self._team().begin(_in_batches(rows, made, job, keep))
        self._say(status("reading the layers", is_planned=True))
        started = time.perf_counter()
        self._team().run()
        return time.perf_counter() - started

    def evaluate(self, rows: TokenRows, *, on_batch: OnBatch) -> Scores:
        """Compute loss and hits of each row under teacher forcing. on_batch: gets the number of rows done since."""
        found = np.zeros((3, len(rows)))  # loss, correct and supervised tokens

        def keep(positions: Sequence[int], values: Sequence[Sequence[float]]) -> None:
            found[:, list(positions)] = np.array(values).T
            on_batch(len(positions))

        ends = [int(np.argmax(rows.lengths)), int(np.argmin(rows.lengths))]
        job = {"does": "evaluate", "lengths": text_of(rows.lengths, "<i4"), "shape": packed(rows.take(ends))}
        work = Work(
            costs=rows.lengths.astype(np.float64),
            job=lambda first: job,
            lease=partial(_lease, rows),
            keep=keep,
            lose=partial(_refuse, rows.keys[:, None]),
        )
        self._team().begin(work)
        self._say(status("evaluating", is_planned=True))
        self._team().run()
        loss, num_correct, num_supervised = found
        counts = {"num_correct": num_correct.astype(np.int64), "num_supervised": num_supervised.astype(np.int64)}
        return Scores(keys=rows.keys, loss=loss, **counts)

    def _team(self) -> Members:
        if self._members is None:
            self._say(status(f"starting {format_count(self._number, 'process', 'processes')}"))
            config = self._session.config.model_dump(mode="json", exclude_unset=True)
            prints = fingerprint(self._session, split="full")
            order = {"config": config, "fingerprint": prints, "members": self._number}
            team, limit_s = self._started(partial(Processes, order, self._number)), timeout_of_environment()
            self._members = Members(team, say=self._say, most_silent_s=limit_s)
        return self._members

    def _started(self, processes: Callable[[int], Processes]) -> Team:
        """Return those that are to start: of this machine, or one for each actor of a Ray cluster."""
        if self._session.config.backend.type == "local":
            return self._stack.enter_context(processes(self._number))
        gpus = self._session.device.type == "cuda"
        actors = Actors(processes, self._number, gpus=gpus, say=self._say)
        self._cluster = actors.about
        return self._stack.enter_context(actors)


class Processes(AbstractContextManager["Processes"]):
    """Start members as child processes, and talk with them: a brim.infer.Team. None outlives the context.

    size: of all members; num_here: of those that share this machine.
    """

    def __init__(self, order: Mapping[str, Any], size: int, num_here: int) -> None:
        self.size, self._num_here = size, num_here
        self._order = {**order, "num_here": num_here}
        self._children: dict[int, Child] = {}
        self._logs: dict[int, Path] = {}
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(scratch_folder("brim-members-"))  # of what they print

    def __exit__(self, *exception: object) -> None:
        with self._stack:
            for child in self._children.values():
                child.close()

    def start(self, member: int) -> None:
        """Start a member, as Team.start does."""
        self._logs[member] = self._folder / f"{member}.log"
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._children[member] = Child(
            serve,
            {**self._order, "member": member},
            log=self._logs[member],
            environment={
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // self._num_here))),
                **_card(member),
            },
        )

    def send(self, member: int, message: Mapping[str, Any]) -> None:
        """Send a message, as Team.send does."""
        self._children[member].send(message)

    def end(self, member: int) -> None:
        """End a member, as Team.end does."""
        self._children.pop(member).close()

    def heard(self) -> Iterator[tuple[int, Mapping[str, Any] | BrimError]]:
        """Return what members have said, as Team.heard does."""
        there = {child: member for member, child in self._children.items()}
        behind = [stdin for child in there for stdin in child.sends()]
        can_be_read = select.select(list(there), behind, [], _WAIT_S)[0]
        for child, member in there.items():
            child.send_on()
            if child in can_be_read:
                for message in child.heard():
                    yield member, message
            if child.has_ended():
                child.close()
                del self._children[member]
                yield member, self._error(member, child)

    def _error(self, member: int, child: Child) -> BrimError:
        assert child.ended is not None, "asked after"
        where = f"process {member} of {self.size}"
        try:
            child.ended.require("it", fix=_AGAIN, log=self._logs[member])
        except BrimError as error:
            if type(error) is not BrimError:  # which says all
                return error
            what = [error.problems[0].what, *(f"    {line}" for line in child.last_lines(_SHOWN))]
            return BrimError(what="\n".join(what), where=where, fix=_AGAIN)
        return BrimError(what="it ended by itself", where=where, fix=_AGAIN)


def _card(member: int) -> dict[str, str]:
    """Return the variable by which a process sees one GPU alone: vLLM takes the first that it sees."""
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return {"CUDA_VISIBLE_DEVICES": visible[member % count]} if count else {}


def _in_batches(
    rows: TokenRows,
    batches: Sequence[NDArray[np.intp]],
    job: Mapping[str, Any],
    keep: Callable[[Sequence[int], Any], None],
) -> Work:
    """Return the work on rows that run together as these batches, which are the units."""

    def lease(units: NDArray[np.intp]) -> dict[str, Any]:
        chosen = [batches[unit] for unit in units]
        numbers = {"units": units.tolist(), "batches": list(map(len, chosen))}
        return {"rows": packed(rows.take(np.concatenate(chosen))), **numbers}

    costs = np.array([float(rows.lengths[positions].sum()) for positions in batches])
    lose = partial(_refuse, [rows.keys[positions] for positions in batches])
    return Work(costs=costs, job=lambda first: job, lease=lease, keep=keep, lose=lose)


def _refuse(keys: Sequence[NDArray[np.int64]] | NDArray[np.int64], unit: int, error: BrimError) -> None:
    """Raise an error that names the rows on which two processes have ended. keys: of each unit's rows."""
    named = ", ".join(map(str, keys[unit][:_NAMED].tolist())) + ", …" * (len(keys[unit]) > _NAMED)
    is_one = len(keys[unit]) == 1
    over = "this row" if is_one else f"these {len(keys[unit]):,} rows, which run together"
    raise BrimError(
        what=f"two processes ended over {over}, the last so: {error.problems[0].what}",
        where=f"row{'' if is_one else 's'} {named} (numbered from 0)",
        fix="leave it out of the data" if is_one else "leave the one that does it out of the data",
    )


def _lease(rows: TokenRows, units: NDArray[np.intp]) -> dict[str, str]:
    return {"rows": packed(rows.take(units))}
