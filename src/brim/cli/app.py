"""Register the verbs of `brim VERB …`, and say what to write instead of a command line that typer refuses."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

import brim
from brim.cli.options import is_run
from brim.errors import InputError, Problem

# Each verb's module in this package, in the order of the help.
VERBS = {
    "check": "check",
    "memory": "memory",
    "plan": "train",
    "train": "train",
    "verify-resume": "runs",
    "compare": "runs",
    "evaluate": "predict",
    "predict": "predict",
    "embed": "predict",
    "chat": "runs",
    "export": "runs",
    "upload": "runs",
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


def wrong_usage(error: Exception, verbs: Mapping[str, Any], arguments: Sequence[str]) -> InputError:
    """Turn typer's refusal of a command line into an error that says what to write.

    error: a UsageError. verbs: the commands by their names.
    """
    if not arguments or arguments[0] not in verbs:
        return InputError(_no_verb(arguments, verbs))
    verb, parameters = arguments[0], verbs[arguments[0]].params
    options = {name: each for each in parameters for name in each.opts if name.startswith("-")}
    unknown = list(_unknown_flags(arguments[1:], options)) if type(error).__name__ == "NoSuchOption" else []
    if unknown:
        configuration = next((each for each in arguments[1:] if _may_be_configuration(each)), None)
        flags = {name: [verb for verb, each in verbs.items() if name in _flags(each)] for name, _ in unknown}
        return InputError(
            *(
                Problem(
                    what=f"brim {verb} has no option {name}",
                    where=_PLACE,
                    fix=_instead_of_flag(name, value, verb, options, flags[name], configuration),
                )
                for name, value in unknown
            )
        )
    parameter = getattr(error, "param", None) or options.get(getattr(error, "option_name", ""))
    if parameter is None:
        return InputError(what=str(error), where=_PLACE, fix=f"`brim {verb} --help` lists what it takes")
    return InputError(_wrong_parameter(error, verb, parameter, arguments))


def _no_verb(arguments: Sequence[str], verbs: Mapping[str, Any]) -> Problem:
    """Explain that no verb was given, or an unknown one."""
    from brim.config.text import misspelt

    first = arguments[0] if arguments else ""
    later = next((each for each in arguments if each in verbs), None)
    meant = _OTHER_VERBS.get(first.lower()) or misspelt(first, verbs)
    what = f"brim has no verb {first}"
    if first.startswith("-"):
        what = f"brim has no option {first.partition('=')[0]}"
        fix = f"the verb comes first: brim {later or 'train'} …"
        fix = "write brim --help" if first in _HELP else fix
    elif later is None and _may_be_configuration(first):
        fix = f"name the verb first, such as brim train {first}"
    else:
        fix = f"did you mean brim {meant}?" if meant else ""
    return Problem(what=what, where=_PLACE, expected="one of " + ", ".join(verbs), fix=fix)


def _flags(command: Any) -> list[str]:
    return [name for each in command.params for name in each.opts if name.startswith("-")]


def _unknown_flags(arguments: Sequence[str], options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each flag that the verb does not have, with its value as text; "true" where it has none."""
    following = iter([*enumerate(arguments, start=1)])
    for position, argument in following:
        name, equals, value = argument.partition("=")
        if argument == "--":
            return
        if name in options:
            if not options[name].is_flag and not equals:
                next(following, None)
        elif name.startswith("-") and name != "-" and name not in _HELP[:1]:
            after = arguments[position] if position < len(arguments) else ""
            is_value = bool(_NO_FLAG.match(after)) and "=" not in after and not _may_be_configuration(after)
            yield name, value if equals else after if is_value else "true"


def _instead_of_flag(
    flag: str,
    value: str,
    verb: str,
    options: Mapping[str, Any],
    others: Sequence[str],
    configuration: str | None,
) -> str:
    """Say what to write instead of a flag that the verb does not have. others: the verbs that have it."""
    from brim.config import as_override
    from brim.config.text import misspelt

    name = flag.lstrip("-")
    begun = [each for each in options if len(name) > 2 and each.startswith(f"--{name.replace('_', '-')}")]
    meant = misspelt(name, [each.lstrip("-") for each in options if each.startswith("--")])
    if flag in _HELP:
        return "write --help"
    if meant or len(begun) == 1:
        return f"did you mean {f'--{meant}' if meant else begun[0]}?"
    if name.replace("-", "_") in _POSITIONAL:
        return f"give it without a flag: brim {verb} {configuration or 'CONFIG_OR_RUN'}"
    source = configuration if configuration is not None and Path(configuration).is_file() else None
    key = as_override(name.replace("-", "_"), value, source)
    if key is not None:
        return key
    if others:
        return f"remove it: it belongs to brim {', '.join(others)}"
    return f"`brim {verb} --help` lists its options; keys of the configuration are written as trainer.epochs=1"


def _wrong_parameter(error: Exception, verb: str, parameter: Any, arguments: Sequence[str]) -> Problem:
    """Explain that an argument is missing, or that an option does not accept its value."""
    is_option = parameter.opts[0].startswith("-")
    name = parameter.opts[0] if is_option else parameter.metavar
    written = f"{name} {parameter.metavar}" if is_option else name
    given = next((text for each, text in _given(arguments) if each in parameter.opts), None)
    if type(error).__name__ == "MissingParameter":
        what, fix = f"brim {verb} needs {written}", f"add it; `brim {verb} --help` shows where it stands"
        return Problem(what=what, where=_PLACE, expected=parameter.help.rstrip("."), fix=fix)
    if parameter.is_flag:
        return Problem(what=f"{name} takes no value", where=_PLACE, fix=f"write {name} alone, or leave it out")
    if type(error).__name__ == "BadOptionUsage" or given is None:
        return Problem(what=f"{name} has no value", where=_PLACE, expected=f"{written}: {parameter.help.rstrip('.')}")
    return Problem(what=f"{name} is {given!r}", where=_PLACE, expected=_numbers(parameter))


def _given(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    for argument, after in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        yield name, value if equals else after


def _numbers(parameter: Any) -> str:
    """Say which numbers an option accepts. Versions of typer keep the limits in two different places."""
    low, high = (getattr(parameter, end, getattr(getattr(parameter, "type", None), end, None)) for end in _ENDS)
    kind = "a whole number" if parameter.metavar == "N" else "a number"
    return kind + ("" if low is None else f" of at least {low:,}") + ("" if high is None else f" and at most {high:,}")


def _may_be_configuration(argument: str) -> bool:
    return not argument.startswith("-") and (argument.endswith((".yaml", ".yml")) or is_run(Path(argument)))


_PLACE = "command line"


_NO_FLAG = re.compile(r"[^-]|-[\d.]")  # begins a value


_ENDS = ("min", "max")


_HELP = ("--help", "-h", "-help", "-?", "/?")


# Other tools' flags for the configuration or the model, which brim takes without a flag.
_POSITIONAL = ("config", "c", "config_file", "config_path", "model_path", "m", "model_dir", "run", "checkpoint")


_OTHER_VERBS = {
    **dict.fromkeys(("finetune", "fine-tune", "fit", "sft", "experiment", "run"), "train"),
    **dict.fromkeys(("eval", "test", "benchmark"), "evaluate"),
    **dict.fromkeys(("infer", "inference", "generate", "batch"), "predict"),
    **dict.fromkeys(("validate", "lint", "preprocess"), "check"),
    **dict.fromkeys(("merge", "save"), "export --merge"),
    **dict.fromkeys(("push", "publish"), "upload"),
    "estimate": "memory",
}
