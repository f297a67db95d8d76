"""Run `brim memory`: predict the GPU memory of a configuration without a GPU, compare variants, or measure it.

The flags are checked before anything slow is imported.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer
from rich.console import Console

from brim.cli.options import (
    ConfigOrRun,
    JsonOption,
    MemoryOption,
    Overrides,
    VerboseOption,
    config_file,
    print_card,
    say,
)
from brim.config import LoadedConfig
from brim.config.schema import Config
from brim.config.text import misspelt, show
from brim.errors import InputError, Problem
from brim.memory import MOST_GPUS, MOST_MEMORY_BYTES, MOST_ROWS, MOST_TOKENS, Offload
from brim.memory.events import Phase
from brim.models import require_trainable
from brim.models.folders import locate
from brim.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from brim.memory import MemoryPrediction
    from brim.memory.closed_form import Napkin


_BatchSize = Annotated[
    int | None,
    typer.Option("--batch-size", min=1, max=MOST_ROWS, metavar="N", help="Rows at once. Default: the configuration's."),
]
_SequenceLength = Annotated[
    int | None,
    typer.Option(
        "--sequence-length",
        min=2,
        max=MOST_TOKENS,
        metavar="N",
        help="Tokens of each row; of each prompt with --phase generate.",
    ),
]
_Device = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="A GPU, such as t4 or a100-80gb. Default: this machine's."),
]
_Phase = Annotated[
    str | None,
    typer.Option(
        "--phase", metavar="NAME", help="load, train, evaluate or generate. Default: train, if the trainer trains."
    ),
]
_WorldSize = Annotated[
    int, typer.Option("--world-size", min=1, max=MOST_GPUS, metavar="N", help="GPUs that share the model (FSDP).")
]
_Offload = Annotated[
    str | None, typer.Option("--offload", metavar="NAME", help="What is kept on the CPU: none, optimizer or weights.")
]
_Compare = Annotated[bool, typer.Option("--compare", help="Full, 16-bit, LoRA, 8-bit and 4-bit training side by side.")]
_Explain = Annotated[bool, typer.Option("--explain", help="Also work out each part by hand.")]
_Measure = Annotated[bool, typer.Option("--measure", help="Also run it on this machine's device, on random rows.")]
_Layers = Annotated[
    int | None,
    typer.Option("--layers", min=1, metavar="N", help="Measure N and 2 N layers, and extrapolate to all."),
]
_Steps = Annotated[
    int | None,
    typer.Option("--steps", min=1, metavar="N", help="Measure N steps; five or more show a leak."),
]
_Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it: .png, or .html with the numbers.")]


def memory(
    config_or_run: ConfigOrRun,
    overrides: Overrides = None,
    batch_size: _BatchSize = None,
    sequence_length: _SequenceLength = None,
    device: _Device = None,
    memory: MemoryOption = None,
    phase: _Phase = None,
    world_size: _WorldSize = 1,
    offload: _Offload = None,
    compare: _Compare = False,
    explain: _Explain = False,
    measure: _Measure = False,
    layers: _Layers = None,
    steps: _Steps = None,
    plot: _Plot = None,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Predict the GPU memory of a run from its base model's config.json. Needs no GPU, no weights and no data."""
    if not measure:
        collect_seldom()
    request = MemoryRequest(
        batch_size=batch_size,
        sequence_length=sequence_length,
        device=device,
        memory_bytes=device_memory(memory),
        phase=named_phase(phase),
        world_size=world_size,
        offload=named_offload(offload),
        compare=compare,
        explain=explain,
        measure=measure,
        layers=layers,
        steps=steps,
        plot=plot,
        verbose=verbose,
        as_json=as_json,
    )
    check_request(request)
    from brim.config import load_config, require_trust_said_again

    loaded = load_config(config_file(config_or_run), overrides or [])
    if config_or_run.is_dir():
        require_trust_said_again(loaded.config, overrides or [], config_or_run / "config.yaml")
    run(request, loaded)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """Hold the flags."""

    batch_size: int | None
    sequence_length: int | None
    device: str | None
    memory_bytes: int | None
    phase: Phase | None
    world_size: int
    offload: Offload | None
    compare: bool
    explain: bool
    measure: bool
    layers: int | None
    steps: int | None
    plot: Path | None
    verbose: bool
    as_json: bool

    def given(self) -> dict[str, Any]:
        """Return what predictions and comparisons take alike, as they call it."""
        names = ("batch_size", "sequence_length", "device", "memory_bytes", "world_size", "offload")
        return {name: getattr(self, name) for name in names}

    @property
    def is_card(self) -> bool:
        """Say whether the answer is a card, on which the notes stand, too."""
        return not (self.verbose or self.as_json or self.compare or self.measure)


def run(request: MemoryRequest, loaded: LoadedConfig) -> None:
    """Do what was asked for and print it. Results go to stdout, and notes to stderr where there is no card for them."""

    def say_notes() -> None:
        for note in loaded.notes:
            say(note)

    if not request.is_card:
        say_notes()
    try:
        _run(request, loaded.config, loaded.notes)
    except BaseException:
        if request.is_card:
            say_notes()
        raise


def _run(request: MemoryRequest, config: Config, notes: Sequence[str]) -> None:
    # Before torch is imported, so that what is wrong with the base model's folder is reported at once.
    folder = locate(
        config.base_model, initialize=config.initialize, trust_remote_code=config.trust_remote_code, config_only=True
    )
    if request.compare:
        _compare(request, config)
        return
    require_trainable(config, folder)
    if request.measure:
        _measure(request, config)
    else:
        _predict(request, config, notes)


def _predict(request: MemoryRequest, config: Config, notes: Sequence[str]) -> None:
    from brim.memory import predict_memory
    from brim.models import model_note
    from brim.notes import PlanCard
    from brim.report import memory_lines, memory_table

    prediction = predict_memory(config, phase=request.phase, **request.given())
    napkin = _napkin(request, config, prediction)
    if request.as_json:
        print(json.dumps({**prediction.as_dict(), **_explained(napkin)}))
    else:
        console = Console(highlight=False)
        if request.is_card:
            card = PlanCard(hint="--verbose")
            card.take(model_note(config, prediction.devices_in_words(), trains=prediction.phase == "train"))
            for line in (*notes, *memory_lines(prediction)):
                card.take(line)
            print_card(card.end())
        else:
            console.print(memory_table(prediction, title=_title(config)))
        _print_napkin(console, napkin, prediction)
    if request.plot is not None:
        from brim.report import memory_plot, prediction_tables

        _save(request.plot, memory_plot(prediction, title=_title(config)), config, prediction_tables(prediction))


def _compare(request: MemoryRequest, config: Config) -> None:
    from brim.memory import Compared, Failed, compare_memory
    from brim.notes import status
    from brim.report import Screen

    with Screen() as screen:
        screen(status("tracing each variant"))
        answers = []
        for each in compare_memory(config, **request.given()):
            answers.append(each)
            if request.verbose and isinstance(each, Compared):
                screen(f"{each.variant.name}: {each.prediction.reason}")
    found = [each for each in answers if isinstance(each, Compared)]
    failed = [each for each in answers if isinstance(each, Failed)]
    if request.as_json:
        print(json.dumps([*(each.as_dict() for each in found), *(each.as_dict() for each in failed)]))
    else:
        from brim.cli.memory_output import print_compared

        print_compared(Console(highlight=False), found, failed, title=_title(config), with_squares=request.verbose)
    if request.plot is not None:
        from brim.cli.memory_output import compared_picture, compared_tables

        _save(request.plot, compared_picture(found, title=_title(config)), config, compared_tables(found))


def _measure(request: MemoryRequest, config: Config) -> None:
    from brim.cli.memory_output import measured_picture, measured_tables, print_measured
    from brim.workflows.measure import measure_memory

    beside = measure_memory(
        config,
        batch_size=request.batch_size,
        sequence_length=request.sequence_length,
        phase=request.phase,
        steps=request.steps,
        layers=request.layers,
    )
    napkin = _napkin(request, config, beside.main)
    if request.as_json:
        print(json.dumps({**beside.as_dict(), **_explained(napkin)}))
    else:
        console = Console(highlight=False)
        print_measured(console, beside, title=_title(config))
        _print_napkin(console, napkin, beside.main)
    if request.plot is not None:
        _save(request.plot, measured_picture(beside, title=_title(config)), config, measured_tables(beside))


def _napkin(request: MemoryRequest, config: Config, prediction: MemoryPrediction) -> Napkin | None:
    if not request.explain:
        return None
    from brim.memory import explain_memory

    return explain_memory(config, prediction)


def _explained(napkin: Napkin | None) -> dict[str, Any]:
    return {} if napkin is None else {"napkin": napkin.as_dict()}


def _print_napkin(console: Console, napkin: Napkin | None, prediction: MemoryPrediction) -> None:
    if napkin is not None:
        from brim.report import napkin_table

        console.print()
        console.print(napkin_table(napkin, prediction))


def _save(path: Path, figure: Any, config: Config, tables: Any) -> None:
    from brim.report import save_picture

    save_picture(figure, path, title=f"{_title(config)}: memory", tables=tables)
    say(f"picture: {path}")


def _title(config: Config) -> str:
    return Path(config.base_model).name


def named_phase(text: str | None) -> Phase | None:
    """Return the phase of this name. Raises InputError if there is none."""
    if text is None or text in get_args(Phase):
        return cast("Phase | None", text)
    meant = misspelt(text, get_args(Phase))
    raise InputError(
        what=f"unknown phase {show(text)}",
        where="--phase",
        expected="load, train, evaluate or generate",
        fix=f"did you mean {meant}?" if meant else "",
    )


def named_offload(text: str | None) -> Offload | None:
    """Return what is kept on the CPU; None: as memory.offload says. Raises InputError for an unknown name."""
    if text is None or text in get_args(Offload):
        return cast("Offload | None", text)
    raise InputError(what=f"unknown --offload {text[:60]!r}", where="--offload", expected="none, optimizer or weights")


def device_memory(text: str | None) -> int | None:
    """Return the bytes of a size such as "14GiB". Raises InputError if it is not a size."""
    if text is None:
        return None
    try:
        num_bytes = parse_bytes(text)
    except ValueError as error:
        raise InputError(what=str(error), where="--memory", expected="a size with its unit, such as 14GiB") from error
    if num_bytes == 0:
        raise InputError(what="the device has no memory", where="--memory", expected="a size such as 14GiB")
    if num_bytes > MOST_MEMORY_BYTES:
        most = f"at most {format_bytes(MOST_MEMORY_BYTES)}"
        raise InputError(what="no device has that much memory", where="--memory", expected=most)
    return num_bytes


def check_request(request: MemoryRequest) -> None:
    """Refuse flags that contradict each other, an unknown device, and a picture that cannot be written.

    Raises InputError with all contradictions; if there are none, with the first of the other problems.
    """
    problems = list(_contradictions(request))
    if problems:
        raise InputError(*problems)
    check_device(request.device, request.memory_bytes)
    if request.plot is not None:
        from brim.report import check_picture

        check_picture(request.plot)


def _contradictions(request: MemoryRequest) -> Iterator[Problem]:
    if request.device is not None and request.memory_bytes is not None:
        yield _TWO_DEVICES
    for name, value in (("--steps", request.steps), ("--layers", request.layers)):
        if value is not None and not request.measure:
            yield _problem(f"{name} is for measuring, but --measure is not given", f"add --measure, or remove {name}")
    if request.steps is not None and request.layers is not None:
        yield _problem("--steps measures the whole model, and --layers only a part of it", "keep one of them")
    if request.steps is not None and request.phase not in (None, "train"):
        yield _problem(f"--steps is for training, but --phase is {request.phase}", "remove one of them")
    for name, is_given in (("--measure", request.measure), ("--explain", request.explain)):
        if request.compare and is_given:
            yield _problem(f"--compare is for several configurations, {name} for one", f"remove --compare or {name}")
    if request.compare and request.phase not in (None, "train"):
        yield _problem(f"--compare is for training, but --phase is {request.phase}", "remove one of them")
    if request.measure:
        yield from _beside_measure(request)


def _beside_measure(request: MemoryRequest) -> Iterator[Problem]:
    for name, value in (("--device", request.device), ("--memory", request.memory_bytes)):
        if value is not None:
            yield _problem(f"--measure runs on this machine's device, but {name} names another", "remove one of them")
    if request.world_size > 1:
        yield _problem("--measure runs on one device, but --world-size asks for several", "remove one of them")
    if request.offload not in (None, "none"):
        yield _problem("--measure runs what brim can train today: everything on the device", "remove --offload")


def _problem(what: str, fix: str) -> Problem:
    return Problem(what=what, where="command line", fix=fix)


_TWO_DEVICES = _problem("both --device and --memory are given", "keep one: a device's memory is known by its name")


def collect_seldom() -> None:
    """Run the garbage collector less often in a process that only traces: its million objects hold no tensors.

    Otherwise collection takes a tenth of the time.
    """
    gc.set_threshold(100_000, 20, 100)


def check_device(device: str | None, memory_bytes: int | None) -> None:
    """Refuse two devices, or an unknown one, before anything slow is imported."""
    if device is None:
        return
    if memory_bytes is not None:
        raise InputError(_TWO_DEVICES)
    from brim.memory.devices import find_device

    find_device(device)
