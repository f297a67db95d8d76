"""The verbs of `brim VERB …`."""

from __future__ import annotations

from typing import Annotated

import typer

import brim
from brim.cli import (
    chat,
    check,
    compare,
    embed,
    evaluate,
    export,
    memory,
    plan,
    predict,
    schema,
    train,
    upload,
    verify_resume,
)

app = typer.Typer(
    name="brim",
    help="Fine-tune large language models, and run them over data sets, on the GPU that you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("check")(check.check)
app.command("memory")(memory.memory)
app.command("plan")(plan.plan)
app.command("train")(train.train)
app.command("verify-resume")(verify_resume.verify_resume)
app.command("compare")(compare.compare)
app.command("evaluate")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.command("embed")(embed.embed)
app.command("chat")(chat.chat)
app.command("export")(export.export)
app.command("upload")(upload.upload)
app.command("schema")(schema.schema)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"brim {brim.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fine-tune large language models, and run them over data sets, on the GPU that you have."""
