"""`brim check`: a configuration and its data, before anything is loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from brim.cli.options import ConfigOrRun, DatasetOption, JsonOption, Overrides, config_file

if TYPE_CHECKING:
    from brim.data import CheckReport


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
    as_json: JsonOption = False,
) -> None:
    """Check a configuration, its base model's folder and its data. Loads no weights and no torch."""
    from brim.config import load_config
    from brim.models.folder import locate

    loaded = load_config(config_file(config), overrides or [])
    folder = locate(loaded.config.base_model, initialize=loaded.config.initialize)
    data = dataset if dataset is not None else loaded.config.dataset
    report = None
    if data is not None:
        from brim.data import check_data, load_encoder, read

        encoder = load_encoder(folder, trust_remote_code=loaded.config.trust_remote_code)
        report = check_data(loaded.config, read(data), encoder, context_length=folder.context_length, show=show)
    if as_json:
        print(json.dumps({"config": loaded.name, "notes": loaded.notes, "data": report and report.as_dict()}, indent=1))
        return
    for note in loaded.notes:
        print(note)
    context = f"{folder.context_length:,} tokens of context" if folder.context_length else "no limit of context"
    print(f"{loaded.name}: the configuration is right; {folder.config['model_type']} with {context}")
    if report is None:
        print("no data was checked: give --dataset FILE, or the key `dataset`")
    else:
        _print_report(report)


def _print_report(report: CheckReport) -> None:
    console = Console(highlight=False, soft_wrap=True)
    print(f"{report.name}: {report.num_rows:,} {'row' if report.num_rows == 1 else 'rows'}")
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
    for line in (*report.events, *report.notes):
        print(line)
    for sample in report.samples:
        console.rule(escape(sample.where), align="left", style="dim")
        for segment in sample.segments:
            text = escape(segment.text)
            console.print(f"[bold green]«{text}»[/]" if segment.supervised else text, end="")
        console.print()
    if report.samples:
        print("«…»: what the model learns to write")
