"""Generate under a real limit on the address space: brim's plan, those who halve, and the truth found by trying.

    python -m benchmarks.inference_limited '{"folder": …}'

is what `run` starts: one process under the limit. All prompts are the same one, and no response ends before its last
token, so that each batch is the worst case of its size. The truth is the largest number of rows that brim's own engine
generates for at once without running out of memory, each tried in a fresh process under the same limit.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from benchmarks.batching_run import ROOT, RunFailed, last_words
from benchmarks.inference_run import status_bytes
from benchmarks.inference_subject import Subject, prompt_lengths, prompt_texts
from brim.workflows.measure.run import RETURNED_AT_ONCE

ROOMS_MIB = (256, 384, 512)  # that the limit leaves beside what a process with the model maps
FIRST_SIZE = 512  # of those who halve
NUM_ROWS = 256  # that brim's plan is for
NEW_TOKENS = 32
GOAL_SHARE = 0.95
# malloc turns to the arena of another thread, 64 MiB of addresses, when its own is refused more.
_ENVIRONMENT = {**RETURNED_AT_ONCE, "MALLOC_ARENA_MAX": "1"}

Contender = Literal["brim", "halving", "accelerate"]
PEERS: tuple[Contender, ...] = ("halving", "accelerate")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limited:
    """Hold one process. limit_bytes: None to learn what it maps. batch_rows: None where brim plans."""

    folder: str  # the subject's
    contender: Contender
    num_threads: int
    limit_bytes: int | None
    num_rows: int = NUM_ROWS
    batch_rows: int | None = None
    cache: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Hold what came of it."""

    rows: int | None  # of the first batch that was generated; None: none was
    num_out_of_memory: int  # until then; of brim, over the whole run
    num_probes: int  # batches tried until the first one was generated, that one included; of brim, its own tries
    seconds: float  # until the first batch was generated; of brim, the whole run
    mapped_bytes: int  # addresses before the first pass
    told: str = ""  # brim's word on its rows and on its try


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Hold what all found under one limit."""

    room_bytes: int
    limit_bytes: dict[Contender, int]
    largest: int  # rows, found by trying
    tried: dict[int, bool]  # rows: they ran
    found: dict[Contender, Found]

    @property
    def share(self) -> float | None:
        """Return the share of the largest number of rows that brim took."""
        rows = self.found["brim"].rows
        return None if rows is None else rows / self.largest


def rooms(
    subject: Subject, *, rooms_mib: Sequence[int] = ROOMS_MIB, num_threads: int, cache_folder: str, say: Say
) -> list[Room]:
    """Try each limit with each contender."""
    spec = Limited(
        folder=str(subject.folder), contender="brim", num_threads=num_threads, limit_bytes=None, cache=cache_folder
    )
    unlimited = replace(spec, num_rows=2, batch_rows=2)
    mapped = {name: run(replace(unlimited, contender=name)).mapped_bytes for name in ("brim", *PEERS)}
    return [_room(spec, mapped, mib << 20, say) for mib in rooms_mib]


def _room(spec: Limited, mapped_bytes: Mapping[Contender, int], room_bytes: int, say: Say) -> Room:
    """Let each contender run under one limit. mapped_bytes: by each contender's process with the model, unused too."""
    limits = {name: each + room_bytes for name, each in mapped_bytes.items()}
    found = {name: run(replace(spec, contender=name, limit_bytes=limit)) for name, limit in limits.items()}
    for name, each in found.items():
        say(f"  {room_bytes >> 20} MiB, {name}: {each}")
    tried: dict[int, bool] = {}

    def fits(rows: int) -> bool:
        if rows not in tried:
            tried[rows] = _runs(replace(spec, num_rows=rows, batch_rows=rows, limit_bytes=limits["brim"]))
        return tried[rows]

    largest = largest_that_fits(fits, found["brim"].rows or 1)
    say(f"  {room_bytes >> 20} MiB: the largest is {largest}")
    return Room(
        room_bytes=room_bytes, limit_bytes=limits, largest=largest, tried=dict(sorted(tried.items())), found=found
    )  # fmt: skip


def _runs(spec: Limited) -> bool:
    """Tell whether it runs without a lack of memory; one that ends the process is one, too."""
    try:
        return run(spec).num_out_of_memory == 0
    except RunFailed:
        return False


def largest_that_fits(fits: Callable[[int], bool], guess: int) -> int:
    """Return the largest number below one that does not fit; 0 where 1 does not. Few calls where the guess is near."""
    low, step = guess, 1
    while low > 0 and not fits(low):
        low, step = max(0, low - step), 2 * step
    high, step = low + 1, 1
    while fits(high):
        low, high, step = high, high + 2 * step, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def figures(found: Sequence[Room]) -> dict[str, Any]:
    """Return the figures for the record."""
    return {
        "new_tokens": NEW_TOKENS,
        "first_size": FIRST_SIZE,
        "environment": _ENVIRONMENT,
        "goal": {"share_of_largest": GOAL_SHARE, "out_of_memory": 0, "probes": 1},
        "is_met": all(_is_met(room) for room in found),
        "rooms": [
            {**asdict(room), "tried": [[rows, ran] for rows, ran in room.tried.items()], "share": room.share}
            for room in found
        ],
    }


def _is_met(room: Room) -> bool:
    ours = room.found["brim"]
    is_large = room.share is not None and room.share >= GOAL_SHARE
    return is_large and ours.num_out_of_memory == 0 and ours.num_probes <= 1


def run(spec: Limited) -> Found:
    """Run it in a process of its own. Raises RunFailed with what it said last."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")},
        **_ENVIRONMENT,
        "OMP_NUM_THREADS": str(spec.num_threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "BRIM_CACHE_DIR": spec.cache,
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.inference_limited", json.dumps(asdict(spec))],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RunFailed(f"{spec.contender} ended with {done.returncode}: {last_words(done.stderr)}")
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def found_by(spec: Limited) -> Found:
    """Run it here, in this process."""
    if spec.limit_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (spec.limit_bytes, hard))
    import torch

    torch.set_num_threads(spec.num_threads)
    return _brim(spec) if spec.contender == "brim" else _peer(spec)


def _brim(spec: Limited) -> Found:
    import brim
    from brim.planning.costs import generation as pass_times

    pass_times.WORTH = 0.0  # as many rows as fit, also where more of them save less than 2% of the time
    subject = Subject(folder=Path(spec.folder))
    # The padding's token, which the model never writes, ends a response.
    settings = subject.settings(max_new_tokens=NEW_TOKENS, eos_token_id=subject.pad_id())
    with tempfile.TemporaryDirectory(dir=spec.folder) as folder, counting_out_of_memory() as count:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text(_line(subject) * spec.num_rows, encoding="utf-8")
        model = brim.Model(settings)
        model.generate("x")  # loads it, and whatever a first pass loads
        mapped_bytes, before = status_bytes("VmSize"), len(count)
        started = time.perf_counter()
        result = model.predict(prompts, output=Path(folder) / "written.jsonl", batch_size=spec.batch_rows)
        seconds = time.perf_counter() - started
    generation = result.summary["generation"]
    proof = generation["plan"]["proof"]
    tries = re.search(r"(\d+) probe", proof)
    return Found(
        rows=generation["plan"]["shapes"][0]["rows"],
        num_out_of_memory=len(count) - before,
        num_probes=int(tries[1]) if tries else 0,
        seconds=round(seconds, 2),
        mapped_bytes=mapped_bytes,
        told=f"{generation['plan']['rows_reason']}; {proof}",
    )


def _peer(spec: Limited) -> Found:
    """Run accelerate's decorator around a first batch, as lm-evaluation-harness uses it; halving, or as it is today."""
    from accelerate.utils import find_executable_batch_size

    from benchmarks.inference_peers import generate, load

    subject = Subject(folder=Path(spec.folder))
    model, tokenizer = load(subject.model)
    prompt = tokenizer(prompt_texts([json.loads(_line(subject))])[0]).input_ids
    settings = {
        "do_sample": False,
        "max_new_tokens": NEW_TOKENS,
        "eos_token_id": tokenizer.pad_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    generate(model, [prompt], {**settings, "max_new_tokens": 2})
    mapped_bytes = status_bytes("VmSize")
    tried: list[int] = []
    if spec.limit_bytes is None:
        return Found(rows=None, num_out_of_memory=0, num_probes=0, seconds=0.0, mapped_bytes=mapped_bytes)

    def half() -> int:
        return tried[-1] // 2

    def first_batch(batch_size: int) -> int:
        tried.append(batch_size)
        generate(model, [prompt] * batch_size, settings)
        return batch_size

    started = time.perf_counter()
    find = find_executable_batch_size(
        first_batch,
        starting_batch_size=FIRST_SIZE,
        reduce_batch_size_fn=half if spec.contender == "halving" else None,
    )
    try:
        rows = int(find())
    except Exception as error:  # a peer's failure is a result
        told = f"{type(error).__name__}: {str(error)[:200]}"
        return _found_by_peer(None, tried, started, mapped_bytes, told)
    return _found_by_peer(rows, tried, started, mapped_bytes, "")


def _found_by_peer(rows: int | None, tried: Sequence[int], started: float, mapped_bytes: int, told: str) -> Found:
    return Found(
        rows=rows,
        num_out_of_memory=len(tried) - (rows is not None),
        num_probes=len(tried),
        seconds=round(time.perf_counter() - started, 2),
        mapped_bytes=mapped_bytes,
        told=told,
    )


@contextmanager
def counting_out_of_memory() -> Iterator[list[str]]:
    """Yield one entry for each lack of memory that any part of brim takes notice of."""
    from brim.batching.memory import oom

    original, errors = oom.is_out_of_memory, []

    def noted(error: BaseException) -> bool:
        is_one = original(error)
        if is_one and not getattr(error, "is_noted", False):
            errors.append(type(error).__name__)
            error.is_noted = True  # type: ignore[attr-defined]
        return is_one

    holders = [module for module in list(sys.modules.values()) if vars(module).get("is_out_of_memory") is original]
    for module in holders:
        module.is_out_of_memory = noted  # type: ignore[attr-defined]
    try:
        yield errors
    finally:
        for module in holders:
            module.is_out_of_memory = original  # type: ignore[attr-defined]


@cache
def _line(subject: Subject) -> str:
    """Return the row with the longest prompt."""
    lengths = prompt_lengths(subject.rows())
    return subject.lines()[lengths.index(max(lengths))]


def main() -> None:
    with redirect_stdout(sys.stderr):
        found = found_by(Limited(**json.loads(sys.argv[1])))
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
