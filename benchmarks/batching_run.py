"""Run one training of one contender in a process of its own.

    python -m benchmarks.batching_run '{"folder": …}'

is what `run` starts: what it prints last is the outcome, as JSON.
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
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.batching_peers import Way
from benchmarks.batching_subject import Method, Subject

ROOT = Path(__file__).parents[1]
_SHOWN_CHARACTERS = 600  # of what a failed run says


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Hold what is run. trainer and memory: keys of brim's configuration beside those of the subject."""

    folder: str  # the subject's
    device: Literal["cpu", "cuda"]
    contender: Way | Literal["brim"]
    num_threads: int
    num_rows: int | None = None  # the first ones; None: all
    limit_bytes: int | None = None  # address space of the process; on a GPU, what PyTorch may allocate
    cache: str = ""  # folder of brim's plans and traces
    scores: bool = False  # on held-out rows, after training
    method: Method = "lora"
    trainer: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] | None = None
    environment: dict[str, str] = field(default_factory=dict)  # variables, set before it starts
    wrong_by: float | None = None  # what the memory model foretells, times this
    micro_batch_rows: int = 1  # of a peer
    accumulation_steps: int = 32  # of a peer

    @property
    def subject(self) -> Subject:
        return Subject(folder=Path(self.folder), device=self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Hold what came of it."""

    train_s: float  # the updates of one epoch
    whole_s: float  # with reading, planning, loading and saving
    losses: list[float]  # of each update
    num_tokens: int
    num_padded_tokens: int
    num_micro_batches: int | None  # of all updates; None: a peer does not say
    micro_batch_rows: int | None  # None: they differ
    num_out_of_memory: int | None  # None: a peer does not say
    peak_bytes: int  # of the process; on a GPU, allocated
    held_out_loss: float | None
    plan: dict[str, Any] | None = None  # brim's plan.json
    beside_bytes: int = 0  # address space before the model's passes; on a GPU, what lies outside PyTorch
    passes_bytes: int = 0  # what the model and its passes then took of it, at the peak; on a GPU, reserved


def run(spec: Spec) -> Outcome:
    """Run it in a process of its own. Raises RunFailed with what it said last."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(spec.num_threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(Path(spec.folder) / "datasets"),
        **({"BRIM_CACHE_DIR": spec.cache} if spec.cache else {}),
        **spec.environment,
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.batching_run", json.dumps(asdict(spec))],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RunFailed(f"{spec.contender} ended with {done.returncode}: {last_words(done.stderr)}")
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


def last_words(stderr: str) -> str:
    """Return the error that ended a process, without the traceback and its paths; the last line where there is none."""
    lines = stderr.strip().splitlines() or [""]
    named = [number for number, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception|Refused)\b", line)]
    return " ".join(line.strip() for line in lines[named[-1] if named else -1 :])[:_SHOWN_CHARACTERS]


class RunFailed(Exception):
    """A contender did not end well."""


def outcome_of(spec: Spec) -> Outcome:
    """Run it here, in this process."""
    _limit(spec)
    import torch

    torch.set_num_threads(spec.num_threads)
    with tempfile.TemporaryDirectory(dir=spec.folder) as folder:
        train = _train_brim if spec.contender == "brim" else _train_peer
        return train(spec, Path(folder))


def _limit(spec: Spec) -> None:
    """Before anything large is imported."""
    if spec.limit_bytes is None:
        return
    if spec.device == "cpu":
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (spec.limit_bytes, hard))
        return
    import torch

    _, total_bytes = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(spec.limit_bytes / total_bytes)


def _train_brim(spec: Spec, folder: Path) -> Outcome:
    import brim
    from benchmarks.batching_hooks import counting_padded_tokens, foretelling_wrongly, noting_address_space

    settings = spec.subject.settings(method=spec.method, trainer=spec.trainer, memory=spec.memory)
    with counting_padded_tokens() as padded, noting_address_space() as space, foretelling_wrongly(spec.wrong_by):
        started = time.perf_counter()
        result = brim.Model(settings).train(_rows(spec, folder), output_directory=folder / "run")
        whole_s = time.perf_counter() - started
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = [record for record in records if record.get("split") == "train" and "event" not in record]
    plan = json.loads((folder / "run" / "plan.json").read_text("utf-8"))
    beside_bytes, passes_bytes = _taken(spec, plan, space.mapped_bytes)
    return Outcome(
        train_s=result.seconds,
        whole_s=whole_s,
        losses=[step["loss"] for step in steps],
        num_tokens=steps[-1]["num_tokens"],
        num_padded_tokens=padded.num_tokens,
        num_micro_batches=sum(step["num_micro_batches"] for step in steps),
        micro_batch_rows=None,
        num_out_of_memory=sum(record.get("event") == "oom" for record in records),
        peak_bytes=_peak_bytes(spec),
        held_out_loss=_held_out_loss(spec, folder / "run" / "model"),
        plan=plan,
        beside_bytes=beside_bytes,
        passes_bytes=passes_bytes,
    )


def _train_peer(spec: Spec, folder: Path) -> Outcome:
    from benchmarks.batching_peers import train_epoch
    from benchmarks.subject import rows_in_order

    assert spec.contender != "brim"
    rows = rows_in_order(spec.subject.settings(), _rows(spec, folder))
    started = time.perf_counter()
    epoch = train_epoch(
        spec.contender,
        rows,
        subject=spec.subject,
        micro_batch_rows=spec.micro_batch_rows,
        accumulation_steps=spec.accumulation_steps,
        trained=folder / "adapter",
    )
    return Outcome(
        train_s=epoch.train_s,
        whole_s=time.perf_counter() - started,
        losses=epoch.losses,
        num_tokens=epoch.num_tokens,
        num_padded_tokens=epoch.num_padded_tokens,
        num_micro_batches=None,
        micro_batch_rows=epoch.micro_batch_rows,
        num_out_of_memory=None,
        peak_bytes=_peak_bytes(spec),
        held_out_loss=_held_out_loss(spec, folder / "adapter"),
    )


def _rows(spec: Spec, folder: Path) -> Path:
    lines = spec.subject.rows.read_text(encoding="utf-8").splitlines(keepends=True)
    path = folder / "rows.jsonl"
    path.write_text("".join(lines[: spec.num_rows]), encoding="utf-8")
    return path


def _held_out_loss(spec: Spec, trained: Path) -> float | None:
    """Return the loss of the adapter in this folder on held-out rows, all scored the same way."""
    if not spec.scores:
        return None
    import brim

    settings = spec.subject.settings()
    settings["adapter"]["pretrained_adapter_weights"] = str(trained)
    result = brim.Model(settings).evaluate(spec.subject.held_out)
    return float(result.metrics["loss"])


def _taken(spec: Spec, plan: dict[str, Any], mapped_bytes: int) -> tuple[int, int]:
    """Return the bytes beside the model's passes, and the bytes of these."""
    if spec.device == "cuda":
        import torch

        return plan["plan"]["budget"]["outside_bytes"], int(torch.cuda.max_memory_reserved())
    from benchmarks.batching_hooks import process_bytes

    return mapped_bytes, process_bytes("VmPeak") - mapped_bytes


def _peak_bytes(spec: Spec) -> int:
    if spec.device == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    with redirect_stdout(sys.stderr):
        outcome = outcome_of(Spec(**json.loads(sys.argv[1])))
    print(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main()
