"""`brim check`: a configuration and its data, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from brim.cli.advice import advice_lines, histogram_lines, wrapped, write_advice_rows
from brim.cli.message import printable
from brim.cli.options import ConfigOrRun, DatasetOption, JsonOption, Overrides
from brim.errors import InputError, Problem
from brim.notes import kind_of
from brim.units import format_count

if TYPE_CHECKING:
    from brim.config import Config
    from brim.data import CheckReport
    from brim.models.folder import ModelFolder


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
        Optional[str],  # noqa: UP045
        typer.Option("--rows", metavar="FILE", help="Also write the rows of all advice: parquet, jsonl or csv."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a configuration, its base model's folder and its data. Loads no weights and no torch."""
    from brim.cli.opening import open_config, problems_with_data
    from brim.models.needs import notes_on_this_machine

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
        from brim.data import check_data, load_encoder, read

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
    context = f"{folder.context_length:,} tokens of context" if folder.context_length else "no limit of context"
    verdict = "right, but not for this machine" if any(kind_of(line) == "warning" for line in lacking) else "right"
    print(f"{loaded.name}: the configuration is {verdict}; {folder.config['model_type']} with {context}")
    if report is None:
        print("no data was checked: give --dataset FILE, or the key `dataset`")
    else:
        _print_report(report)


def _base_model(config: Config) -> ModelFolder:
    """The folder of the base model, with which the configuration can be trained."""
    from brim.models.adapter_folder import continued
    from brim.models.folder import locate
    from brim.models.needs import require_trainable
    from brim.models.quantization import with_stored_quantization

    folder = locate(config.base_model, initialize=config.initialize, trust_remote_code=config.trust_remote_code)
    if config.adapter is not None and config.adapter.pretrained_adapter_weights is not None:
        continued(config.adapter)
    require_trainable(with_stored_quantization(config, folder), folder)
    return folder


def _require_writable(rows: str, data: Sequence[str] | None) -> None:
    from brim.api.prediction import check_output

    if data is None:
        raise InputError(
            Problem(
                what="--rows writes about data, and none was given", fix="give --dataset FILE, or the key `dataset`"
            )
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
