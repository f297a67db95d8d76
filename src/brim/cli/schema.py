"""`brim schema`: the configuration's JSON Schema, for editors."""

from __future__ import annotations

import json


def schema() -> None:
    """Print the JSON Schema of the configuration, for editors."""
    from brim.config import json_schema

    print(json.dumps(json_schema(), indent=2))
