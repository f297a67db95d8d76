"""Run `brim check`: check a configuration and its data before anything is loaded, and print advice and lengths."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from brim.cli.options import (
    ConfigOrRun,
    DatasetOption,
    JsonOption,
    Overrides,
    open_config,
    printable,
    problems_with_data,
)
from brim.errors import InputError
from brim.notes import kind_of
from brim.units import format_count

if TYPE_CHECKING:
    from brim.config.schema import Config
    from brim.data import CheckReport
    from brim.data.advice import Bin, Finding
    from brim.data.read import Source
    from brim.models.folders import ModelFolder


def check(
    config: ConfigOrRun,
    overrides: Overrides = None,
    dataset: DatasetOption = None,
    show: Annotated[
        int,
        typer.Option(
            "--show", min=0, metavar="N", help="Print N rows as the model sees them, the learned part marked."
        ),
    ] = 0,
    rows: Annotated[
        str | None,
        typer.Option("--rows", metavar="FILE", help="Also write the rows of all advice: parquet, jsonl or csv."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a configuration, its base model's folder and its data. Loads no weights and no torch."""
    from brim.models import notes_on_this_machine

    loaded = open_config(config, overrides or [], dataset)
    if config.is_dir():
        from brim.config import require_trust_said_again

        require_trust_said_again(loaded.config, overrides or [], config / "config.yaml")
    data = dataset if dataset is not None else loaded.config.dataset
    try:
        folder = _base_model(loaded.config)
    except InputError as error:
        others = problems_with_data(loaded.config, data)
        raise (InputError(*error.problems, *others) if others else error) from None
    lacking = notes_on_this_machine(loaded.config)
    notes = (*loaded.notes, *lacking)
    report = None
    if rows is not None:
        _require_writable(rows, data)
    if data is not None:
        from brim.data import check_data
        from brim.data.read import read
        from brim.data.tokens import load_encoder

        encoder = load_encoder(folder, trust_remote_code=loaded.config.trust_remote_code)
        source = read(data)
        report = check_data(loaded.config, source, encoder, context_length=folder.context_length, show=show)
        if rows is not None:
            write_advice_rows(report.advice, source, Path(rows))
    if as_json:
        print(json.dumps({"config": loaded.name, "notes": notes, "data": report and report.as_dict()}, indent=1))
        return
    for note in notes:
        print(note)
    context = f"{folder.context_length:,} tokens of context" if folder.context_length else "no limit on its context"
    verdict = "right, but not for this machine" if any(kind_of(line) == "warning" for line in lacking) else "right"
    print(f"{loaded.name}: the configuration is {verdict}; {folder.config['model_type']} with {context}")
    if report is None:
        print("no data was checked: give --dataset FILE, or the key `dataset`")
    else:
        _print_report(report)


def _base_model(config: Config) -> ModelFolder:
    """Return the base model's folder. Raises InputError if the configuration cannot be trained with it."""
    from brim.models import require_trainable
    from brim.models.folders import continued, locate

    folder = locate(config.base_model, initialize=config.initialize, trust_remote_code=config.trust_remote_code)
    if config.adapter is not None and config.adapter.pretrained_adapter_weights is not None:
        continued(config.adapter)
    require_trainable(config, folder)
    return folder


def _require_writable(rows: str, data: Sequence[str] | None) -> None:
    from brim.workflows.prediction import check_output

    if data is None:
        raise InputError(
            what="--rows writes rows of the data, and no data was given",
            fix="give --dataset FILE, or the key `dataset`",
        )
    check_output(Path(rows))


def _print_report(report: CheckReport) -> None:
    console = Console(highlight=False, soft_wrap=True)
    width = min(console.width, 100)
    print(f"{report.name}: {format_count(report.num_rows, 'row')}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("split")
    for name in ("rows", "tokens", "supervised", "median", "95%", "99%", "longest"):
        table.add_column(name, justify="right")
    for split in report.splits:
        lengths = split.total
        quantiles = (lengths.median, lengths.p95, lengths.p99, lengths.max) if lengths else ("–",) * 4
        figures = (split.num_rows, split.num_tokens, split.num_supervised_tokens, *quantiles)
        table.add_row(split.name, *(f"{figure:,}" if isinstance(figure, int) else figure for figure in figures))
    console.print(table)
    for line in histogram_lines(report.lengths, title="tokens", width=width):
        print(line)
    for line in (*report.other_events, *report.notes):
        print("\n".join(wrapped(line, width)))
    for line in advice_lines(report.advice, name=report.name, width=width):
        print(line)
    for sample in report.samples:
        console.rule(escape(sample.where), align="left", style="dim")
        for segment in sample.segments:
            text = escape(printable(segment.text, kept="\n\t"))
            console.print(f"[bold green]«{text}»[/]" if segment.supervised else text, end="")
        console.print()
    if report.samples:
        print("«…»: what the model learns to write")


_SHOWN = 3  # places of a finding


_BAR_CHARACTERS = 40


def advice_lines(findings: Sequence[Finding], *, name: str, width: int) -> Iterator[str]:
    """Yield what each finding is, what to do and where, wrapped. name: of the data; it is shown once a line."""
    if not findings:
        yield "advice: none"
        return
    yield "advice (it stops nothing; reasons: docs/data-advice.md; all rows: --rows FILE):"
    for number, finding in enumerate(findings, start=1):
        yield from wrapped(f"{number:2}. {finding.what}", width)
        yield from wrapped(f"    → {finding.fix}", width, indent=6)
        if finding.places:
            yield from wrapped(f"    {_places(finding, name)}", width)


def histogram_lines(bins: Iterable[Bin], *, title: str, width: int) -> Iterator[str]:
    """Yield a line for each bin: lengths, rows, and a bar, which is at its full width for the fullest bin."""
    bins = list(bins)
    if len(bins) < 2:
        return
    labels = [f"{each.first:,}–{each.last:,}" if each.first < each.last else f"{each.first:,}" for each in bins]
    counts = [f"{each.num_rows:,}" for each in bins]
    label_width, count_width = max(len(title), *map(len, labels)), max(len("rows"), *map(len, counts))
    most = max(each.num_rows for each in bins)
    bar_width = min(_BAR_CHARACTERS, width - label_width - count_width - 4)
    yield f"{title:>{label_width}}  {'rows':>{count_width}}"
    for label, count, each in zip(labels, counts, bins, strict=True):
        bar = "█" * -(-each.num_rows * bar_width // most)
        yield f"{label:>{label_width}}  {count:>{count_width}}  {bar}".rstrip()


def write_advice_rows(findings: Iterable[Finding], source: Source, path: Path) -> None:
    """Write one line for each row of each finding: the row's number, what it repeats, and where both stand."""
    import pandas as pd

    from brim.workflows.prediction import write_predictions

    lines = [
        {
            "advice": finding.kind,
            "row": row,
            "place": source.locate(row),
            "like_row": like,
            "like_place": None if like is None else source.locate(like),
        }
        for finding in findings
        for row, like in zip(finding.rows.tolist(), _likes(finding), strict=True)
        if row != like
    ]
    columns = ["advice", "row", "place", "like_row", "like_place"]
    write_predictions(pd.DataFrame(lines, columns=columns, dtype=object), path)


def _likes(finding: Finding) -> list[int | None]:
    return [None] * len(finding.rows) if finding.like is None else finding.like.tolist()


def _places(finding: Finding, name: str) -> str:
    shown = ", ".join(finding.places[:_SHOWN])
    for mark in (f"{name}:", f"{name}, row "):
        at = shown.find(mark) + len(mark)
        if at >= len(mark):
            shown = shown[:at] + shown[at:].replace(mark, "")
    num_more = finding.num_places - len(finding.places[:_SHOWN])
    return f"{shown} and {num_more:,} more" if num_more > 0 else shown


def wrapped(text: str, width: int, indent: int = 4) -> list[str]:
    """Wrap a text and indent its later lines; a path longer than a line stays whole."""
    return textwrap.wrap(
        text, width=max(width, 40), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
