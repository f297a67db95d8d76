"""Secrets: find what is surely a token or a password, and mask it, so that it reaches no file and no message."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from brim.config.places import Path
from brim.secrets import secrets_of_environment

MASK = "***"

# Real shapes with real lengths only: a folder `hf_checkpoints` and a template `?api_key={question}` are no secrets.
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
_PATHS: frozenset[Path] = frozenset(
    {("base_model",), ("dataset",), ("chat", "template"), ("adapter", "pretrained_adapter_weights")}
)


def mask_text(text: str) -> str:
    """The text with tokens, logins in addresses and the environment's secrets masked."""
    return mask_login(_TOKENS.sub(MASK, text))


def mask_login(text: str) -> str:
    """The text with logins in addresses and the environment's secrets masked: for paths."""
    for secret in secrets_of_environment():
        text = text.replace(secret, MASK)
    return _LOGIN.sub(rf"\g<1>{MASK}@", text)


def mask_secrets(value: Any, path: Path = ()) -> Any:
    """A copy of a configuration's mappings, lists and scalars in which every secret is masked."""
    if isinstance(value, dict):
        return {key: mask_secrets(item, (*path, key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mask_secrets(item, (*path, index)) for index, item in enumerate(value)]
    if isinstance(value, str):
        return mask_login(value) if tuple(p for p in path if not isinstance(p, int)) in _PATHS else mask_text(value)
    return value


def secrets_in(value: Any, path: Path = ()) -> Iterator[Path]:
    """The keys of a configuration's values that hold a secret."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from secrets_in(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from secrets_in(item, (*path, index))
    elif mask_secrets(value, path) != value:
        yield path
