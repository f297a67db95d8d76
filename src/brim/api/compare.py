"""Several configurations on equal tokens, each with several seeds: what the difference is, and how sure that is."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from brim.api.compare_configs import Entrant, entrants_of
from brim.api.compare_order import Ended, RunOrder
from brim.api.compare_process import Stop, run_in_process, stopping
from brim.api.compare_results import FILE, ComparedRun, CompareResult, in_order, read_runs
from brim.data.read_files import Files
from brim.errors import InputError, OutputError, Problem
from brim.files import make_folder, write_text, writing
from brim.notes import Say
from brim.report.curves_plot import curves_plot
from brim.report.matplotlib_import import require_matplotlib
from brim.report.picture import save_picture
from brim.report.screen import listening, show
from brim.train.observer import Observer, Observers
from brim.train.run_figures import run_figures
from brim.train.run_folder import RunFolder, check_run_folder

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

    A run that fails is told in the result, and does not end the others. Raises InputError or ConfigError where the
    configurations cannot be compared, OutputError where the folder is taken, KeyboardInterrupt on Ctrl-C.
    observer: hears the steps of each run. say: see docs/python.md.
    """
    _require_usable(configs, seeds)
    entrants = entrants_of(configs, overrides, dataset)
    default = _DEFAULT_OUTPUT / "-vs-".join(each.name for each in entrants)[:_LONGEST_DEFAULT]
    folder = default if output_directory is None else Path(output_directory)
    with listening(say) as told:
        begun = _begun(folder, entrants, seeds, resume=resume, say=told)
        for line in begun.changes:
            told(line)
        result = _run_all(begun, entrants, Observers([told] if observer is None else [told, observer]), told)
        _draw(result, told)
    return result


def _require_usable(configs: Sequence[str | Path], seeds: int) -> None:
    """Raise InputError for what is no list of files, or no number of seeds."""
    expected = "a list of YAML files or folders of runs"
    if isinstance(configs, str | Path) or not isinstance(configs, Sequence):
        raise InputError(Problem(what=f"configs is {type(configs).__name__}", expected=expected))
    for config in configs:
        if not isinstance(config, str | Path):
            raise InputError(Problem(what=f"one of configs is {type(config).__name__}", expected=expected))
    if isinstance(seeds, bool) or not isinstance(seeds, int) or not 1 <= seeds <= _MOST_SEEDS:
        raise InputError(
            Problem(what=f"seeds is {seeds!r}", where="--seeds", expected=f"a whole number from 1 to {_MOST_SEEDS:,}")
        )


def _begun(
    folder: Path, entrants: Sequence[Entrant], num_seeds: int, *, resume: bool, say: Callable[[str], None]
) -> CompareResult:
    """The comparison with what is finished of it. Raises OutputError where the folder holds something else."""
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
                Problem(
                    what="there is a comparison in this folder already; nothing was changed",
                    where=str(folder),
                    fix="continue it with --resume, or choose another folder with --output-directory",
                )
            )
        return replace(fresh, runs=_kept(fresh, file))
    if RunFolder(folder).is_run:
        raise OutputError(
            Problem(
                what="the folder holds a training run, and no comparison; nothing was changed",
                where=str(folder),
                fix="choose another folder with --output-directory",
            )
        )
    check_run_folder(folder, resume=False)
    if resume:
        say(f"nothing to continue in {folder}: the comparison starts anew")
    with writing(FILE, file):
        make_folder(folder)
    return fresh


def _kept(now: CompareResult, file: Path) -> tuple[ComparedRun, ...]:
    """The finished runs of an earlier call, which may have had fewer configurations and fewer seeds."""
    digests, seeds, runs = read_runs(file)
    names = list(now.digests)
    problems = [
        Problem(what=f"{name} is not what it was when this comparison was begun: its file, or an override, has changed")
        for name in digests
        if name in now.digests and now.digests[name] != digests[name]
    ]
    if names[: len(digests)] != list(digests):
        problems.append(
            Problem(
                what=f"this comparison was begun with {', '.join(digests)}, in that order, now come {', '.join(names)}"
            )
        )
    if seeds and seeds[0] != now.seeds[0]:
        problems.append(
            Problem(what=f"this comparison was begun with seed {seeds[0]}, now the first is {now.seeds[0]}")
        )
    if problems:
        fix = "set it back, or choose another folder with --output-directory; more seeds and configurations may follow"
        raise OutputError(*(replace(problem, where=str(file), fix=fix) for problem in problems))
    wanted = {(name, seed) for name in names for seed in now.seeds}
    return tuple(run for run in runs if run.outcome == "finished" and (run.name, run.seed) in wanted)


def _run_all(
    result: CompareResult, entrants: Sequence[Entrant], observer: Observer, say: Callable[[str], None]
) -> CompareResult:
    """Raises InputError where the very first run shows that the configuration or the data is wrong; and on Ctrl-C."""
    orders = _in_turn(entrants, result.seeds)
    done = {(run.name, run.seed) for run in result.runs}
    _write(result)
    with stopping() as stop:
        for number, (entrant, seed) in enumerate(orders, start=1):
            if (entrant.name, seed) in done:
                continue
            if stop.num_asked:
                raise _interrupted(result, len(orders))
            say(f"run {number:,} of {len(orders):,}: {entrant.name}, seed {seed}")
            is_new = all(run.name != entrant.name for run in result.runs)
            run = _one(result, entrant, seed, observer, say if is_new else _say_nothing, stop)
            if run is not None:
                result = replace(result, runs=in_order(result.runs, run))
                _write(result)
            if run is None or stop.num_asked:
                raise _interrupted(result, len(orders))
            if run.error is not None:
                say(f"{entrant.name}, seed {seed}, failed: {run.error}")
    return result


def _in_turn(entrants: Sequence[Entrant], seeds: Sequence[int]) -> list[tuple[Entrant, int]]:
    """Seed by seed, so that a machine that grows slower does so for all.

    The first configuration opens each seed, since it says how many rows the others get; these take turns.
    """
    first, others = entrants[0], entrants[1:]
    orders = []
    for number, seed in enumerate(seeds):
        turn = number % len(others)
        orders += [(each, seed) for each in (first, *others[turn:], *others[:turn])]
    return orders


def _one(
    result: CompareResult, entrant: Entrant, seed: int, observer: Observer, say: Callable[[str], None], stop: Stop
) -> ComparedRun | None:
    """The run, once it has ended; None where Ctrl-C stopped it."""
    first_name = next(iter(result.files))
    overrides = [*entrant.overrides, f"random_seed={seed}"]
    if entrant.name != first_name:
        num_samples = _samples_of_first(result, seed)
        if num_samples is None:
            return _failed(entrant, seed, f"not run, since {first_name}, which says how many rows it gets, failed")
        overrides += ["trainer.train_steps=null", f"trainer.train_samples={num_samples}"]
    run = RunFolder(result.output_directory / entrant.name / f"seed-{seed}")
    order = RunOrder(
        config=str(entrant.file), overrides=tuple(overrides), output_directory=str(run.path), resume=run.is_run
    )
    ended = run_in_process(order, observer=observer, say=say, stop=stop)
    if ended.outcome == "stopped":
        return None
    if ended.is_users_mistake and not result.runs and entrant.name == first_name:
        _withdraw(result)
        raise InputError(*ended.problems)
    return _told(entrant, seed, ended, run, say)


def _withdraw(result: CompareResult) -> None:
    """Leave the folder to the mended configuration, but where a run lies in it that was stopped."""
    folder = result.output_directory
    for name in result.files:
        with suppress(OSError):  # it is not there, or holds something
            (folder / name).rmdir()
    if [each.name for each in folder.iterdir()] == [FILE]:
        (folder / FILE).unlink()


def _samples_of_first(result: CompareResult, seed: int) -> int | None:
    first = result.figures[next(iter(result.files))].get(seed)
    return None if first is None else first.num_samples


def _told(entrant: Entrant, seed: int, ended: Ended, run: RunFolder, say: Callable[[str], None]) -> ComparedRun:
    if ended.outcome == "failed":
        return _failed(entrant, seed, "\n".join(map(str, ended.problems)))
    try:
        figures = run_figures(run.metrics)
    except (OSError, ValueError, KeyError) as error:
        return _failed(entrant, seed, f"{run.metrics.name} cannot be read: {error}")
    return ComparedRun(name=entrant.name, seed=seed, outcome="finished", figures=figures, rows=ended.rows, error=None)


def _failed(entrant: Entrant, seed: int, error: str) -> ComparedRun:
    return ComparedRun(name=entrant.name, seed=seed, outcome="failed", figures=None, rows={}, error=error)


def _say_nothing(line: str) -> None:
    """What a configuration's first run has said, its others would say again."""


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


def _draw(result: CompareResult, say: Callable[[str], None]) -> None:
    """The picture and the page, where matplotlib is installed."""
    if not result.summaries:
        return
    try:
        require_matplotlib()
    except InputError as error:
        say(f"{error.problems[0].what}: no curves.png and no compare.html; pip install 'brim[plots]'")
        return
    title = "Loss over tokens: " + ", ".join(result.files)
    number = len(result.seeds)
    bands = "the bands reach from the lowest to the highest, without what a seed makes harder or easier for all"
    subtitle = "one seed" if number == 1 else f"means of {number} seeds; {bands}"
    figure = curves_plot(result.figures, title=title, subtitle=subtitle)
    for name in ("curves.png", "compare.html"):
        with writing(name, result.output_directory / name):
            save_picture(
                figure,
                result.output_directory / name,
                title=title,
                tables=result.tables(with_runs=True),
                lines=result.notes,
            )
