"""Run `brim`, and note each row that it begins to generate: the process's number and the row's, a line each.

python -m benchmarks.inference_begun NOTES predict …
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Begun:
    """Hold what one process began."""

    rows: tuple[int, ...]
    num_repeated: int  # of them, those that an earlier process had begun already


def begun_by_process(notes: Path) -> list[Begun]:
    """Return what each process began, in the order in which the processes ran."""
    rows: dict[str, list[int]] = {}
    for line in notes.read_text(encoding="ascii").splitlines():
        process, row = line.split()
        rows.setdefault(process, []).append(int(row))
    seen: set[int] = set()
    found = []
    for begun in rows.values():
        found.append(Begun(tuple(begun), sum(row in seen for row in begun)))
        seen.update(begun)
    return found


def main() -> None:
    from brim.cli import main as brim
    from brim.infer.engines import Writing
    from brim.infer.engines.continuous import Queue

    notes = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    take = Queue.take

    def noted(queue: Queue, *arguments: int, **more: int) -> Sequence[Writing]:
        taken = take(queue, *arguments, **more)
        os.write(notes, b"".join(b"%d %d\n" % (os.getpid(), row.key) for row in taken))
        return taken

    Queue.take = noted  # type: ignore[method-assign, assignment]
    sys.argv = ["brim", *sys.argv[2:]]
    brim()


if __name__ == "__main__":
    main()
