"""Hide secrets: tokens and passwords must not reach a file or a message."""

from __future__ import annotations

import re
from typing import Any

MASK = "***"

_TOKENS = re.compile(
    r"\bhf_[A-Za-z0-9]{8,}"  # Hugging Face
    r"|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w-]{16,}"  # GitHub, GitLab
    r"|\bsk-[\w-]{16,}"  # OpenAI and others
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"  # AWS
    r"|\bxox[abprs]-[\w-]{10,}"  # Slack
    r"|(?<=\bBearer )[\w.~+/=-]{8,}"
)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@:]*(?::[^/\s@]*)?@")
_URL_QUERY = re.compile(r"(?i)([?&][\w-]*(?:token|secret|password|key|signature)=)[^&\s#]+")
_SECRET_KEY = re.compile(r"(?i)(?:^|_|-)(?:token|secret|password|passwd|credential|credentials|api_?key|access_?key)$")


def mask_secrets(value: Any) -> Any:
    """A copy of dicts, lists and scalars in which every text that looks like a secret, or is called one, is masked."""
    if isinstance(value, dict):
        return {key: MASK if _is_secret(key, item) else mask_secrets(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mask_secrets(item) for item in value]
    return mask_text(value) if isinstance(value, str) else value


def mask_text(text: str) -> str:
    """The text with tokens, and logins and keys in addresses, masked."""
    text = _TOKENS.sub(MASK, text)
    text = _URL_LOGIN.sub(f"{MASK}@", text)
    return _URL_QUERY.sub(rf"\g<1>{MASK}", text)


def _is_secret(key: Any, value: Any) -> bool:
    return isinstance(value, str) and value != "" and _SECRET_KEY.search(str(key)) is not None
