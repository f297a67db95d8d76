"""Register the verbs of `brim VERB …`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import brim
from brim.cli.chat import chat
from brim.cli.check import check
from brim.cli.evaluate import evaluate
from brim.cli.memory import memory
from brim.cli.options import wrong_usage
from brim.cli.predict import embed, predict
from brim.cli.share import export, upload
from brim.cli.studies import compare, verify_resume
from brim.cli.train import plan, schema, train

app = typer.Typer(
    name="brim",
    help="Fine-tune large language models, and run them over data sets, on the GPU that you have.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


app.command("check")(check)


app.command("memory")(memory)


app.command("plan")(plan)


app.command("train")(train)


app.command("verify-resume")(verify_resume)


app.command("compare")(compare)


app.command("evaluate")(evaluate)


app.command("predict")(predict)


app.command("embed")(embed)


app.command("chat")(chat)


app.command("export")(export)


app.command("upload")(upload)


app.command("schema")(schema)


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
    """Take the options that stand before the verb."""


# UsageError, the base class of all errors of typer's parser. typer exports BadParameter alone of them.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def run(arguments: Sequence[str]) -> None:
    """Run the verb that the arguments name; without arguments, show the help and exit with 2.

    Raises InputError if there is no such verb, or if the verb does not accept its arguments; and what the verb raises.
    """
    command: Any = typer.main.get_command(app)
    try:
        # Not `app()`, which prints the parser's errors itself and turns a KeyboardInterrupt into a bare exit code.
        with command.make_context("brim", list(arguments), resilient_parsing=not arguments) as context:
            if not arguments:
                print(context.get_help(), file=sys.stderr)
                sys.exit(2)
            command.invoke(context)
    except typer.Exit as leaving:
        sys.exit(leaving.exit_code)
    except _UsageError as error:
        raise wrong_usage(error, command.commands, arguments) from None
