"""Run the verbs that work on finished runs or make several: chat, compare, verify-resume, export, upload.

`compare` trains several configurations on equal tokens with several seeds. `verify-resume` tests on the user's own run
whether an interruption changes anything, and prints a table of what was compared, what is promised and what differs.
`export` writes what a run has learned, merged into its base model if asked; `upload` sends a run's model, or an
exported folder, to the Hub.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from brim.cli.options import (
    ConfigOrRun,
    DatasetOption,
    GpusOption,
    JsonOption,
    Overrides,
    finite_or_null,
    is_run,
    message,
    open_model,
    require_exists,
    resumable,
    say,
)
from brim.errors import BrimError, InputError
from brim.notes import status
from brim.units import format_count

if TYPE_CHECKING:
    from brim.workflows.compare import CompareResult
    from brim.workflows.prediction import Conversation
    from brim.workflows.verify_resume import Check, Difference, ResumeProof


def compare(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A YAML file, or a run's folder: what the others are compared with.")
    ],
    others: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG_OR_KEY=VALUE",
            help="The other configurations; and dotted keys to override in all of them, such as trainer.epochs=1.",
        ),
    ] = None,
    dataset: DatasetOption = None,
    seeds: Annotated[
        int,
        typer.Option("--seeds", min=1, metavar="N", help="Runs of each configuration: random_seed, random_seed + 1, …"),
    ] = 3,
    output_directory: Annotated[
        Path | None, typer.Option("--output-directory", metavar="DIR", help="Default: results/<A>-vs-<B>.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue in that folder; finished runs are not repeated.")
    ] = False,
    gpus: GpusOption = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train configurations with several seeds on equal tokens, and compare their final losses, steps, time, memory."""
    from brim.report import Screen
    from brim.workflows.compare import compare as compared

    files, overrides = _apart([config, *(others or [])])
    with Screen(is_short=True) as screen, resumable():
        result = compared(
            files,
            dataset=dataset,
            seeds=seeds,
            output_directory=output_directory,
            resume=resume,
            overrides=[*overrides, *_workers(gpus)],
            say=screen,
        )
    if as_json:
        print(json.dumps(result.as_json(with_curves=False)))
    elif as_markdown:
        print(result.markdown(), end="")
    else:
        _print(result)
    if result.failed:
        raise typer.Exit(1)


def _apart(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tell configurations from overrides: what has an equals sign and is not a file is an override."""
    overrides = [each for each in arguments if "=" in each and not Path(each).exists()]
    return [each for each in arguments if each not in overrides], overrides


def _workers(gpus: str | None) -> list[str]:
    """Return the override that --gpus stands for, where it was given."""
    from brim.distributed import num_processes

    return [] if gpus is None else [f"backend.trainer.num_workers={num_processes(gpus, None)}"]


def _print(result: CompareResult) -> None:
    console = Console(highlight=False, soft_wrap=False)
    for shown in result.tables():
        console.print(Text(shown.caption, style="bold"))
        table = Table(box=None, pad_edge=False, header_style="bold")
        for number, head in enumerate(shown.heads):
            is_text = number < shown.num_texts or head.startswith("what")
            table.add_column(Text(head), justify="left" if is_text else "right")
        for row in shown.rows:
            table.add_row(*map(Text, row))
        console.print(table)
        console.print()
    for note in result.notes:
        lines = textwrap.wrap(note, console.width - 2, break_long_words=False, break_on_hyphens=False)
        print("- " + "\n  ".join(lines))
    print(f"folder: {result.output_directory}")


def verify_resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, finished or not. It is only read.")],
    overrides: Overrides = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", help="How many steps to make with and without interruptions.")
    ] = 4,
    from_step: Annotated[
        int | None,
        typer.Option(
            "--from-step",
            metavar="K",
            help="Begin after this step, such as one before the batch size changes. Default: the newest checkpoint "
            "that leaves so many steps, else the first step.",
        ),
    ] = None,
    dataset: DatasetOption = None,
    gpus: GpusOption = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave both runs in their temporary folder.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Stop, kill and resume a copy of a run, and compare it with a copy that was not disturbed."""
    require_exists(run, expected="the folder of a run")
    from brim.workflows.verify_resume import verify_resume as verify

    with _ends_as_ctrl_c():
        proof = verify(
            run,
            steps=steps,
            from_step=from_step,
            dataset=dataset,
            overrides=[*(overrides or []), *_workers(gpus)],
            keep=keep,
        )
    if as_json:
        print(json.dumps(finite_or_null(proof.as_dict())))
    else:
        print_proof(proof)
    if not proof.holds:
        raise typer.Exit(1)


@contextmanager
def _ends_as_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM and a closed terminal like Ctrl-C, which also ends the training process and deletes the folder."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as with nohup
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def print_proof(proof: ResumeProof) -> None:
    """Print the table, each difference in full, and the verdict."""
    console = Console(highlight=False)
    for line in _head(proof):
        console.print(Text(line))
    console.print()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "compared", "promised", "found"):
        table.add_column(name)
    for check in proof.checks:
        style = "" if check.holds else "bold red"
        table.add_row(
            *(Text(cell) for cell in (check.name, check.compared, _promised(check), check.found)), style=style
        )
    console.print(table)
    console.print()
    for check in proof.checks:
        if check.difference is not None:
            console.print(Text(_difference(check, check.difference)))
    console.print(Text(f"the run's own log {proof.own_log}"))
    console.print(Text(proof.verdict, style="bold"))


def _head(proof: ResumeProof) -> Iterator[str]:
    first, last = proof.start_step + 1, proof.start_step + proof.num_steps
    steps = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
    source = f"the checkpoint of step {proof.checkpoint_step:,}" if proof.checkpoint_step else "the start of the run"
    processes = "" if proof.num_processes == 1 else f"{proof.num_processes:,} processes, "
    yield f"{steps} of {proof.run}, from {source}; {proof.device}, {processes}{proof.precision}"
    yield f"rows of a step: {_sizes(proof.effective_batch_sizes)}"
    stopped = (
        "" if proof.stopped_after is None else f"stopped by Ctrl-C after step {proof.stopped_after:,}, continued, "
    )
    yield f"disturbed: {stopped}killed by SIGKILL in step {proof.killed_in:,} {proof.killed_where}, continued"


def _sizes(sizes: Sequence[int]) -> str:
    """Write sizes as "8 (6 steps), then 16 (2 steps)"."""
    runs = [(size, len(list(group))) for size, group in groupby(sizes)]
    return ", then ".join(f"{size:,} ({format_count(num, 'step')})" for size, num in runs)


def _promised(check: Check) -> str:
    if check.promise == "open":
        return "nothing"
    return "equal" if check.promise == "bits" else f"within {check.tolerance:g}"


def _difference(check: Check, difference: Difference) -> str:
    size = "" if difference.max_abs is None else f"; at most by {difference.max_abs:.3g}"
    if difference.relative is not None and math.isfinite(difference.relative):
        size += f" ({difference.relative:.3g} relative)"
    more = f"; {difference.num:,} values differ" if difference.num > 1 else ""
    return (
        f"{check.name}: first at {difference.where}: {difference.undisturbed} without a break, {difference.disturbed} "
        f"with{more}{size}"
    )


_PROMPT = "> "


_COMMANDS = "/reset, /system TEXT, /set KEY VALUE (a key of generation), /help, /quit"


def chat(config_or_run: ConfigOrRun, overrides: Overrides = None) -> None:
    """Answer what is typed, line by line.

    It is a conversation if the configuration has `chat`, or if a base model's folder has a chat template.

    Ctrl-C stops an answer, Ctrl-D leaves. /help lists the commands.
    """
    overrides = [*_conversing(config_or_run), *(overrides or [])]
    notes: list[str] = []  # kept until the answer to the current line has ended
    from brim.report import Screen

    with Screen() as screen:
        screen(status("loading the model"))
        conversation = open_model(config_or_run, overrides).chat(say=notes.append)
    is_person = sys.stdin.isatty()
    if is_person:
        kind = "a conversation" if conversation.remembers else "each prompt stands alone"
        notes.append(f"{kind}; {_COMMANDS}; Ctrl-C stops an answer, Ctrl-D leaves")
    _say_all(notes)
    for line in _typed() if is_person else _piped():
        try:
            if not _obey(line, conversation):
                return
        except BrimError as error:
            if not is_person:
                raise
            notes.append(message(error.problems))
        finally:
            _say_all(notes)


def _conversing(path: Path) -> list[str]:
    """Return the override that makes a base model with a chat template converse; its folder cannot say so itself."""
    from brim.data.chat import has_template

    return ["chat={}"] if path.is_dir() and not is_run(path) and has_template(path) else []


def _say_all(notes: list[str]) -> None:
    for note in notes:
        say(note)
    notes.clear()


def _obey(line: str, conversation: Conversation) -> bool:
    """Do what a line asks for; return False to leave."""
    if not line.startswith("/"):
        if line.strip():
            _answer(line, conversation)
        return True
    command, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    if command == "/quit":
        return False
    if command == "/reset":
        conversation.reset()
    elif command == "/system":
        conversation.set_system(rest or None)
    elif command == "/set" and " " in rest:
        key, _, value = rest.partition(" ")
        conversation.set(key, value)
    elif command == "/help":
        say(_COMMANDS)
    else:
        raise InputError(
            what=f"no such command: {line}",
            expected=_COMMANDS,
            fix="begin a text that is no command with a space, not with /",
        )
    return True


def _answer(text: str, conversation: Conversation) -> None:
    """Show an answer as it is generated; Ctrl-C stops it, and what has been said stays."""
    is_empty = True
    with closing(conversation.ask(text)) as pieces:
        try:
            for piece in pieces:
                print(_shown(piece), end="", flush=True)
                is_empty = False
        except KeyboardInterrupt:
            print()
            say("stopped")
            return
    print(flush=True)
    if is_empty:
        say("the answer is empty: the model ended it at once")


def _typed() -> Iterator[str]:
    """Yield the lines that a person types; where Python has readline, they can be edited and recalled."""
    with suppress(ImportError):
        import readline  # noqa: F401 (changes what `input` does)
    while True:
        try:
            line = input(_PROMPT)
        except EOFError:
            print()
            return
        yield line


def _piped() -> Iterator[str]:
    for line in sys.stdin:
        yield line.removesuffix("\n")


def _shown(piece: str) -> str:
    """Return a piece of text; on a terminal, escape the control characters."""
    if piece.isprintable() or not sys.stdout.isatty():
        return piece
    return "".join(
        each.encode("unicode_escape").decode() if unicodedata.category(each) == "Cc" and each not in "\n\t" else each
        for each in piece
    )


Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]


def export(
    run: Run,
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="A new or an empty folder.")],
    overrides: Overrides = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge the adapter into the base: a model for plain transformers.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="NAME", help="Data type of the merged weights: bf16, fp16 or fp32. Default: bf16."
        ),
    ] = None,
    max_divergence: Annotated[
        float | None,
        typer.Option(
            "--max-divergence",
            metavar="X",
            help="Refuse a merge that moves predictions by more nats a token than this. Default: a tenth of what the "
            "adapter moves them, at least 0.001 and at most 0.01.",
        ),
    ] = None,
    dataset: DatasetOption = None,
    output_format: Annotated[str, typer.Option("--format", metavar="NAME", help="Only safetensors.")] = "safetensors",
    as_json: JsonOption = False,
) -> None:
    """Write the adapter, the whole model, or with --merge both in one, with tokenizer, chat template and card."""
    model = open_model(run, overrides or [])
    result = model.export(
        output, merge=merge, format=output_format, dtype=dtype, max_divergence=max_divergence, dataset=dataset
    )
    if not as_json:
        print("\n".join(result.lines()))
        return
    divergence = None if result.divergence is None else asdict(result.divergence)
    written = {"output": str(result.path), "kind": result.kind, "num_bytes": result.num_bytes}
    print(json.dumps({**written, "divergence": divergence, "tokens_of": result.probe}))


def upload(
    run_or_export: Annotated[
        Path, typer.Argument(metavar="RUN_OR_EXPORT", help="A run's folder, or one that `brim export` wrote.")
    ],
    repository: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The repository; created if there is none.")],
    private: Annotated[
        bool, typer.Option("--private", help="Make the repository private; an existing public one is refused.")
    ] = False,
    revision: Annotated[
        str | None,
        typer.Option("--revision", metavar="NAME", help="A branch; created if there is none. Default: main."),
    ] = None,
    commit_message: Annotated[
        str | None, typer.Option("--commit-message", metavar="TEXT", help="Default: Upload … by brim.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Send the model and its card to the Hub, with the token in HF_TOKEN. Nothing else of the run is sent."""
    require_exists(run_or_export, expected="a run's folder, or one that `brim export` wrote")
    from brim.workflows.export import upload as send

    result = send(run_or_export, repository, private=private, revision=revision, commit_message=commit_message)
    if as_json:
        print(json.dumps(asdict(result)))
        return
    files = format_count(len(result.files), "file")
    seen_by = "private" if result.private else "public"
    print(f"{files}, {result.num_bytes:,} bytes, {seen_by}: {', '.join(result.files)}")
    print(f"commit: {result.url}")
