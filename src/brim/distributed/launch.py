"""Stand in until the launch is there."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Say which of a run's processes this one is."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @classmethod
    def of_environment(cls) -> Place:
        env = os.environ
        if int(env.get("WORLD_SIZE", "1")) == 1:
            return cls()
        return cls(
            rank=int(env["RANK"]),
            local_rank=int(env["LOCAL_RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])),
        )
