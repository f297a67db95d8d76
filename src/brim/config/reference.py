"""The schema for editors, and the page of all keys for people."""

from __future__ import annotations

from typing import Any

from brim.config.schema import Config


def json_schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12, with a description for every key."""
    schema = Config.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "brim configuration"}


def reference_page() -> str:
    return ""
