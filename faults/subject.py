"""The run that is disturbed, and what must be the same of it in the end.

A LoRA run of eight steps of two micro-batches on a Llama of 30,000 weights: dropout, so that random states matter; an
evaluation and a checkpoint after every second step; its best step is the fourth, so that three checkpoints stay.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.forked import Brim, Done
from faults.workshop import as_yaml, make_base

NUM_STEPS, STEPS_PER_CHECKPOINT = 8, 2
_NOT_COMPARED = ("seconds", "peak_bytes")  # of a line of metrics.jsonl

CONFIG: dict[str, Any] = {
    "model_type": "llm",
    "base_model": "base",
    "dataset": "rows.jsonl",
    "input_features": [{"name": "question", "type": "text"}],
    "output_features": [{"name": "answer", "type": "text"}],
    "adapter": {"type": "lora", "r": 4, "dropout": 0.1},
    "preprocessing": {"split": "fixed"},
    "generation": {"max_new_tokens": 4, "do_sample": False},
    "trainer": {
        "type": "finetune",
        "train_steps": NUM_STEPS,
        "batch_size": 4,
        "effective_batch_size": 8,
        "learning_rate": 1.0,
        "steps_per_checkpoint": STEPS_PER_CHECKPOINT,
        "early_stop": -1,
        "validation_metric": "token_accuracy",
    },
}
ROWS = [
    {
        "question": f"add {number % 7} and {number % 11} =",
        "answer": f" {number % 7 + number % 11}" * (1 + number % 3),
        "split": 0 if number % 10 < 7 else 1 if number % 10 == 7 else 2,
    }
    for number in range(40)
]


@dataclass(frozen=True, slots=True)
class Subject:
    """A project folder with a configuration, and brim to run it."""

    folder: Path
    brim: Brim

    def train(self, run: Path, *, resume: bool = False, **how: Any) -> Done:
        """Train into a folder; how: as Brim is called."""
        more = ["--resume"] if resume else []
        return self.brim("train", "config.yaml", "--output-directory", run, *more, folder=self.folder, **how)

    def predict(self, run: Path, output: Path, *, resume: bool = False, **how: Any) -> Done:
        """Generate for the test rows."""
        more = ["--resume"] if resume else []
        return self.brim("predict", run, "--split", "test", "--output", output, *more, folder=self.folder, **how)


def make_subject(folder: Path, brim: Brim) -> Subject:
    """Write base/, rows.jsonl and config.yaml into a folder."""
    brim.call("faults.subject.make_base_at", folder / "base", folder=folder)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    (folder / "config.yaml").write_text(as_yaml(CONFIG), encoding="utf-8")
    return Subject(folder, brim)


def make_base_at(folder: str) -> None:
    """Make the base model, in the process that has torch imported."""
    make_base(Path(folder))


def fingerprint(run: Path) -> dict[str, str]:
    """All that a run left, by path: digests of files, and the log without its times.

    Of plan.json what memory does not decide. Of environment.json and notes.txt, which have the time of the start,
    and of a checkpoint's manifest only that they are there. What a killed write leaves would be here.
    """
    marks: dict[str, str] = {}
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run).as_posix()
        if path.is_dir() or name.startswith("tensorboard/"):
            continue
        marks[name] = _mark(path, name)
    marks["tensorboard/"] = _digest(json.dumps(sorted(_scalars(run / "tensorboard").items())).encode())
    return marks


def digests(folder: Path) -> dict[str, str]:
    """The digest of each file below a folder; none where there is no folder."""
    return {
        path.relative_to(folder).as_posix(): _digest(path.read_bytes()) for path in folder.rglob("*") if path.is_file()
    }


def difference(run: Path, whole: dict[str, str]) -> str:
    """What is not as in the fingerprint of the run that nobody disturbed; empty where all is."""
    now = fingerprint(run)
    told = [f"{name} is missing" for name in whole.keys() - now.keys()]
    told += [f"{name} is left over" for name in now.keys() - whole.keys()]
    told += [f"{name} differs" for name in now.keys() & whole.keys() if now[name] != whole[name]]
    return "; ".join(sorted(told))


def saved_step(run: Path) -> int:
    """The last step that was saved, by the names of the checkpoints and by the log, which outlives them; 0: none."""
    shown = [int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")]
    log = run / "metrics.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    logged = [int(json.loads(line)["step"]) for line in lines if line.endswith('"event": "checkpoint"}')]
    return max([0, *shown, *logged])


def told_wrong(done: Done, *, code: int) -> str:
    """What is wrong with how a command ended; empty where nothing is."""
    if done.timed_out:
        return "it hung"
    if "Traceback" in done.err:
        return f"a traceback: {done.err.strip().splitlines()[-1]}"
    if done.code != code:
        return f"exit code {done.code} instead of {code}: {done.err.strip()[-300:]}"
    return ""


def _mark(path: Path, name: str) -> str:
    if name in ("environment.json", "notes.txt") or (name.startswith("checkpoints/") and path.name == "manifest.json"):
        return "there"
    if path.name == "state.json":
        return _digest(json.dumps({**json.loads(path.read_bytes()), "logs": None}).encode())  # lines have times
    if name == "plan.json":  # what is free on the machine, and so what may be used of it, is never the same twice
        return _digest(json.dumps({**json.loads(path.read_bytes()), "plan": None, "launch": None}).encode())
    if path.name != "metrics.jsonl":
        return _digest(path.read_bytes())
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    kept = [
        {name: value for name, value in record.items() if name not in _NOT_COMPARED}
        for record in records
        if record.get("event") != "checkpoint"
    ]
    return _digest(json.dumps(kept).encode())


def _scalars(folder: Path) -> dict[str, float]:
    """`tag step` -> value, as TensorBoard shows it: a restarted session hides what its steps replace."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    shown: dict[tuple[str, int], float] = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        data, position = file.read_bytes(), 0
        while position + 12 <= len(data):
            (length,) = struct.unpack_from("<Q", data, position)
            if position + length + 16 > len(data):
                break  # cut off by a kill
            event = Event.FromString(data[position + 12 : position + 12 + length])
            position += 12 + length + 4
            if event.session_log.status == SessionLog.START:
                shown = {key: value for key, value in shown.items() if key[1] < event.step}
            shown.update({(value.tag, event.step): value.simple_value for value in event.summary.value})
    timed = ("/seconds", "/peak_bytes")
    return {f"{tag} {step}": value for (tag, step), value in shown.items() if not tag.endswith(timed)}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
