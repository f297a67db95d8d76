"""The configuration's JSON Schema, for editors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from brim.config.schema import Config
from brim.config.schema_walk import all_keys, sections_of, type_name, typed_marker

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12, with a description for every key; brim's own keys are marked with `x-brim`."""
    schema = _without_expected(Config.model_json_schema())
    for name in _sections_that_need_a_type():
        definition = schema["$defs"][name]
        definition["required"] = sorted({*definition.get("required", ()), "type"})
    return {"$schema": _DIALECT, **schema, "title": "brim configuration"}


def _sections_that_need_a_type() -> Iterator[str]:
    """Where `type` chooses among sections: all but the one that stands for a missing type."""
    for key in all_keys():
        marker = typed_marker(key.field)
        for section in sections_of(key.field) if marker is not None else ():
            if marker is not None and type_name(section) != marker.default:
                yield section.__name__


def _without_expected(schema: Any) -> Any:
    """The schema without the words that are meant for error messages."""
    if isinstance(schema, dict):
        return {name: _without_expected(item) for name, item in schema.items() if name != "x-expected"}
    return [_without_expected(item) for item in schema] if isinstance(schema, list) else schema
