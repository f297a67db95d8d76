"""Rehearse a release: `make rehearse`.

`python -m tools.release` builds the source archive, and the wheel from it; installs the wheel, without extras, in a
fresh environment, where `brim` checks, plans, trains, predicts and evaluates; and upgrades an environment that has brim
of an older commit, whose run must predict the same there, and go on. `--before COMMIT` names that commit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tools.same import ROOT
from tools.walks import commands

BEFORE = "59795c4"  # before the house was rebuilt
_NOT_RELEASED = {".git", ".venv", ".gpu", "faults", "shared"}


def main() -> int:
    parser = argparse.ArgumentParser(description="Build, install and upgrade brim as a user would.")
    parser.add_argument("--before", metavar="COMMIT", default=BEFORE, help="the older brim; default: %(default)s")
    before = parser.parse_args().before
    with tempfile.TemporaryDirectory(prefix="brim-release-") as name:
        folder = Path(name)
        wheel = build(folder / "dist")
        said = commands(_made(folder / "data"))
        fresh = Environment(folder / "fresh", wheel)
        for verb in ("check", "memory", "plan", "train", "predict", "evaluate"):
            fresh.brim(folder / "data", *said[verb])
        upgrade(folder, before, wheel)
    print("the rehearsal is done: nothing failed")
    return 0


def build(folder: Path) -> Path:
    """Build the source archive, and the wheel from it, in an environment of its own; return the wheel."""
    builder = Environment(folder.parent / "builder", "build")
    builder.run("-m", "build", "--outdir", str(folder), str(ROOT))
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        inside = {Path(each).parts[1] for each in files.getnames() if len(Path(each).parts) > 1}
    if inside & _NOT_RELEASED or not {"src", "README.md", "CHANGELOG.md", "LICENSE"} <= inside:
        raise SystemExit(f"the source archive holds {', '.join(sorted(inside))}")
    (wheel,) = folder.glob("*.whl")
    print(f"built {archive.name} ({archive.stat().st_size:,} bytes), {wheel.name} ({wheel.stat().st_size:,} bytes)")
    return wheel


def upgrade(folder: Path, before: str, wheel: Path) -> None:
    """Train and predict with an older brim, install the wheel over it, and require the same prediction from the run."""
    source = folder / "before"
    _checked("git", "-C", str(ROOT), "worktree", "add", "--detach", str(source), before)
    try:
        environment = Environment(folder / "upgraded", str(source))
    finally:
        _checked("git", "-C", str(ROOT), "worktree", "remove", "--force", str(source))
    data = _made(folder / "data-before")
    said = commands(data)
    environment.brim(data, *said["train"])
    environment.brim(data, *said["predict"])
    predicted = _predictions(data)
    (data / "out.jsonl").unlink()
    environment.install("--upgrade", str(wheel))
    environment.brim(data, *said["predict"])
    if _predictions(data) != predicted:
        raise SystemExit("a run of the older brim predicts other texts with this one")
    environment.brim(data, *said["evaluate"])
    environment.brim(data, *said["train"], "--resume", "trainer.epochs=2")


class Environment:
    """A fresh virtual environment with what is installed in it, as a user's."""

    def __init__(self, folder: Path, *installed: str | Path) -> None:
        self._bin = folder / "bin"
        _checked(sys.executable, "-m", "venv", str(folder))
        self.install(*map(str, installed))

    def install(self, *arguments: str) -> None:
        """Run `pip install` with these arguments, under the project's constraints."""
        self.run(
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "-c",
            str(ROOT / "constraints.txt"),
            *arguments,
        )

    def run(self, *arguments: str) -> None:
        _checked(str(self._bin / "python"), *arguments)

    def brim(self, folder: Path, *arguments: str) -> None:
        """Run the installed command in a folder, with a cache of the environment's own."""
        print("brim", *arguments)
        environment = {**os.environ, "BRIM_CACHE_DIR": str(self._bin.parent / "cache"), "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        _checked(str(self._bin / "brim"), *arguments, cwd=folder, env=environment)


def _checked(*command: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _predictions(folder: Path) -> list[str]:
    return (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    sys.exit(main())
