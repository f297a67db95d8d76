"""Write a configuration as YAML, and mask secrets.

What is surely a token or a password is masked, so that it reaches no file and no message.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
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
