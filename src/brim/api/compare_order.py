"""One run of a comparison, as it is handed to a process of its own, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from brim.errors import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrder:
    """What is to be trained."""

    config: str  # a YAML file
    overrides: tuple[str, ...]
    output_directory: str
    resume: bool  # continue what is there, if there is anything

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> RunOrder:
        told = json.loads(text)
        return cls(**{**told, "overrides": tuple(told["overrides"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended."""

    outcome: Literal["finished", "failed", "stopped"]
    rows: Mapping[str, str]  # of a finished run: split -> a digest of which rows it holds
    problems: tuple[Problem, ...] = ()  # of a failed one
    is_users_mistake: bool = False  # what failed it is wrong with the configuration or the data
