"""Define what every section of the configuration shares: frozen, strict, no unknown keys; and declare keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, Strict
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

Item = TypeVar("Item")
Held = TypeVar("Held", bound="Section")


# Lists in YAML, tuples in Python: a frozen section holds nothing that can be changed in place.
Items: TypeAlias = Annotated[tuple[Item, ...], Strict(False)]


PositiveInt: TypeAlias = Annotated[int, Field(ge=1)]


NonNegativeInt: TypeAlias = Annotated[int, Field(ge=0)]


NonNegativeFloat: TypeAlias = Annotated[float, Field(ge=0)]


Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]


Text: TypeAlias = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """Hold a mapping of the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def having(self: Held, path: str, value: Any) -> Held:
        """Return the section with another value of a key, such as "chat.date". The value is not checked."""
        name, _, rest = path.partition(".")
        return self.model_copy(update={name: getattr(self, name).having(rest, value) if rest else value})


def key(default: Any, description: str, *, brim: bool = False, expected: str = "") -> Any:
    """Declare a key with its default and its help. brim: the key is brim's own, Ludwig does not know it.

    expected: what the values are, in words, where the type alone would read badly.
    """
    extra: dict[str, Any] = {**({"x-brim": True} if brim else {}), **({"x-expected": expected} if expected else {})}
    return Field(default, description=description, json_schema_extra=extra)


def required(description: str, *, brim: bool = False, expected: str = "") -> Any:
    """Declare a key that must be given."""
    return key(..., description, brim=brim, expected=expected)


class Short:
    """Mark a section that may be a bare text: `adapter: lora` for `{type: lora}`, `batch_rampup: 0.1dur`.

    name: the key that the text is for. types: its values, if it is `type`; default: the type of a section that does
    not say; None if it must.
    """

    def __init__(self, name: str = "type", *, types: Sequence[str] = (), default: str | None = None) -> None:
        self.name, self.types, self.default = name, types, default

    def expand(self, value: Any) -> Any:
        """Return the section as a mapping, with its type if that is known."""
        if isinstance(value, str):
            return {self.name: value}
        if isinstance(value, dict) and "type" not in value and self.default is not None:
            return {"type": self.default, **value}
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.expand, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        text: dict[str, Any] = {"type": "string", **({"enum": list(self.types)} if self.types else {})}
        return {"anyOf": [text, handler(schema)]}
