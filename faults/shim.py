"""The library that counts a process's writes, and kills it at one of them (shim.c)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_SOURCE = Path(__file__).with_name("shim.c")
_TEARABLE = ("write", "pwrite", "writev", "sendfile", "copy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One thing that a process did to a file below the watched folder."""

    number: int  # from 1
    name: str  # create, write, fsync, rename, unlink, rmdir, mkdir, …
    num_bytes: int
    path: str  # relative to the watched folder
    new_path: str | None = None  # of a rename

    @property
    def is_tearable(self) -> bool:
        """Whether it can be half done."""
        return self.name in _TEARABLE and self.num_bytes > 1

    @property
    def takes_away(self) -> bool:
        """Whether a name that a person sees goes with it."""
        return self.name in ("rename", "unlink", "rmdir") and not is_hidden(self.path)


def is_hidden(path: str) -> bool:
    """Whether a path below the watched folder is one of the names that brim writes to before it shows them."""
    return any(part.startswith(".") for part in PurePosixPath(path).parts)


def build_shim(folder: Path) -> Path | None:
    """The compiled library; None where there is no C compiler, or no Linux."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return None
    library = folder / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, _SOURCE, "-ldl"], check=True)
    return library


def watch(below: Path, *, log: Path | None = None, kill_after: int = 0, kill_amid: int = 0) -> dict[str, str]:
    """The environment that arms the library in a process that has it loaded. log: lies outside of `below`."""
    environment = {"FAULT_BELOW": str(below), "FAULT_KILL_AFTER": str(kill_after), "FAULT_KILL_AMID": str(kill_amid)}
    return environment if log is None else {**environment, "FAULT_LOG": str(log)}


def read_log(log: Path, below: Path) -> list[Operation]:
    """What the library wrote down. No path may hold a space."""
    operations = []
    for line in log.read_text(encoding="utf-8").splitlines():
        number, name, num_bytes, *paths = line.split(" ")
        path, new_path = (Path(each).relative_to(below).as_posix() for each in (paths * 2)[:2])
        operations.append(
            Operation(
                number=int(number),
                name=name,
                num_bytes=int(num_bytes),
                path=path,
                new_path=new_path if len(paths) > 1 else None,
            )
        )
    return operations
