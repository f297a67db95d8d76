"""Register the verbs of `brim VERB …`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

import brim
from brim.cli.options import wrong_usage

# Each verb's module in this package, in the order of the help.
VERBS = {
    "check": "check",
    "memory": "memory",
    "plan": "train",
    "train": "train",
    "verify-resume": "studies",
    "compare": "studies",
    "evaluate": "evaluate",
    "predict": "predict",
    "embed": "predict",
    "chat": "chat",
    "export": "share",
    "upload": "share",
    "schema": "train",
}


def app_of(verbs: Iterable[str] = VERBS) -> typer.Typer:
    """Return the command line with these verbs alone: a verb's module is imported where that verb may be meant."""
    app = typer.Typer(
        name="brim",
        help="Fine-tune large language models, and run them over data sets, on the GPU that you have.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_root)
    for verb in verbs:
        app.command(verb)(getattr(import_module(f"brim.cli.{VERBS[verb]}"), verb.replace("-", "_")))
    return app


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"brim {brim.__version__}")
        raise typer.Exit


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
    verbs = arguments[:1] if arguments and arguments[0] in VERBS else VERBS
    command: Any = typer.main.get_command(app_of(verbs))
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
        every: Any = typer.main.get_command(app_of())
        raise wrong_usage(error, every.commands, arguments) from None
