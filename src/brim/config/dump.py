"""Write a configuration as YAML, complete and without secrets."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.representer import RoundTripRepresenter
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

from brim.config.mask import mask_secrets
from brim.config.schema import Config, FinetuneTrainer


def dump(config: Config, path: str | Path | None = None) -> str:
    """The YAML of every key, written to `path` if given. Without secrets in it, it loads back to an equal Config."""
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
    """Every key, but for those that may not stand beside `chat`, and a cut without a batch."""
    without: dict[str, Any] = {} if config.chat is None else {"input_features": True, "output_features": True}
    trainer = config.trainer
    if isinstance(trainer, FinetuneTrainer) and trainer.batch_size == trainer.effective_batch_size == "auto":
        without["trainer"] = {"batch_size"}
    return config.model_dump(mode="json", exclude=without)


def _readable(value: Any) -> Any:
    """Texts of several lines as blocks, those with control characters in double quotes, which alone keep them."""
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if not isinstance(value, str) or value.isprintable():
        return value
    is_block = "\n" in value and all(map(_is_plain_line, value.split("\n")))
    return LiteralScalarString(value) if is_block else DoubleQuotedScalarString(value)


def _is_plain_line(line: str) -> bool:
    """Whether a block can hold the line unchanged, which it cannot with control characters or spaces at the ends."""
    return line.isprintable() and line == line.strip()


class _Representer(RoundTripRepresenter):
    """ruamel.yaml's, with `null` written out."""

    def represent_null(self, _value: None) -> Any:
        return self.represent_scalar("tag:yaml.org,2002:null", "null")

    def represent_float(self, value: float) -> Any:
        """With a dot in front of the exponent: to a reader of YAML 1.1, 1e-08 is a text."""
        text = repr(value)
        if "e" in text and "." not in text:
            text = text.replace("e", ".0e")
        return self.represent_scalar("tag:yaml.org,2002:float", text)


_Representer.add_representer(type(None), _Representer.represent_null)
_Representer.add_representer(float, _Representer.represent_float)
