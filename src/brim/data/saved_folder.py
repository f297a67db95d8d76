"""The small files of a folder that `datasets` saved, read before `datasets` acts on them: they name its own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard

from brim.errors import DataError, Problem

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_MOST_BYTES = 32 << 20
_FIX = "save it anew with save_to_disk"


def require_plain_folder(path: Path) -> None:
    """Raise DataError where a file is missing, is none that `datasets` wrote, or names one elsewhere."""
    if not (path / SPLITS).exists():
        _require_part(path, path.name)
        return
    splits = _mapping(path / SPLITS, path.name).get("splits")
    if not _is_full(splits) or not all(_is_plain(split) for split in splits):
        raise _refused(f"{SPLITS} does not name the folders of its splits", path.name)
    for split in splits:
        _require_part(path / split, f"{path.name}/{split}")


def _require_part(path: Path, name: str) -> None:
    if path.is_symlink():
        raise _refused("it is a link", name)
    _mapping(path / INFO, name)
    files = _mapping(path / STATE, name).get("_data_files")
    names = [each.get("filename") if isinstance(each, dict) else None for each in files] if _is_full(files) else [None]
    if not all(_is_plain(file) for file in names):
        raise _refused(f"{STATE} does not name Arrow files of this folder", name)
    for file in sorted({str(file) for file in names}):
        if (path / file).is_symlink() or not (path / file).is_file():
            raise _refused(f"{file} is missing, or no regular file", name)


def _mapping(file: Path, name: str) -> dict[str, Any]:
    try:
        if not file.is_file() or file.stat().st_size > _MOST_BYTES:
            raise _refused(f"{file.name} is missing, or no regular file of at most {_MOST_BYTES:,} bytes", name)
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _refused(f"{file.name}: {error}", name) from None
    except RecursionError:
        raise _refused(f"{file.name} is nested too deeply", name) from None
    if not isinstance(value, dict):
        raise _refused(f"{file.name} holds no mapping", name)
    return value


def _is_full(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list) and bool(value)


def _is_plain(name: object) -> bool:
    """Whether it is the name of an entry of the folder itself."""
    return isinstance(name, str) and name not in ("", ".", "..") and "\0" not in name and Path(name).name == name


def _refused(why: str, name: str) -> DataError:
    what = f"the saved data set cannot be read: {why}"
    return DataError(Problem(what=what, where=name, expected="what `datasets` writes with save_to_disk", fix=_FIX))
