"""Write a configuration as YAML, complete and without secrets."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.representer import RoundTripRepresenter
from ruamel.yaml.scalarstring import LiteralScalarString

from brim.config.mask import mask_secrets
from brim.config.schema import Config


def dump(config: Config, path: str | Path | None = None) -> str:
    """The YAML of every key, written to `path` if given. Without secrets in it, it loads back to an equal Config."""
    yaml = YAML()
    yaml.width = 120
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.Representer = _Representer
    stream = io.StringIO()
    yaml.dump(_readable(mask_secrets(config.model_dump(mode="json"))), stream)
    text = stream.getvalue()
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def _readable(value: Any) -> Any:
    """Texts of several lines as blocks."""
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if isinstance(value, str) and "\n" in value and all(line == line.strip() for line in value.splitlines()):
        return LiteralScalarString(value)
    return value


class _Representer(RoundTripRepresenter):
    """ruamel.yaml's, with `null` written out."""

    def represent_null(self, _value: None) -> Any:
        return self.represent_scalar("tag:yaml.org,2002:null", "null")


_Representer.add_representer(type(None), _Representer.represent_null)
