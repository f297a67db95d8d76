"""Let one contender answer all prompts once, in a process of its own.

    python -m benchmarks.inference_run '{"folder": …}'

is what `run` starts: what it prints last is the outcome, as JSON.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.batching_run import ROOT, RunFailed, last_words
from benchmarks.inference_peers import Way
from benchmarks.inference_subject import MAX_NEW_TOKENS, Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Hold what is run."""

    folder: str  # the subject's
    contender: Way | Literal["brim"]
    num_threads: int
    num_rows: int  # the first ones
    batch_rows: int | None = None  # None: brim's plan decides
    max_new_tokens: int = MAX_NEW_TOKENS
    cache: str = ""  # folder of brim's plans
    environment: dict[str, str] = field(default_factory=dict)  # variables, set before it starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Hold what a contender wrote to one prompt."""

    text: str
    num_tokens: int
    has_stopped: bool  # by itself, before max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Hold what came of it."""

    generate_s: float  # from token ids to token ids; of brim, with noting each response on disk
    whole_s: float  # with loading the model, reading, tokenizing and writing the file
    answers: list[Answer]
    peak_bytes: int  # resident, of the process
    summary: dict[str, Any] = field(default_factory=dict)  # brim's own

    @property
    def rows_per_s(self) -> float:
        return len(self.answers) / self.generate_s


def run(spec: Spec) -> Outcome:
    """Run it in a process of its own. Raises RunFailed with what it said last."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(spec.num_threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **({"BRIM_CACHE_DIR": spec.cache} if spec.cache else {}),
        **spec.environment,
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.inference_run", json.dumps(asdict(spec))],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RunFailed(f"{spec.contender} ended with {done.returncode}: {last_words(done.stderr)}")
    told = json.loads(done.stdout.splitlines()[-1])
    return Outcome(**{**told, "answers": [Answer(**answer) for answer in told["answers"]]})


def outcome_of(spec: Spec) -> Outcome:
    """Run it here, in this process."""
    import torch
    import transformers  # noqa: F401  nobody's time

    torch.set_num_threads(spec.num_threads)
    return _of_brim(spec) if spec.contender == "brim" else _of_peer(spec)


def _of_brim(spec: Spec) -> Outcome:
    import brim

    subject = Subject(folder=Path(spec.folder))
    with tempfile.TemporaryDirectory(dir=spec.folder) as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(subject.lines(spec.num_rows)), encoding="utf-8")
        started = time.perf_counter()
        model = brim.Model(subject.settings(max_new_tokens=spec.max_new_tokens))
        result = model.predict(prompts, output=Path(folder) / "written.jsonl", batch_size=spec.batch_rows)
        whole_s = time.perf_counter() - started
        frame = result.predictions
    answers = [
        Answer(text=text, num_tokens=int(count), has_stopped=reason == "stop")
        for text, count, reason in zip(
            frame["output_response"], frame["num_response_tokens"], frame["finish_reason"], strict=True
        )
    ]
    return Outcome(
        generate_s=result.seconds,
        whole_s=whole_s,
        answers=answers,
        peak_bytes=peak_bytes(),
        summary={key: value for key, value in result.summary.items() if key not in ("versions", "device")},
    )


def _of_peer(spec: Spec) -> Outcome:
    from benchmarks.inference_peers import load, respond

    assert spec.contender != "brim"
    assert spec.batch_rows is not None, "a peer does not plan"
    subject = Subject(folder=Path(spec.folder))
    started = time.perf_counter()
    model, tokenizer = load(subject.model)
    prompts = [tokenizer(text).input_ids for text in subject.texts(spec.num_rows)]
    settings = {
        "do_sample": False,
        "max_new_tokens": spec.max_new_tokens,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    begun = time.perf_counter()
    written = respond(spec.contender, model, prompts, batch_rows=spec.batch_rows, settings=settings)
    generate_s = time.perf_counter() - begun
    answers = [
        Answer(
            text=tokenizer.decode(tokens, skip_special_tokens=True),
            num_tokens=len(tokens),
            has_stopped=len(tokens) < spec.max_new_tokens,
        )
        for tokens in written
    ]
    whole_s = time.perf_counter() - started
    return Outcome(generate_s=generate_s, whole_s=whole_s, answers=answers, peak_bytes=peak_bytes())


def peak_bytes() -> int:
    """Return what was resident at most. What getrusage says begins with what the process that started this one had."""
    return status_bytes("VmHWM")


def status_bytes(name: str) -> int:
    """Return what the system says of this process's memory."""
    found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None, "every Linux has it"
    return int(found[1]) * 1024


def main() -> None:
    with redirect_stdout(sys.stderr):
        outcome = outcome_of(Spec(**json.loads(sys.argv[1])))
    print(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main()
