"""Compare several configurations on equal tokens, each with several seeds, with intervals of the differences.

Before the first run it is checked that the configurations' losses can be compared, and what makes them comparable is
set.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from brim.config import load_config, require_trust_said_again
from brim.config.schema import Config, FinetuneTrainer
from brim.data.read import Files, absolute_files
from brim.distributed import num_processes
from brim.errors import BrimError, ConfigError, InputError, OutputError, Problem
from brim.models import require_trainable
from brim.models.folders import continued, locate
from brim.notes import Note, Say
from brim.report import curves_plot, listening, save_picture, show
from brim.storage import make_folder, write_text, writing
from brim.train import Observer, Observers, RunFigures, RunFolder
from brim.workflows.compare.results import FILE, ComparedRun, CompareResult, read_runs, run_in_process
from brim.workflows.runs import Ended, Stop, TrainOrder, stopping

_DEFAULT_OUTPUT = Path("results")


_LONGEST_DEFAULT = 100  # characters of the folder's name


_MOST_SEEDS = 1000  # more is a slip of the hand: an interval shrinks with the square root of the seeds


def compare(
    configs: Sequence[str | Path],
    *,
    dataset: Files | None = None,
    seeds: int = 3,
    output_directory: str | Path | None = None,
    resume: bool = False,
    overrides: Sequence[str] = (),
    observer: Observer | None = None,
    say: Say | None = show,
) -> CompareResult:
    """Train each configuration with each seed, in a process of its own, and compare their final losses.

    configs: YAML files, or folders of runs; the first is what the others are compared to. The seeds are its random_seed
    and those that follow, the same for all. Every run of a seed is trained on as many rows as the first one's.
    dataset, overrides ("trainer.epochs=1"): for all of them. resume: what is finished in the output directory stays.
    The folder gets compare.json, compare.html and curves.png beside the runs.

    A run that fails is reported in the result, and does not end the others. Raises InputError or ConfigError where the
    configurations cannot be compared, OutputError where the folder is taken, KeyboardInterrupt on Ctrl-C.
    observer: hears the steps of each run. say: see docs/python.md.
    """
    _require_usable(configs, seeds)
    entrants = entrants_of(configs, overrides, dataset)
    default = _DEFAULT_OUTPUT / "-vs-".join(each.name for each in entrants)[:_LONGEST_DEFAULT]
    folder = default if output_directory is None else Path(output_directory)
    with listening(say, is_short=True) as told:
        begun = _begun(folder, entrants, seeds, resume=resume, say=told)
        for line in begun.changes:
            told(line)
        result = _run_all(begun, entrants, Observers([told] if observer is None else [told, observer]), told)
        _draw(result, told)
    return result


def _require_usable(configs: Sequence[str | Path], seeds: int) -> None:
    """Raise InputError for what is not a list of files, or not a number of seeds."""
    expected = "a list of YAML files or folders of runs"
    if isinstance(configs, str | Path) or not isinstance(configs, Sequence):
        raise InputError(what=f"configs is {type(configs).__name__}", expected=expected)
    for config in configs:
        if not isinstance(config, str | Path):
            raise InputError(what=f"one of configs is {type(config).__name__}", expected=expected)
    if isinstance(seeds, bool) or not isinstance(seeds, int) or not 1 <= seeds <= _MOST_SEEDS:
        raise InputError(
            what=f"seeds is {seeds!r}", where="--seeds", expected=f"a whole number from 1 to {_MOST_SEEDS:,}"
        )


def _begun(folder: Path, entrants: Sequence[Entrant], num_seeds: int, *, resume: bool, say: Say) -> CompareResult:
    """Return the comparison with its finished runs. Raises OutputError where the folder holds something else."""
    first_seed = entrants[0].config.random_seed
    fresh = CompareResult(
        output_directory=folder,
        files={each.name: str(each.file) for each in entrants},
        digests={each.name: each.digest for each in entrants},
        seeds=tuple(range(first_seed, first_seed + num_seeds)),
        changes=tuple(change for each in entrants for change in each.changes),
        runs=(),
    )
    file = folder / FILE
    if file.is_file():
        if not resume:
            raise OutputError(
                what="there is a comparison in this folder already; nothing was changed",
                where=str(folder),
                fix="continue it with --resume, or choose another folder with --output-directory",
            )
        return replace(fresh, runs=_kept(fresh, file))
    if RunFolder(folder).is_run:
        raise OutputError(
            what="the folder holds a training run, not a comparison; nothing was changed",
            where=str(folder),
            fix="choose another folder with --output-directory",
        )
    RunFolder(folder).check(resume=False)
    if resume:
        say(f"nothing to continue in {folder}: the comparison starts with its first run")
    with writing(FILE, file):
        make_folder(folder)
    return fresh


def _kept(now: CompareResult, file: Path) -> tuple[ComparedRun, ...]:
    """Return the finished runs of an earlier call, which may have had fewer configurations and fewer seeds."""
    digests, seeds, runs = read_runs(file)
    names = list(now.digests)
    changed = [
        f"{name} is not what it was when this comparison was begun: its file, or an override, has changed"
        for name in digests
        if name in now.digests and now.digests[name] != digests[name]
    ]
    if names[: len(digests)] != list(digests):
        changed.append(
            f"this comparison was begun with {', '.join(digests)}, in that order, now come {', '.join(names)}"
        )
    if seeds and seeds[0] != now.seeds[0]:
        changed.append(f"this comparison was begun with seed {seeds[0]}, now the first is {now.seeds[0]}")
    fix = "set it back, or choose another folder with --output-directory; more seeds and configurations may follow"
    OutputError.raise_for(Problem(what=what, where=str(file), fix=fix) for what in changed)
    wanted = {(name, seed) for name in names for seed in now.seeds}
    return tuple(run for run in runs if run.outcome == "finished" and (run.name, run.seed) in wanted)


def _run_all(result: CompareResult, entrants: Sequence[Entrant], observer: Observer, say: Say) -> CompareResult:
    """Run what is not finished. Raises InputError where the very first run shows that the configuration or the data is
    wrong, and KeyboardInterrupt on Ctrl-C.
    """
    orders = _in_turn(entrants, result.seeds)
    done = {(run.name, run.seed) for run in result.runs}
    _write(result)
    with stopping() as stop:
        for number, (entrant, seed) in enumerate(orders, start=1):
            if (entrant.name, seed) in done:
                continue
            if stop.num_asked:
                raise _interrupted(result, len(orders))
            say(Note(f"run {number:,} of {len(orders):,}: {entrant.name}, seed {seed}", kind="begin"))
            is_new = all(run.name != entrant.name for run in result.runs)
            # What a configuration's first run said, its other runs would repeat.
            run = _one(result, entrant, seed, observer, say if is_new else lambda line: None, stop)
            if run is not None:
                result = replace(result, runs=(*result.runs, run))
                _write(result)
            if run is None or stop.num_asked:
                raise _interrupted(result, len(orders))
            if run.error is not None:
                say(Note(f"{entrant.name}, seed {seed}, failed: {run.error}", kind="begin"))
    return result


def _in_turn(entrants: Sequence[Entrant], seeds: Sequence[int]) -> list[tuple[Entrant, int]]:
    """Order the runs seed by seed, so that a machine that slows down slows all configurations.

    The first configuration opens each seed, since it decides how many rows the others get; these take turns.
    """
    first, others = entrants[0], entrants[1:]
    orders = []
    for number, seed in enumerate(seeds):
        turn = number % len(others)
        orders += [(each, seed) for each in (first, *others[turn:], *others[:turn])]
    return orders


def _one(
    result: CompareResult, entrant: Entrant, seed: int, observer: Observer, say: Say, stop: Stop
) -> ComparedRun | None:
    """Return the run once it has ended; None where Ctrl-C stopped it."""
    first_name = next(iter(result.files))
    overrides = [*entrant.overrides, f"random_seed={seed}"]
    if entrant.name != first_name:
        first = result.figures[first_name].get(seed)
        if first is None:
            return _failed(entrant, seed, f"not run, since {first_name}, which says how many rows it gets, failed")
        overrides += ["trainer.train_steps=null", f"trainer.train_samples={first.num_samples}"]
    run = RunFolder(result.output_directory / entrant.name / f"seed-{seed}")
    order = TrainOrder(
        config=str(entrant.file),
        overrides=tuple(overrides),
        output_directory=str(run.path),
        resume=run.is_run,
        num_processes=entrant.num_processes,
    )
    ended = run_in_process(order, observer=observer, say=say, stop=stop)
    if ended.was_stopped:
        return None
    if isinstance(ended.error, InputError) and not result.runs and entrant.name == first_name:
        _withdraw(result)
        raise ended.error
    return _told(entrant, seed, ended, run)


def _withdraw(result: CompareResult) -> None:
    """Empty the folder for the corrected configuration, unless it holds a run that was stopped."""
    folder = result.output_directory
    for name in result.files:
        with suppress(OSError):  # it is not there, or holds something
            (folder / name).rmdir()
    if [each.name for each in folder.iterdir()] == [FILE]:
        (folder / FILE).unlink()


def _told(entrant: Entrant, seed: int, ended: Ended, run: RunFolder) -> ComparedRun:
    try:
        rows = ended.require("its process", fix="what it printed stands above")
    except BrimError as error:
        return _failed(entrant, seed, str(error))
    try:
        figures = RunFigures.of(run.metrics)
    except (OSError, ValueError, KeyError) as error:
        return _failed(entrant, seed, f"{run.metrics.name} cannot be read: {error}")
    return ComparedRun(name=entrant.name, seed=seed, outcome="finished", figures=figures, rows=rows, error=None)


def _failed(entrant: Entrant, seed: int, error: str) -> ComparedRun:
    return ComparedRun(name=entrant.name, seed=seed, outcome="failed", figures=None, rows={}, error=error)


def _interrupted(result: CompareResult, num_runs: int) -> KeyboardInterrupt:
    finished = sum(run.outcome == "finished" for run in result.runs)
    return KeyboardInterrupt(
        Problem(
            what=f"stopped; {finished} of {num_runs} runs are finished",
            where=str(result.output_directory),
            fix="continue with the same command and --resume",
        )
    )


def _write(result: CompareResult) -> None:
    file = result.output_directory / FILE
    with writing(FILE, file):
        write_text(file, json.dumps(result.as_json(), indent=1) + "\n")


def _draw(result: CompareResult, say: Say) -> None:
    """Write the picture and the page, where matplotlib is installed."""
    if not result.summaries:
        return
    title = "Loss over tokens: " + ", ".join(result.files)
    number = len(result.seeds)
    bands = "the bands reach from the lowest to the highest, without what a seed makes harder or easier for all"
    subtitle = "one seed" if number == 1 else f"means of {number} seeds; {bands}"
    try:
        figure = curves_plot(result.figures, title=title, subtitle=subtitle)
    except InputError as error:  # without matplotlib
        say(f"{error.problems[0].what}: no curves.png and no compare.html; pip install 'brim[plots]'")
        return
    for name in ("curves.png", "compare.html"):
        file = result.output_directory / name
        with writing(name, file):
            save_picture(figure, file, title=title, tables=result.tables(with_runs=True), lines=result.notes)


WITHOUT_EARLY_STOP = "trainer.early_stop=-1"


_LONGEST_NAME = 60  # characters: it is a folder's name, and a cell of the tables


_LENGTH_KEYS = ("epochs", "train_steps", "train_samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """Hold a configuration that takes part."""

    name: str  # of its folder and in the tables; no two have the same
    file: Path
    config: Config
    overrides: tuple[str, ...]  # of every run of it, beside the seed and the number of samples
    changes: tuple[str, ...]  # what the comparison sets otherwise, for people
    num_processes: int  # that train each run of it together

    @property
    def digest(self) -> str:
        """Return a digest of all that a run of it depends on, but the seed and the content of the data."""
        settings = self.config.model_dump(mode="json", exclude={"random_seed"})
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def entrants_of(configs: Sequence[str | Path], overrides: Sequence[str], dataset: Files | None) -> list[Entrant]:
    """Return the configurations as they will be run, the first being what the others are compared to.

    Raises InputError for fewer than two, and for GPUs that are not there; ConfigError for what does not train and for
    other data, splits or answers.
    """
    if len(configs) < 2:
        raise InputError(
            what="there is nothing to compare: " + ("one configuration" if configs else "no configuration"),
            expected="two or more configurations",
            fix="name another one; one alone is trained by `brim train`",
        )
    said = [*overrides, *([] if dataset is None else [f"dataset={json.dumps(absolute_files(dataset))}"])]
    said.append(WITHOUT_EARLY_STOP)
    files = [_config_file(Path(config)) for config in configs]
    loaded = [_loaded(file, said, is_run=Path(config).is_dir()) for config, file in zip(configs, files, strict=True)]
    problems = [each for config, file in zip(loaded, files, strict=True) for each in _untrainable(config, file)]
    problems += [
        each for config, file in zip(loaded[1:], files[1:], strict=True) for each in _differ(loaded[0], config, file)
    ]
    ConfigError.raise_for(problems)
    names = _names(configs)
    return [
        Entrant(
            name=name,
            file=file,
            config=config,
            overrides=tuple(said),
            changes=tuple(_changes(config, loaded[0], name=name, first_name=names[0])),
            num_processes=num_processes(None, config.backend.trainer.num_workers),
        )
        for name, file, config in zip(names, files, loaded, strict=True)
    ]


def _config_file(path: Path) -> Path:
    file = path / "config.yaml" if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            what="this folder is not a run: it has no config.yaml" if path.is_dir() else f"no such file: {path}",
            where=str(path) if path.is_dir() else "",
            expected="a YAML configuration, or the folder of a run",
        )
    return file


def _loaded(file: Path, overrides: Sequence[str], *, is_run: bool) -> Config:
    """Load a configuration, and check that its base model is there and can be trained."""
    config = load_config(file, overrides).config
    if is_run:
        require_trust_said_again(config, overrides, file, begins=True)
    folder = locate(config.base_model, initialize=config.initialize, trust_remote_code=config.trust_remote_code)
    if config.adapter is not None and config.adapter.pretrained_adapter_weights is not None:
        continued(config.adapter)
    require_trainable(config, folder)
    return config


def _untrainable(config: Config, file: Path) -> Iterator[Problem]:
    if not isinstance(config.trainer, FinetuneTrainer):
        yield Problem(
            what="this configuration trains nothing",
            where=str(file),
            expected="trainer.type: finetune",
            fix="models that are not trained are compared with `brim evaluate --against`",
        )
    if config.dataset is None:
        yield Problem(what="there is no data set", where=str(file), expected="--dataset FILE, or the key `dataset`")


def _differ(first: Config, other: Config, file: Path) -> Iterator[Problem]:
    """Yield a problem for each setting that makes the losses of two configurations those of different tasks."""
    ours, theirs = _task(first), _task(other)
    for key in ours:
        if ours[key] != theirs[key]:
            yield Problem(
                what=f"{key} is {_shown(theirs[key])}, in the first configuration {_shown(ours[key])}: their losses "
                "would be of different rows or answers",
                where=str(file),
                fix="set the same for all; an override such as "
                + ("--dataset FILE does" if key == "dataset" else f"{key}=… does"),
            )


def _task(config: Config) -> dict[str, Any]:
    """Return what has to be the same: which rows there are, how they are split, and what is learned from each."""
    rows = config.preprocessing
    return {
        "dataset": None if config.dataset is None else absolute_files(config.dataset),
        "preprocessing.split": rows.split.model_dump(mode="json"),
        "preprocessing.sample_ratio": rows.sample_ratio,
        "preprocessing.sample_size": rows.sample_size,
        **_answer(config),
    }


def _answer(config: Config) -> dict[str, Any]:
    if config.chat is not None:
        return {"chat": True, "output_features": None}
    feature = config.output_features[0]
    return {"chat": False, "output_features": [feature.column_name, feature.type]}


def _changes(config: Config, first: Config, *, name: str, first_name: str) -> Iterator[str]:
    trainers = (config.finetune_trainer, first.finetune_trainer)
    ours, theirs = ({key: getattr(trainer, key) for key in _LENGTH_KEYS} for trainer in trainers)
    if config is not first and (ours != theirs or ours["train_steps"] is not None):
        key = next((key for key in reversed(_LENGTH_KEYS) if ours[key] is not None), "epochs")
        yield f"{name} is trained on as many rows as {first_name}, whatever its trainer.{key} ({ours[key]:,}) says"
    if config.random_seed != first.random_seed:
        yield f"{name} takes the seeds of {first_name}, not its own random_seed ({config.random_seed})"


def _names(configs: Sequence[str | Path]) -> list[str]:
    """Name each configuration by its file without the ending, numbered where two are the same."""
    names: list[str] = []
    for config in configs:
        path = Path(os.path.abspath(config))  # noqa: PTH100 (a folder may be named `.`)
        stem = (path.name if path.is_dir() else path.stem)[:_LONGEST_NAME]
        number, name = 1, stem
        while name.lower() in (*(each.lower() for each in names), "compare.json", "compare.html", "curves.png"):
            number += 1
            name = f"{stem}-{number}"
        names.append(name)
    return names


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
