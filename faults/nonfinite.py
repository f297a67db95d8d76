"""NaN and infinity in a loss or a gradient: no update, and the rows are named.

One row of the data holds a letter that is poisoned in the base model. Its embedding is NaN, so that its loss is NaN; or
so small that the norm after it divides by a square root of almost nothing, so that its loss is finite and its gradient
is not; or the head's bias makes it impossible as an answer, so that its loss is infinite and its gradient finite. Rows
differ in length, and the longest go first: the row's length says in which micro-batch it falls.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from faults import Settings, Trial
from faults.cases import Case, spread, trials
from faults.forked import Done
from faults.subject import CONFIG, difference, digests, fingerprint, told_wrong
from faults.workshop import as_yaml, make_base

STOP, SKIP = "nonfinite-stop", "nonfinite-skip"
_SHORT = {STOP: 1, SKIP: 1}
_LETTER = "Z"
_PAD = 1  # the padding's token
_INFINITE = "infinite-loss"
_KINDS = {"loss": float("nan"), "gradient": 1e-19, _INFINITE: -float("inf")}  # the letter's embedding, or bias
_SAID = {"loss": ("(loss nan,",), "gradient": ("norm inf)", "norm nan)"), _INFINITE: ("(loss inf,",)}
_NUM_ROWS, _ROWS_A_STEP, _MICRO_BATCH_ROWS, _NUM_EPOCHS = 16, 8, 2, 3
_NUM_MICRO_BATCHES = _ROWS_A_STEP // _MICRO_BATCH_ROWS
_PLACES = {"first": 1, "middle": None, "last": _NUM_MICRO_BATCHES}  # the micro-batch; None: one between
_SEEDS = (1, 2, 3)
_NUM_STEPS = _NUM_ROWS // _ROWS_A_STEP * _NUM_EPOCHS
_KEY = 5  # of the row with the letter


@dataclass(frozen=True, slots=True, kw_only=True)
class Poison:
    """Where the poison is."""

    kind: str
    place: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.place} micro-batch, seed {self.seed}"


def run(settings: Settings) -> Iterator[Trial]:
    """All trials of this fault that are this process's."""
    for kind in _KINDS:
        base = settings.folder / f"base-{kind}"
        settings.brim.call("faults.nonfinite.make_poisoned_base", base, kind, folder=settings.folder)
    yield from trials(_Nonfinite(settings).cases(), settings)


def make_poisoned_base(folder: str, kind: str) -> None:
    """A base model whose letter is poisoned; its head is not tied to the embedding, or all rows would be."""
    place = Path(folder)
    make_base(place, tie_word_embeddings=False, rms_norm_eps=0.0)
    letter = json.loads((place / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"][_LETTER]
    if kind == _INFINITE:
        _make_model_with_bias(place)
    weights = load_file(place / "model.safetensors")
    if kind == _INFINITE:
        weights["lm_head.bias"][letter] = _KINDS[kind]
    else:
        embedding = weights["model.embed_tokens.weight"]
        embedding[letter] = _KINDS[kind]
        embedding[_PAD] = embedding[letter + 1]  # it is zero otherwise, which the norm cannot take either
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})


def _make_model_with_bias(folder: Path) -> None:
    """A Phi, whose head has a bias, in place of a Llama of the same size."""
    from transformers import PhiConfig, PhiForCausalLM

    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    kept = (*sizes, "max_position_embeddings", "eos_token_id", "bos_token_id", "pad_token_id")
    llama = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    PhiForCausalLM(PhiConfig(**{name: llama[name] for name in kept})).save_pretrained(folder)


class _Nonfinite:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._number = 0

    def cases(self) -> Iterator[Case]:
        poisons = [Poison(kind=kind, place=place, seed=s) for s in _SEEDS for place in _PLACES for kind in _KINDS]
        for row, judge in ((STOP, self._stops), (SKIP, self._skips)):
            every = [Case(row=row, name=str(poison), judge=partial(judge, poison)) for poison in poisons]
            wanted = _SHORT[row] if self._settings.short else len(every)
            yield from (every[number] for number in spread(len(every), wanted, seed=self._settings.seed))
        yield Case(row=SKIP, name="every row is poisoned: ten in a row end the run", judge=self._gives_up)

    def _stops(self, poison: Poison) -> str:
        """It stops at the first bad step; continued with `skip`, it ends where a run with `skip` ends."""
        folder = self._project(poison)
        whole = self._train(folder, "whole", "trainer.on_nonfinite=skip")
        bad_steps = _bad_steps(folder / "whole")
        stopped = self._train(folder, "run")
        wrong = told_wrong(whole, code=0) or told_wrong(stopped, code=1)
        wrong = wrong or _said_wrong(stopped.err, poison, step=bad_steps[0]) or _checkpoints_wrong(folder, bad_steps[0])
        again = self._train(folder, "run", "--resume")
        wrong = wrong or told_wrong(again, code=1) or _said_wrong(again.err, poison, step=bad_steps[0])
        skipped = self._train(folder, "run", "trainer.on_nonfinite=skip", "--resume")
        return wrong or told_wrong(skipped, code=0) or self._done(folder, fingerprint(folder / "whole"))

    def _skips(self, poison: Poison) -> str:
        """Weights and optimizer after a bad step are those before it; rows are named; a stop changes nothing."""
        folder = self._project(poison)
        whole = self._train(folder, "whole", "trainer.on_nonfinite=skip")
        wrong = told_wrong(whole, code=0)
        bad_steps = _bad_steps(folder / "whole")
        if len(bad_steps) != _NUM_EPOCHS:
            wrong = wrong or f"{len(bad_steps)} steps were left out instead of one an epoch"
        said = f"{_NUM_EPOCHS} of {_NUM_STEPS} steps were left out"
        wrong = wrong or ("" if said in whole.err else f"it does not say {said!r}: {whole.err.strip()[-400:]}")
        wrong = wrong or _changed_by(folder, self._train(folder, "until", *_until(bad_steps[1])), bad_steps[1])
        killed = self._train(folder, "run", "trainer.on_nonfinite=skip", limit_s=whole.seconds / 2)
        continued = self._train(folder, "run", "trainer.on_nonfinite=skip", "--resume")
        if killed.code not in (0, -9):
            wrong = wrong or told_wrong(killed, code=0)
        return wrong or told_wrong(continued, code=0) or self._done(folder, fingerprint(folder / "whole"))

    def _gives_up(self) -> str:
        folder = self._project(Poison(kind="loss", place="first", seed=1), everywhere=True)
        done = self._train(folder, "run", "trainer.on_nonfinite=skip", "trainer.epochs=20")
        wrong = told_wrong(done, code=1)
        for said in ("step 10 is not finite", "10 such steps in a row", "fix: "):
            wrong = wrong or ("" if said in done.err else f"it does not say {said!r}: {done.err.strip()[-300:]}")
        return wrong

    def _done(self, folder: Path, marks: dict[str, str]) -> str:
        wrong = difference(folder / "run", marks)
        if not wrong:
            shutil.rmtree(folder)
        return wrong

    def _project(self, poison: Poison, *, everywhere: bool = False) -> Path:
        self._number += 1
        folder = self._settings.folder / f"project-{self._number}"
        folder.mkdir()
        rows = _rows(poison, everywhere=everywhere)
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (folder / "config.yaml").write_text(as_yaml(_config(poison)), encoding="utf-8")
        return folder

    def _train(self, folder: Path, run: str, *more: str, **how: Any) -> Done:
        return self._settings.brim("train", "config.yaml", *more, "--output-directory", run, folder=folder, **how)


def _config(poison: Poison) -> dict[str, Any]:
    trainer = {
        **CONFIG["trainer"],
        "batch_size": _MICRO_BATCH_ROWS,
        "effective_batch_size": _ROWS_A_STEP,
        "epochs": _NUM_EPOCHS,
        "train_steps": None,
        "steps_per_checkpoint": 1,
        "learning_rate": 0.001,
        "validation_metric": "loss",
    }
    changes = {"base_model": f"../base-{poison.kind}", "adapter": None, "random_seed": poison.seed, "trainer": trainer}
    return {**CONFIG, **changes}


def _rows(poison: Poison, *, everywhere: bool) -> list[dict[str, object]]:
    """Rows of two lengths that none of the others has: the poisoned one's is the most, the least or between."""
    rows: list[dict[str, object]] = []
    for key in range(_NUM_ROWS):
        is_poisoned = key == _KEY or everywhere
        size = {"first": 40, "middle": 18 + key % 2, "last": 2}[poison.place] if key == _KEY else 10 + 16 * (key % 2)
        letter = _LETTER if is_poisoned else "y"
        question, answer = ("y", f" {letter}") if poison.kind == _INFINITE else (letter, f" {key % 3}")
        rows.append({"question": "x " * size + question, "answer": answer, "split": 0})
    return [*rows, *({"question": "add", "answer": f" {key}", "split": 1} for key in range(2))]


def _bad_steps(run: Path) -> list[int]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record["step"] for record in records if record.get("event") == "skipped" and _KEY in record["rows"]]


def _said_wrong(said: str, poison: Poison, *, step: int) -> str:
    """The last message names the step, what is not finite, the row among those of one micro-batch, and the latter."""
    message = said.rpartition("brim: ")[2]
    rows = message.partition("rows ")[2].partition(" (")[0].split(", ")
    number = message.partition("micro-batch ")[2].partition(" ")[0]
    wanted = _PLACES[poison.place]
    is_place = number == str(wanted) if wanted else number in {str(n) for n in range(2, _NUM_MICRO_BATCHES)}
    is_kind = any(each in message for each in _SAID[poison.kind])
    is_rows = len(rows) == _MICRO_BATCH_ROWS and str(_KEY) in rows
    if f"step {step} is not finite" in message and is_kind and is_rows and is_place:
        return ""
    return f"it says {message.strip()!r}"


def _checkpoints_wrong(folder: Path, bad_step: int) -> str:
    found = sorted(path.name for path in (folder / "run" / "checkpoints").glob("step-*"))
    newest = found[-1] if found else "step-00000000"
    return "" if newest == f"step-{bad_step - 1:08d}" else f"the newest checkpoint is {newest}"


def _until(step: int) -> list[str]:
    return ["trainer.on_nonfinite=skip", f"trainer.train_steps={step}"]


def _changed_by(folder: Path, done: Done, step: int) -> str:
    """What the update that was left out has changed: nothing, of weights and optimizer."""
    checkpoints = digests(folder / "until" / "checkpoints")
    changed = [
        name
        for name in ("model.safetensors", "optimizer.safetensors")
        if checkpoints.get(f"step-{step:08d}/{name}") != checkpoints.get(f"step-{step - 1:08d}/{name}", "missing")
    ]
    return told_wrong(done, code=0) or (f"step {step} changed {', '.join(changed)}" if changed else "")
