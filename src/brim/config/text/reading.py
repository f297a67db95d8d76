"""Read a configuration from YAML or a mapping with the place of every key.

Nothing but YAML's own types is built from YAML text. Every key's place is kept, so that a message can name it.
"""

from __future__ import annotations

import json
import numbers
import os
import re
import shlex
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from brim.config.foreign import DATA_FILES
from brim.errors import ConfigError, Problem

KeyPath: TypeAlias = tuple[str | int, ...]


def read_source(source: str | FilePath | Mapping[str, Any]) -> Document:
    """Read a configuration as a document; a base model's folder stands for running it as it is, untrained.

    Raises ConfigError if the source is not a readable mapping.
    """
    if isinstance(source, Mapping):
        places: dict[KeyPath, Place] = {}
        data = _plain(source, (), places)
        return Document(name="configuration", data=data, places=places, has_lines=False)
    name = str(source)
    if is_folder(FilePath(source)):
        data = {"base_model": _model_in(FilePath(source), name), "trainer": {"type": "none"}}
        return Document(name=name, data=data, places={}, has_lines=False)
    if _is_data(FilePath(source)):
        fix = f"name the configuration first: `brim train config.yaml --dataset {shlex.quote(name)}`"
        raise ConfigError(
            what="this is data, not a configuration", where=name, expected="a YAML configuration", fix=fix
        )
    data, places = read_yaml(_read_text(FilePath(source), name), name)
    if data is None:
        raise ConfigError(
            what="the configuration is empty", where=name, fix="give at least base_model and the features"
        )
    if not isinstance(data, dict):
        what, expected = "the configuration is not a mapping", "lines of the form `key: value`"
        raise ConfigError(what=what, where=f"{name}:1", expected=expected)
    return Document(name=name, data=data, places=places)


def _is_data(path: FilePath) -> bool:
    """Return whether a file holds rows: by its ending, or, in a .json, which may be a configuration, by its form.

    Rows in JSON are a list, an object a line, or an object of lists.
    """
    if not path.name.lower().endswith(DATA_FILES) or not os.path.isfile(path):  # noqa: PTH113 (of any name)
        return False
    if path.suffix.lower() != ".json":
        return True
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode(json.detect_encoding(content), errors="replace").strip("\ufeff \t\r\n")
        if len(content) > MAX_BYTES or text.startswith("["):
            return True
        first, *others = text.splitlines() or [""]
        if others and first.endswith("}"):
            return isinstance(json.loads(first), dict)
        values = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and bool(values) and all(isinstance(each, list) for each in values.values())


def is_folder(path: FilePath) -> bool:
    """Return whether this is a folder; a path that no file can have is not."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def yaml_files(folder: FilePath) -> list[FilePath]:
    """Return the files in it that may be configurations; none if it cannot be listed."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml"))
    except OSError:
        return []


def _model_in(folder: FilePath, name: str) -> str:
    """Return the folder as `base_model`. Raises ConfigError if it does not hold a model of transformers."""
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
    raise ConfigError(what=what, where=name, expected=expected, fix=fix)


MAX_BYTES = 1 << 20  # a configuration has a few kB; reading YAML is slow


def _read_text(path: FilePath, name: str) -> str:
    try:
        content = _read_bytes(path, name)
    except FileNotFoundError:
        is_yaml = path.suffix.lower() in (".yaml", ".yml")
        of_the_hub = "" if is_yaml else f"; a model of the Hub is named in the file, by base_model: {name}"
        fix = f"check the path{of_the_hub}"
        raise ConfigError(what="no such file", where=name, expected="a YAML configuration", fix=fix) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        fix = "check the path and its permissions"
        raise ConfigError(what=f"cannot be read: {reason}", where=name, fix=fix) from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            what=f"byte 0x{content[error.start]:02x} is not UTF-8", where=f"{name}:{line}", fix="save the file as UTF-8"
        ) from None


def _read_bytes(path: FilePath, name: str) -> bytes:
    """Read a file. Raises ConfigError for what may never end: devices, pipes, huge files."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        what, fix = "this is not a regular file", "save the configuration to a file"
        raise ConfigError(what=what, where=name, expected="a YAML file", fix=fix)
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        what, fix = f"the file has more than {MAX_BYTES:,} bytes", "name the configuration, not the data"
        raise ConfigError(what=what, where=name, expected="a YAML configuration of some kB", fix=fix)
    return content


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Hold a place to name, and its rank in reading order."""

    where: str  # "config.yaml:7"; empty where the dotted key itself is the place
    order: tuple[int, int]
    is_override: bool = False


def _plain(value: Any, path: KeyPath, places: dict[KeyPath, Place]) -> Any:
    """Convert Python's values to those of YAML: dicts, lists, text and numbers."""
    if len(path) > MAX_DEPTH:
        raise ConfigError(what="too many nested values for a configuration", where=dotted(path[:3]))
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


MAX_NODES = 20_000  # a configuration has dozens; aliases of aliases could make billions


MAX_DEPTH = 50


_SHOW_HOW = "write lines of the form `key: value`; text that holds any of : # { } [ ] & * ! | > % @ ` goes in quotes"


_MERGE = "tag:yaml.org,2002:merge"


_PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "timestamp")}


_PLAIN_TAGS |= {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


def read_yaml(text: str, name: str) -> tuple[Any, dict[KeyPath, Place]]:
    """Return the value that the text holds, and the places of its keys and list entries as `name:line`.

    Raises ConfigError for text that is not YAML, and for keys given twice (all of them at once).
    """
    yaml = YAML(typ="safe", pure=True)
    try:
        _require_few_events(yaml, text, name)
        node = yaml.compose(text)
        if node is None:
            return None, {}
        builder = _Builder(name=name, yaml=yaml)
        value = builder.build(node, ())
    except ConfigError:
        raise
    except MarkedYAMLError as error:
        raise ConfigError(_syntax_problem(error, name)) from None
    except (YAMLError, ValueError, RecursionError, OverflowError) as error:
        what = "the YAML is nested too deeply" if isinstance(error, RecursionError) else f"not YAML: {_line(error)}"
        fix = "save it as plain UTF-8 text" if "unacceptable character" in what else _SHOW_HOW
        raise ConfigError(what=what, where=name, fix=fix) from None
    ConfigError.raise_for(builder.problems)
    return value, builder.places


def _require_few_events(yaml: YAML, text: str, name: str) -> None:
    """Stop at a text of too many values before it is composed as a whole, which takes minutes."""
    depth = 0
    for number, event in enumerate(yaml.parse(text)):
        depth += isinstance(event, CollectionStartEvent)
        depth -= isinstance(event, CollectionEndEvent)
        if number > 2 * MAX_NODES or depth > MAX_DEPTH + 1:  # a list or a mapping has an event for its end, too
            raise ConfigError(_too_many(f"{name}:{event.start_mark.line + 1}"))


def _too_many(where: str) -> Problem:
    return Problem(
        what="too many nested values for a configuration",
        where=where,
        expected=f"at most {MAX_NODES:,} values, nested at most {MAX_DEPTH} deep",
    )


@dataclass(slots=True)
class _Builder:
    """Build values from YAML's nodes, and note where they stand."""

    name: str
    yaml: YAML
    places: dict[KeyPath, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    num_nodes: int = 0

    def build(self, node: Node, path: KeyPath) -> Any:
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES or len(path) > MAX_DEPTH:
            raise ConfigError(_too_many(self.where(node)))
        if str(node.tag) not in _PLAIN_TAGS:
            tag = str(node.tag).replace("tag:yaml.org,2002:", "!!")
            self.refuse(node, f"the tag {tag} is not read", fix="write a plain value, or put it in quotes")
            return None
        if isinstance(node, MappingNode):
            return self.build_mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self.build_entry(entry, (*path, index)) for index, entry in enumerate(node.value)]
        return self.scalar(node)

    def build_entry(self, node: Node, path: KeyPath) -> Any:
        self.places[path] = self.place(node)
        return self.build(node, path)

    def build_mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        seen: dict[str, Node] = {}
        for key_node, value_node in self.pairs(node):
            key = self.key(key_node)
            if key in seen:
                what, first = f"{dotted((*path, key))} is given twice", self.where(seen[key])
                self.refuse(key_node, what, expected=f"one value; the first is at {first}", fix="keep one of them")
                continue
            seen[key] = key_node
            below = (*path, key)
            self.places[below] = self.place(key_node)
            result[key] = self.build(value_node, below)
        return result

    def pairs(self, node: MappingNode) -> list[tuple[Node, Node]]:
        """Return the mapping's own pairs, then those that only `<<` adds."""
        own = [(k, v) for k, v in node.value if str(k.tag) != _MERGE]
        names = {self.key(k) for k, _ in own}
        for key_node, value_node in node.value:
            if str(key_node.tag) != _MERGE:
                continue
            sources = value_node.value if isinstance(value_node, SequenceNode) else [value_node]
            for source in sources:
                self.num_nodes += 1
                if not isinstance(source, MappingNode) or source is node or self.num_nodes > MAX_NODES:
                    raise ConfigError(
                        what="<< needs a mapping",
                        where=self.where(key_node),
                        expected="an alias of another mapping, such as <<: *defaults",
                    )
                added = [(k, v) for k, v in source.value if str(k.tag) != _MERGE and self.key(k) not in names]
                names.update(self.key(k) for k, _ in added)
                own += added
        return own

    def key(self, node: Node) -> str:
        """Return the key as text; YAML allows other keys, a configuration has none."""
        return self.whole(node.value, node) if isinstance(node, ScalarNode) else "[a list or mapping]"

    def scalar(self, node: Node) -> Any:
        try:
            value = self.yaml.constructor.construct_object(node)
        except ValueError as error:
            what = "a number of too many digits" if "digits" in str(error) else f"not YAML: {_line(error)}"
            self.refuse(node, what, fix="put it in quotes if it is text")
            return None
        return self.whole(value, node) if isinstance(value, str) else value

    def whole(self, text: str, node: Node) -> str:
        """Join the two halves that JSON's escapes make of some characters, such as an emoji."""
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            self.refuse(node, r"half a character, escaped as \uD800 to \uDFFF", fix="write the character itself")
            return ""

    def refuse(self, node: Node, what: str, *, expected: str = "", fix: str) -> None:
        """Note what is wrong with a node."""
        self.problems.append(Problem(what=what, where=self.where(node), expected=expected, fix=fix))

    def place(self, node: Node) -> Place:
        return Place(where=self.where(node), order=(node.start_mark.line, node.start_mark.column))

    def where(self, node: Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"


def _syntax_problem(error: MarkedYAMLError, name: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    where = name if mark is None else f"{name}:{mark.line + 1}"
    what = " ".join(str(error.problem or error.context).split())
    if "found character '\\t'" in what or "'\\t'" in what:
        return Problem(what="not YAML: a tab in the indentation", where=where, fix="indent with spaces")
    if "escape" in what:
        fix = r"in double quotes a backslash begins an escape; put a path such as C:\models in single quotes"
        return Problem(what=f"not YAML: {what}", where=where, fix=fix)
    if "mapping values are not allowed" in what:
        return Problem(
            what="not YAML: a second colon on the line, or a wrong indentation",
            where=where,
            fix="put text that holds a colon in quotes, a space after each key's colon, and align keys of one section",
        )
    if "document" in what and "another document" in what:
        return Problem(what="more than one YAML document", where=where, expected="one configuration in the file")
    if "<block end>" in what:
        return Problem(what="not YAML: the line fits no section", where=where, fix="align keys of one section")
    what = what.replace("'<stream end>'", "the end of the file").replace("'<scalar>'", "a value")
    begun = error.context_mark or mark
    opened = f"close the bracket or the quote that opens in line {begun.line + 1}" if begun is not None else ""
    fix = opened if _OPEN.search(what) else _SHOW_HOW
    return Problem(what=f"not YAML: {what}", where=where, fix=fix)


_OPEN = re.compile("end of the (file|stream)|unexpected end|expected ',' or")


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Hold a configuration as plain dicts, lists and scalars, with the places of its keys."""

    name: str  # the file as the user typed it, or "configuration"
    data: dict[str, Any]
    places: Mapping[KeyPath, Place] = field(default_factory=dict)
    has_lines: bool = True  # False for a mapping: its places are the dotted keys

    def place(self, path: KeyPath) -> Place:
        """Return the place of the key, or of the nearest section around it."""
        for length in range(len(path), 0, -1):
            found = self.places.get(path[:length])
            if found is not None:
                return found if found.where else replace(found, where=dotted(path))
        return Place(where=self.name if self.has_lines else dotted(path), order=(-1, 0))


def dotted(path: KeyPath) -> str:
    """Write a path with dots: `trainer.epochs`, `input_features.0.name`."""
    return ".".join(str(part) for part in path)


def value_at(data: Any, path: KeyPath) -> Any:
    """Return the value at a path; None if there is none."""
    for part in path:
        if not _holds(data, part):
            return None
        data = data[part]
    return data


def with_value(data: Any, path: KeyPath, value: Any) -> Any:
    """Return a copy with the value at a path, in new sections if need be."""
    if not path:
        return value
    head, *rest = path
    if isinstance(data, list) and isinstance(head, int):
        return [with_value(item, tuple(rest), value) if index == head else item for index, item in enumerate(data)]
    inner = data if isinstance(data, dict) else {}
    return {**inner, str(head): with_value(inner.get(str(head)), tuple(rest), value)}


def contains(data: Any, path: KeyPath) -> bool:
    """Return whether the path is given, even as null."""
    return bool(path) and _holds(value_at(data, path[:-1]), path[-1])


def _holds(data: Any, part: str | int) -> bool:
    if isinstance(data, dict):
        return part in data
    return isinstance(data, list) and isinstance(part, int) and 0 <= part < len(data)


def is_within(path: KeyPath, others: Iterable[KeyPath]) -> bool:
    """Return whether the path is one of the others or lies below one."""
    return any(path[: len(other)] == other for other in others)
