"""Files that changed on the disk: refused by their digests, passed over where an older one stands, never in silence."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from brim.storage import sha256, write_manifest
from faults import Settings, Trial
from faults.cases import Case, Skip, spread, trials
from faults.shim import read_log, watch
from faults.subject import Subject, difference, digests, fingerprint, make_subject, told_wrong

NEWEST, BOTH, MANIFEST, RUN, MODEL = "damage-newest", "damage-both", "damage-manifest", "damage-run", "damage-model"
_SHORT = {NEWEST: 2, BOTH: 1, MANIFEST: 1, RUN: 1, MODEL: 1}
_BEFORE, _NEWEST = "step-00000006", "step-00000008"  # of the begun run; the best one, of step 4, is there, too
_SAID = "the checkpoint of step 8 is damaged"

Damage = Callable[[Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The run after its last checkpoint, and at its end; each trial works on a copy."""

    begun: Path
    finished: Path
    marks: dict[str, str]
    predictions: bytes


def run(settings: Settings) -> Iterator[Trial]:
    """All trials of this fault that are this process's."""
    (settings.folder / "project").mkdir()
    subject = make_subject(settings.folder / "project", settings.brim)
    stages = _stages(subject, settings.folder)
    if stages is None:
        for row in (NEWEST, BOTH, MANIFEST, RUN, MODEL):
            yield from trials([Case(row=row, name="all", judge=_no_shim)], settings)
        return
    yield from trials(_Damaged(subject, settings, stages).cases(), settings)


class _Damaged:
    def __init__(self, subject: Subject, settings: Settings, stages: Stages) -> None:
        self._subject, self._settings, self._stages = subject, settings, stages
        self._chance = random.Random(settings.seed)
        self._number = 0

    def cases(self) -> Iterator[Case]:
        for row, cases in (
            (NEWEST, self._newest()),
            (BOTH, self._both()),
            (MANIFEST, self._manifest()),
            (RUN, self._rest_of_run()),
            (MODEL, self._model()),
        ):
            every = list(cases)
            wanted = _SHORT[row] if self._settings.short else len(every)
            yield from (every[number] for number in spread(len(every), wanted, seed=self._settings.seed))

    def _newest(self) -> Iterator[Case]:
        for name in sorted(path.name for path in (self._stages.begun / "checkpoints" / _NEWEST).iterdir()):
            damages = {**_damages(self._chance, flips=3), "swap with the one before": _swap}
            for what, damage in damages.items():
                yield Case(
                    row=NEWEST, name=f"{what}: {name}", judge=partial(self._falls_back, partial(_on, name, damage))
                )

    def _falls_back(self, damage: Damage) -> str:
        """damage: is given the run's folder."""
        run = self._copy(self._stages.begun)
        damage(run)
        done = self._subject.train(run, resume=True)
        wrong = told_wrong(done, code=0)
        for line in (_SAID, "continuing after step 6 "):
            wrong = wrong or ("" if line in done.err else f"it does not say {line!r}: {done.err.strip()[:200]}")
        return wrong or self._ended_well(run)

    def _both(self) -> Iterator[Case]:
        for name in sorted(path.name for path in (self._stages.begun / "checkpoints" / _NEWEST).iterdir()):
            for what, damage in _damages(self._chance, flips=1).items():
                yield Case(row=BOTH, name=f"{what}: {name} of all", judge=partial(self._no_way_on, name, damage))

    def _no_way_on(self, name: str, damage: Damage) -> str:
        run = self._copy(self._stages.begun)
        for checkpoint in (run / "checkpoints").glob("step-*"):
            damage(checkpoint / name)
        before = digests(run)
        done = self._subject.train(run, resume=True)
        wrong = told_wrong(done, code=1)
        for said in (
            "no whole checkpoint is left",
            "step 4 is damaged",
            "step 6 is damaged",
            "step 8 is damaged",
            "fix: ",
        ):
            wrong = wrong or ("" if said in done.err else f"it does not say {said!r}: {done.err.strip()[:200]}")
        return wrong or ("" if digests(run) == before else "something was changed")

    def _manifest(self) -> Iterator[Case]:
        for what, damage in _lies().items():
            yield Case(row=MANIFEST, name=what, judge=partial(self._falls_back, damage))

    def _rest_of_run(self) -> Iterator[Case]:
        for name in ("plan.json", "config.yaml", "metrics.jsonl", "ledger.parquet", "environment.json"):
            for what, damage in _damages(self._chance, flips=1).items():
                yield Case(row=RUN, name=f"{what}: {name}", judge=partial(self._mends, name, damage))

    def _mends(self, name: str, damage: Damage) -> str:
        run = self._copy(self._stages.begun)
        damage(run / name)
        done = self._subject.train(run, resume=True)
        wrong = told_wrong(done, code=0)
        if wrong or name != "metrics.jsonl":
            return wrong or self._ended_well(run)
        said = "metrics.jsonl is not what it was" in done.err
        different = difference(run, self._stages.marks)
        lost = {"metrics.jsonl differs", "tensorboard/ differs"}
        if different and not said:
            return f"it does not say that the log was damaged: {different}"
        return "; ".join(sorted({*different.split("; ")} - lost - {""}))

    def _model(self) -> Iterator[Case]:
        for name in sorted(path.name for path in (self._stages.finished / "model").iterdir()):
            for what, damage in _damages(self._chance, flips=1).items():
                trusted = (what, name) == ("delete", "manifest.json")  # so that a model may be changed on purpose
                yield Case(
                    row=MODEL,
                    name=f"{what}: {name}" + (" (no digests: trusted)" if trusted else ""),
                    judge=partial(self._not_used, name, damage, trusted=trusted),
                )

    def _not_used(self, name: str, damage: Damage, *, trusted: bool) -> str:
        run = self._copy(self._stages.finished)
        damage(run / "model" / name)
        output = run.with_suffix(".jsonl")
        done = self._subject.predict(run, output)
        if trusted:
            return told_wrong(done, code=0) or (
                "" if output.read_bytes() == self._stages.predictions else "it predicts otherwise"
            )
        wrong = told_wrong(done, code=1)
        for said in ("the model of this run is damaged", str(run / "model"), "fix: "):
            wrong = wrong or ("" if said in done.err else f"it does not say {said!r}: {done.err.strip()[:200]}")
        again = self._subject.train(run, resume=True)
        return wrong or told_wrong(again, code=0) or self._ended_well(run)

    def _ended_well(self, run: Path) -> str:
        wrong = difference(run, self._stages.marks)
        if not wrong:
            shutil.rmtree(run)
        return wrong

    def _copy(self, stage: Path) -> Path:
        self._number += 1
        return Path(shutil.copytree(stage, self._settings.folder / f"run-{self._number}"))


def _damages(chance: random.Random, *, flips: int) -> dict[str, Damage]:
    """By name; each is given the file."""
    places = {1: ("middle",), 3: ("start", "middle", "end")}[flips]
    parts = {"start": 0.0, "middle": 0.5, "end": 1.0}
    found: dict[str, Damage] = {}
    for place in places:
        bit = chance.randrange(7)  # not the highest, which would make text unreadable, and be found for that
        found[f"flip bit {bit} at the {place}"] = partial(_flip, part=parts[place], bit=bit)
    found["truncate to nothing"] = lambda path: _truncate(path, 0.0)
    found["truncate to half"] = lambda path: _truncate(path, 0.5)
    found["truncate by a byte"] = lambda path: _truncate(path, 1.0)
    found["delete"] = Path.unlink
    return found


def _flip(path: Path, part: float, bit: int) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[min(len(content) - 1, int(part * len(content)))] ^= 1 << bit
        path.write_bytes(content)


def _truncate(path: Path, part: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: -1 if part == 1.0 else int(part * len(content))])


def _swap(path: Path) -> None:
    other = path.parent.with_name(_BEFORE) / path.name
    path.write_bytes(other.read_bytes())


def _on(name: str, damage: Damage, run: Path) -> None:
    damage(run / "checkpoints" / _NEWEST / name)


def _lies() -> dict[str, Damage]:
    """Manifests of the newest checkpoint that must not be believed; each is given the run's folder."""

    def listing(change: Callable[[Path, dict[str, object]], Mapping[str, object] | list[object] | str]) -> Damage:
        def damage(run: Path) -> None:
            manifest = run / "checkpoints" / _NEWEST / "manifest.json"
            told = change(run, json.loads(manifest.read_text(encoding="utf-8")))
            manifest.write_text(told if isinstance(told, str) else json.dumps(told), encoding="utf-8")

        return damage

    def outside(name: str) -> Damage:
        def change(run: Path, told: dict[str, object]) -> dict[str, object]:
            strange = run / "checkpoints" / _NEWEST / name
            strange.parent.mkdir(parents=True, exist_ok=True)
            model = run / "checkpoints" / _BEFORE / "model.safetensors"
            if not strange.exists():
                strange.write_bytes(model.read_bytes())
            return {**told, name: sha256(strange)}

        return listing(change)

    def other_step(run: Path) -> None:
        newest = run / "checkpoints" / _NEWEST
        shutil.rmtree(newest)
        shutil.copytree(run / "checkpoints" / _BEFORE, newest)

    def whole_but_nothing_in_it(run: Path) -> None:
        newest = run / "checkpoints" / _NEWEST
        (newest / "state.json").write_text("[]", encoding="utf-8")
        write_manifest(newest)

    return {
        "a file of the checkpoint before, with its digest": outside(f"../{_BEFORE}/model.safetensors"),
        "a file outside of the run, with its digest": outside("../../../outside.safetensors"),
        "an absolute path, with its digest": outside("/etc/hostname"),
        "a file that is not there": listing(lambda run, told: {**told, "more.safetensors": "0" * 64}),
        "no model.safetensors": listing(lambda run, told: {k: v for k, v in told.items() if k[0] != "m"}),
        "no digests": listing(lambda run, told: dict.fromkeys(told)),
        "an empty mapping": listing(lambda run, told: {}),
        "a list": listing(lambda run, told: list(told)),
        "no JSON": listing(lambda run, told: "{"),
        "JSON nested 100,000 deep": listing(lambda run, told: "[" * 100_000),
        "the whole checkpoint of another step": other_step,
        "a state that is none, with its digest": whole_but_nothing_in_it,
    }


def _stages(subject: Subject, folder: Path) -> Stages | None:
    finished, begun, log = folder / "finished", folder / "begun", folder / "operations.log"
    done = subject.train(finished, environment=watch(finished, log=log))
    if wrong := told_wrong(done, code=0):
        raise RuntimeError(f"a run that nobody disturbed: {wrong}")
    if not log.exists():
        return None
    operations = read_log(log, finished)
    shown = next(o.number for o in operations if o.new_path == f"checkpoints/{_NEWEST}")
    done_with = next(o.number for o in operations if o.number > shown and o.path == "metrics.jsonl")  # older ones went
    subject.train(begun, environment=watch(begun, kill_after=done_with))
    subject.predict(finished, folder / "predictions.jsonl")
    return Stages(
        begun=begun,
        finished=finished,
        marks=fingerprint(finished),
        predictions=(folder / "predictions.jsonl").read_bytes(),
    )


def _no_shim() -> str:
    raise Skip("needs Linux and a C compiler")
