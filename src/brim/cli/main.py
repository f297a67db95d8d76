"""`brim VERB …`: the verbs, and how errors become exit codes."""

from __future__ import annotations

import sys
import warnings

import typer

from brim.cli import check, evaluate, predict, schema, train
from brim.errors import BrimError

_INTERRUPTED = 130

app = typer.Typer(
    name="brim",
    help="Fine-tune large language models, and run them over data sets, on the GPU that you have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("check")(check.check)
app.command("train")(train.train)
app.command("evaluate")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.command("schema")(schema.schema)


@app.callback()
def _root(context: typer.Context) -> None:
    """Fine-tune large language models, and run them over data sets, on the GPU that you have."""


def main() -> None:
    """Run the command line. Exit codes: 0; 1 the run failed; 2 the user's input; 130 interrupted."""
    # Libraries speak to programmers through these; a user can do nothing about them.
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
    try:
        app()
    except BrimError as error:
        print(f"brim: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except SystemExit as leaving:
        if leaving.code == _INTERRUPTED:  # what typer makes of a KeyboardInterrupt
            print("brim: interrupted", file=sys.stderr)
        raise
    except OSError as error:
        # A full disk, a file that went away: the machine's doing, where a traceback helps nobody.
        print(f"brim: {error}", file=sys.stderr)
        sys.exit(1)
