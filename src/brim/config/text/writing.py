"""Write a configuration as YAML, mask secrets, and put values and keys into words for a message.

What is surely a token or a password is masked, so that it reaches no file and no message. A misspelt name is matched
with the nearest valid one.
"""

from __future__ import annotations

import datetime
import io
import json
import re
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.representer import RoundTripRepresenter
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

from brim.config.schema import Config, FinetuneTrainer
from brim.config.text.reading import KeyPath
from brim.storage import secrets_of_environment


def dump(config: Config, path: str | Path | None = None) -> str:
    """Return the YAML of every key, also written to `path`. Unless it held secrets, it loads to an equal Config."""
    yaml = YAML()
    yaml.width = 120
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.Representer = _Representer
    stream = io.StringIO()
    yaml.dump(_readable(mask_secrets(_complete(config))), stream)
    text = stream.getvalue()
    if path is not None:
        Path(path).write_text(text, encoding="utf-8", newline="\n")
    return text


def _complete(config: Config) -> dict[str, Any]:
    """Return every key, except those that are refused beside `chat`, and a `batch_size` that is refused as `auto`."""
    without: dict[str, Any] = {} if config.chat is None else {"input_features": True, "output_features": True}
    trainer = config.trainer
    if isinstance(trainer, FinetuneTrainer) and trainer.batch_size == trainer.effective_batch_size == "auto":
        without["trainer"] = {"batch_size"}
    return config.model_dump(mode="json", exclude=without)


def _readable(value: Any) -> Any:
    """Mark texts of several lines to be written as blocks; control characters survive only in double quotes."""
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if not isinstance(value, str) or value.isprintable():
        return value
    is_block = "\n" in value and all(map(_is_plain_line, value.split("\n")))
    return LiteralScalarString(value) if is_block else DoubleQuotedScalarString(value)


def _is_plain_line(line: str) -> bool:
    """Return whether a block keeps the line as it is: without control characters, and without spaces at its ends."""
    return line.isprintable() and line == line.strip()


class _Representer(RoundTripRepresenter):
    """Write values as ruamel.yaml does, but null as `null`."""

    def represent_null(self, _value: None) -> Any:
        return self.represent_scalar("tag:yaml.org,2002:null", "null")

    def represent_float(self, value: float) -> Any:
        """Put a dot in front of the exponent: to a reader of YAML 1.1, 1e-08 is a text."""
        text = repr(value)
        if "e" in text and "." not in text:
            text = text.replace("e", ".0e")
        return self.represent_scalar("tag:yaml.org,2002:float", text)


_Representer.add_representer(type(None), _Representer.represent_null)


_Representer.add_representer(float, _Representer.represent_float)


MASK = "***"


# Real shapes with real lengths only: a folder `hf_checkpoints` and a template `?api_key={question}` are not secrets.
_TOKENS = re.compile(
    r"(?<![A-Za-z0-9_-])(?:"
    r"hf_[A-Za-z0-9]{34}"  # Hugging Face
    r"|gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{22,}|glpat-[\w-]{20,}"  # GitHub, GitLab
    r"|sk-[A-Za-z0-9]{40,}|sk-(?:proj|svcacct|admin|ant|or)-[\w-]{40,}"  # OpenAI and others
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"  # AWS
    r"|xox[abprs]-\d{9,}-[\w-]{10,}"  # Slack
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}"  # JSON Web Token
    r")(?![A-Za-z0-9_-])"
)


# `user:password@` in an address; a Path leaves one slash of its two.
_LOGIN = re.compile(r"(?<=:/)(/?)[^/\s@:{}]+:[^/\s@{}]+@")


# Keys that hold paths, whose parts may look like anything; only a login in an address is surely a secret there.
_PATHS: frozenset[KeyPath] = frozenset(
    {("base_model",), ("dataset",), ("chat", "template"), ("adapter", "pretrained_adapter_weights")}
)


def mask_text(text: str) -> str:
    """Mask tokens, logins in addresses and the environment's secrets."""
    return mask_login(_TOKENS.sub(MASK, text))


def mask_login(text: str) -> str:
    """Mask logins in addresses and the environment's secrets, but no tokens: for paths."""
    for secret in secrets_of_environment():
        text = text.replace(secret, MASK)
    return _LOGIN.sub(rf"\g<1>{MASK}@", text)


def mask_secrets(value: Any, path: KeyPath = ()) -> Any:
    """Return a copy of a configuration's mappings, lists and scalars in which every secret is masked."""
    if isinstance(value, dict):
        return {key: mask_secrets(item, (*path, key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mask_secrets(item, (*path, index)) for index, item in enumerate(value)]
    if isinstance(value, str):
        return mask_login(value) if tuple(p for p in path if not isinstance(p, int)) in _PATHS else mask_text(value)
    return value


def secrets_in(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the keys whose values hold a secret."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from secrets_in(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from secrets_in(item, (*path, index))
    elif mask_secrets(value, path) != value:
        yield path


_LONGEST_SHOWN = 60  # characters


_PLAIN = re.compile(r"[A-Za-z_./~][\w./-]*|\d[\w.-]*[A-Za-z]")  # texts that need no quotes in YAML


_NO_TEXT = ("true", "false", "null", "yes", "no", "on", "off", "~", "y", "n")


_SHELL_SAFE = re.compile(r"[\w@%+=:,./-]+")


def show(value: Any) -> str:
    """Write a value as in YAML, short and without secrets."""
    if isinstance(value, str):
        return f"'{shortened(mask_text(value))}'" if value else "empty"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, (int, float)):
        return shortened(repr(value))
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list):
        return _show_list(value)
    if isinstance(value, (datetime.date, datetime.datetime)):
        return f"the date {value}"
    return f"a Python {type(value).__name__}"


def _show_list(value: list[Any]) -> str:
    if not value:
        return "an empty list"
    if all(isinstance(item, (bool, int, float, str)) for item in value):
        text = mask_text(json.dumps(value, ensure_ascii=False))
        if len(text) <= _LONGEST_SHOWN:
            return text
    return f"a list of {len(value)} entries" if len(value) > 1 else "a list of one entry"


def line(key: str, value: Any, *, as_override: bool = False) -> str:
    """Write a key and its value as in a file (`a.b: 1`) or as an override (`a.b=1`, quoted for a shell)."""
    if not as_override:
        return f"{key}: {flow(value)}"
    text = f"{key}={flow(value)}"
    return text if _SHELL_SAFE.fullmatch(text) else "'" + text.replace("'", "'\\''") + "'"


def flow(value: Any) -> str:
    """Write a value as YAML on one line, without secrets."""
    if isinstance(value, str):
        text = mask_text(value)
        return text if _PLAIN.fullmatch(text) and text.lower() not in _NO_TEXT else json.dumps(text, ensure_ascii=False)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(str(key))}: {flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(flow, value))}]"
    return show(value)


def shortened(text: str) -> str:
    """Return a text on one line, short enough for a message."""
    text = text.replace("\n", "\\n")
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"


def misspelt(name: str, names: Iterable[str], *, at_most: int = 2) -> str | None:
    """Return the name that is surely meant: equal except for case and dashes, or misspelt by a typing slip.

    A slip is one letter too many, too few, swapped, or, from five letters on, a wrong one (`rat` is not a slip of
    `cat`). Names of eight letters or more may have two, unless `at_most` is one. If two names are equally near, the
    answer is None: a wrong guess is worse than none.
    """
    plain = folded(name)
    most = 0 if len(plain) < 3 else 1 if len(plain) < 8 else at_most
    distances = {other: _slips(plain, folded(other), most) for other in names}
    near = [other for other, slips in distances.items() if slips == min(distances.values())]
    return near[0] if len(near) == 1 and distances[near[0]] <= most else None


def _slips(first: str, second: str, most: int) -> int:
    """Count the letters to remove, insert, replace or swap to turn one into the other; at most `most` + 1."""
    if abs(len(first) - len(second)) > most:
        return most + 1
    replaced = 1 if len(first) >= 5 else 2
    before: list[int] = []
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, start=1):
        before, last, row = row, before, [i]
        for j, b in enumerate(second, start=1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + replaced * (a != b)))
            if i > 1 and j > 1 and a == second[j - 2] and b == first[i - 2]:
                row[j] = min(row[j], last[j - 2] + 1)
    return min(row[-1], most + 1)


def nearest(name: str, names: Iterable[str], *, at_least: float = 0.6) -> str | None:
    """Return the most similar of the names, if its similarity is `at_least` this; 1 is equal."""
    candidates = [(SequenceMatcher(None, folded(name), folded(other)).ratio(), other) for other in names]
    ratio, best = max(candidates, default=(0.0, ""), key=lambda item: item[0])
    return best if ratio >= at_least else None


def folded(name: str) -> str:
    """Return the name in lower case with its words joined by underscores: differences that do not count as slips."""
    return name.lower().replace("-", "_").replace(" ", "_")
