"""Where a configuration comes from: a YAML file, or a mapping in Python."""

from __future__ import annotations

import numbers
import os
import stat
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from brim.config.foreign_values import DATA_FILES
from brim.config.places import Document, Path, Place, dotted
from brim.config.yaml_reader import MAX_DEPTH, read_yaml
from brim.errors import ConfigError, Problem


def read_source(source: str | FilePath | Mapping[str, Any]) -> Document:
    """The configuration as a document; that of a base model's folder is to run it as it is, untrained.

    Raises ConfigError for what is no readable mapping.
    """
    if isinstance(source, Mapping):
        places: dict[Path, Place] = {}
        data = _plain(source, (), places)
        return Document(name="configuration", data=data, places=places, has_lines=False)
    name = str(source)
    if is_folder(FilePath(source)):
        data = {"base_model": _model_in(FilePath(source), name), "trainer": {"type": "none"}}
        return Document(name=name, data=data, places={}, has_lines=False)
    data, places = read_yaml(_read_text(FilePath(source), name), name)
    if data is None:
        raise ConfigError(
            Problem(what="the configuration is empty", where=name, fix="give at least base_model and the features")
        )
    if not isinstance(data, dict):
        is_data = name.lower().endswith(DATA_FILES)
        raise ConfigError(
            Problem(
                what="the configuration is no mapping",
                where=f"{name}:1",
                expected="lines of the form `key: value`",
                fix=f"name the configuration first, and the data with --dataset {name}" if is_data else "",
            )
        )
    return Document(name=name, data=data, places=places)


def is_folder(path: FilePath) -> bool:
    """Whether it is one that can be looked into; not where no file can have such a name."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def yaml_files(folder: FilePath) -> list[FilePath]:
    """The files in it that may be configurations; none where it cannot be looked into."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml"))
    except OSError:
        return []


def _model_in(folder: FilePath, name: str) -> str:
    """The folder as `base_model`. Raises ConfigError where it holds no model of transformers."""
    if (folder / "config.json").is_file():
        return name
    if (folder / "adapter_config.json").is_file():
        what = "this folder holds an adapter, not a model: it has an adapter_config.json, and no config.json"
        fix = "name the run's folder, or a configuration with base_model and adapter.pretrained_adapter_weights"
    elif (folder / "config.yaml").is_file():
        what, fix = "this is the folder of a run", "name its config.yaml; in Python, brim.Model.load opens the run"
    else:
        what = "this folder is neither a run nor a model: it has no config.yaml and no config.json"
        files = yaml_files(folder)
        fix = f"name the file: {files[0]}" if files else "name the folder itself, neither one above it nor one below"
    expected = "a YAML configuration, the folder of a run, or that of a model (config.json, weights, tokenizer)"
    raise ConfigError(Problem(what=what, where=name, expected=expected, fix=fix))


MAX_BYTES = 1 << 20  # a configuration has a few kB; reading YAML is slow


def _read_text(path: FilePath, name: str) -> str:
    try:
        content = _read_bytes(path, name)
    except FileNotFoundError:
        is_yaml = path.suffix.lower() in (".yaml", ".yml")
        of_the_hub = "" if is_yaml else f"; a model of the Hub is named in the file, by base_model: {name}"
        fix = f"check the path{of_the_hub}"
        raise ConfigError(Problem(what="no such file", where=name, expected="a YAML configuration", fix=fix)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        fix = "check the path and its permissions"
        raise ConfigError(Problem(what=f"cannot be read: {reason}", where=name, fix=fix)) from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            Problem(
                what=f"byte 0x{content[error.start]:02x} is not UTF-8",
                where=f"{name}:{line}",
                fix="save the file as UTF-8",
            )
        ) from None


def _read_bytes(path: FilePath, name: str) -> bytes:
    """Its content. Raises ConfigError for what may never end: devices, pipes, huge files."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        what, fix = "this is no regular file", "save the configuration to a file"
        raise ConfigError(Problem(what=what, where=name, expected="a YAML file", fix=fix))
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        what, fix = f"the file has more than {MAX_BYTES:,} bytes", "name the configuration, not the data"
        raise ConfigError(Problem(what=what, where=name, expected="a YAML configuration of some kB", fix=fix))
    return content


def _plain(value: Any, path: Path, places: dict[Path, Place]) -> Any:
    """Python's values as YAML would have given them: dicts, lists, text and numbers."""
    if len(path) > MAX_DEPTH:
        raise ConfigError(Problem(what="too many nested values for a configuration", where=dotted(path[:3])))
    if path:
        places[path] = Place(where="", order=(len(places), 0))
    if isinstance(value, Mapping):
        return {str(key): _plain(item, (*path, str(key)), places) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, (*path, index), places) for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value) in (bool, int, float):
        return value
    if isinstance(value, numbers.Integral):  # as NumPy's are
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value
