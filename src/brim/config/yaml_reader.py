"""Read YAML text into plain values, with the place of every key. Nothing but YAML's own types is built."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from brim.config.places import Path, Place, dotted
from brim.errors import ConfigError, Problem

MAX_NODES = 20_000  # a configuration has dozens; aliases of aliases could make billions
MAX_DEPTH = 50

_SHOW_HOW = "write lines of the form `key: value`; text that holds any of : # { } [ ] & * ! | > % @ ` goes in quotes"
_MERGE = "tag:yaml.org,2002:merge"
_PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "timestamp")}
_PLAIN_TAGS |= {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


def read_yaml(text: str, name: str) -> tuple[Any, dict[Path, Place]]:
    """The value that the text holds, and the places of its keys and list entries as `name:line`.

    Raises ConfigError for text that is no YAML, and for keys given twice (all of them at once).
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
        raise ConfigError(Problem(what=what, where=name, fix=fix)) from None
    if builder.problems:
        raise ConfigError(*builder.problems)
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
    """Builds values from YAML's nodes and notes where they stand."""

    name: str
    yaml: YAML
    places: dict[Path, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    num_nodes: int = 0

    def build(self, node: Node, path: Path) -> Any:
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES or len(path) > MAX_DEPTH:
            raise ConfigError(_too_many(self.where(node)))
        if str(node.tag) not in _PLAIN_TAGS:
            self.problems.append(
                Problem(
                    what=f"the tag {_short_tag(node)} is not read",
                    where=self.where(node),
                    fix="write a plain value, or put it in quotes",
                )
            )
            return None
        if isinstance(node, MappingNode):
            return self.build_mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self.build_entry(entry, (*path, index)) for index, entry in enumerate(node.value)]
        return self.scalar(node)

    def build_entry(self, node: Node, path: Path) -> Any:
        self.places[path] = self.place(node)
        return self.build(node, path)

    def build_mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        seen: dict[str, Node] = {}
        for key_node, value_node in self.pairs(node):
            key = self.key(key_node)
            if key in seen:
                self.problems.append(
                    Problem(
                        what=f"{dotted((*path, key))} is given twice",
                        where=self.where(key_node),
                        expected=f"one value; the first is at {self.where(seen[key])}",
                        fix="keep one of them",
                    )
                )
                continue
            seen[key] = key_node
            below = (*path, key)
            self.places[below] = self.place(key_node)
            result[key] = self.build(value_node, below)
        return result

    def pairs(self, node: MappingNode) -> list[tuple[Node, Node]]:
        """The mapping's own pairs, then those that `<<` adds and that are not its own."""
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
                        Problem(
                            what="<< needs a mapping",
                            where=self.where(key_node),
                            expected="an alias of another mapping, such as <<: *defaults",
                        )
                    )
                added = [(k, v) for k, v in source.value if str(k.tag) != _MERGE and self.key(k) not in names]
                names.update(self.key(k) for k, _ in added)
                own += added
        return own

    def key(self, node: Node) -> str:
        """The key as text; YAML allows others, the configuration has none."""
        return self.whole(node.value, node) if isinstance(node, ScalarNode) else "[a list or mapping]"

    def scalar(self, node: Node) -> Any:
        try:
            value = self.yaml.constructor.construct_object(node)
        except ValueError as error:
            what = "a number of too many digits" if "digits" in str(error) else f"not YAML: {_line(error)}"
            self.problems.append(Problem(what=what, where=self.where(node), fix="put it in quotes if it is text"))
            return None
        return self.whole(value, node) if isinstance(value, str) else value

    def whole(self, text: str, node: Node) -> str:
        """The text with the halves of characters put together that JSON's escapes make of one, such as of an emoji."""
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            what = r"half a character, escaped as \uD800 to \uDFFF"
            self.problems.append(Problem(what=what, where=self.where(node), fix="write the character itself"))
            return ""

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


def _short_tag(node: Node) -> str:
    return str(node.tag).replace("tag:yaml.org,2002:", "!!")
