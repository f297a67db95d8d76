"""`backend`: where the run takes place."""

from typing import Annotated, Literal, TypeAlias

from brim.config.schema.base import Section, Typed, key


class BackendConfig(Section):
    """Where the run takes place."""

    type: Literal["local"] = key("local", "This machine. `backend: local` is short for `{type: local}`.")


BackendField: TypeAlias = Annotated[BackendConfig, Typed("local", default="local")]
