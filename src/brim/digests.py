"""Manifests: the digest of every file of a folder, by which a changed or missing one is known."""

from __future__ import annotations

import hashlib
import json
import stat
from functools import cache
from pathlib import Path, PurePosixPath

from brim.files import write_text

MANIFEST = "manifest.json"

_CHUNK_BYTES = 1 << 20


def write_manifest(folder: Path) -> None:
    """Write the folder's manifest: SHA-256 by path, for all files in it and below it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    digests = {path.relative_to(folder).as_posix(): sha256(path) for path in files}
    # No line break at the end: a manifest that lost its last byte is no JSON any more.
    write_text(folder / MANIFEST, json.dumps(digests, indent=1))


def verified(folder: Path) -> list[str]:
    """The paths in the folder's manifest, each of which stands for a file that is what it was.

    Raises OSError when a file or the manifest is missing; ValueError, with the names, when a file was changed, and when
    the manifest is none or names what lies outside the folder.
    """
    try:
        _require_regular(folder / MANIFEST)
        digests = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{MANIFEST} is no list of files and digests") from error
    if not isinstance(digests, dict):
        raise ValueError(f"{MANIFEST} is no list of files and digests")
    strange = [name for name in digests if not _is_inside(name)]
    if strange:
        raise ValueError(f"{MANIFEST} names what lies outside the folder: {', '.join(strange)}")
    for name in digests:
        _require_regular(folder / name)
    changed = [name for name, digest in digests.items() if sha256(folder / name) != digest]
    if changed:
        raise ValueError(f"{', '.join(changed)} changed since it was written")
    return list(digests)


def _require_regular(path: Path) -> None:
    """Raise ValueError for what brim never writes, and what reading may never end: links, pipes, devices."""
    mode = path.lstat().st_mode
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path.name} is no regular file")


def sha256(path: Path) -> str:
    """The digest of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\\" not in name


@cache
def source_digest(packages: tuple[str, ...]) -> str:
    """Return a digest of the source of brim's packages, such as "memory": what a trace ran may have changed with it."""
    total = hashlib.sha256()
    for package in packages:
        sources = sorted((Path(__file__).parent / package).rglob("*.py"))
        assert sources, f"brim has no package {package}"
        for path in sources:
            total.update(path.name.encode())
            total.update(path.read_bytes())
    return total.hexdigest()[:32]
