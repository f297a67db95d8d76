"""Write the tensors that are divided over ranks, each rank a file, and read any part of them again.

    model-00001-of-00004.safetensors     what the first of four ranks has of each tensor

The header says of each tensor the shape of the whole, and where the part begins in it. So a file says by itself what
it holds, and who reads needs to know nothing of the ranks that wrote: one process joins whole tensors, and each of any
other number of ranks reads what it will hold. PyTorch's own writer of such files (torch.distributed.checkpoint,
HuggingFaceStorageWriter) plans in collectives, in which ranks would wait while others write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from brim.batching.memory import or_explain
from brim.distributed import box_of, is_sharded, local
from brim.errors import CheckpointError, OutOfMemoryError
from brim.storage import sync

_ENDING = ".safetensors"


_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})")


_HEADER = "parts"  # the key in a file's header


def write_parts(folder: Path, files: Mapping[str, Mapping[str, Tensor]], *, rank: int, ranks: int) -> None:
    """Write what this rank has of the tensors of some files, and sync it. Raises CheckpointError."""
    try:
        for name, tensors in files.items():
            or_explain(partial(_write, folder, name, tensors, rank, ranks), _no_memory)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            what=f"rank {rank} could not write its part of a checkpoint: {error}",
            where=str(folder.parent),
            expected="a folder that all machines of the run share, with room",
            fix="make room or make the folder writable, then continue with --resume",
        ) from error


def _write(folder: Path, name: str, tensors: Mapping[str, Tensor], rank: int, ranks: int) -> None:
    """Write a part. Tensors that are not divided, the first rank writes."""
    parts, places = {}, {}
    for key, tensor in tensors.items():
        part = local(tensor.detach())
        if part.numel() and (rank == 0 or is_sharded(tensor)):
            box = box_of(tensor)
            parts[key], places[key] = part.contiguous(), {"shape": box.shape, "offset": box.offset}
    path = folder / f"{name}-{rank + 1:05d}-of-{ranks:05d}{_ENDING}"
    save_file(parts, path, metadata={_HEADER: json.dumps(places)})
    sync(path)  # by this machine, which alone has it in memory


def _no_memory(message: str) -> OutOfMemoryError:
    return OutOfMemoryError(
        what=f"memory ran out when a part of a checkpoint was written: {message}",
        fix="free memory on this machine, then continue with --resume",
    )


def contents(names: Sequence[str]) -> set[str]:
    """Return what files of these names hold, without their endings; where the part of a rank is missing, nothing."""
    found: dict[str, set[tuple[int, int]]] = {}
    for name in names:
        part = _PART.fullmatch(name.removesuffix(_ENDING))
        stem, place = (name.removesuffix(_ENDING), (1, 1)) if part is None else (part[1], (int(part[2]), int(part[3])))
        if name.endswith(_ENDING):
            found.setdefault(stem, set()).add(place)
    return {stem for stem, places in found.items() if places == {(k, n) for _, n in places for k in range(1, n + 1)}}


def read(folder: Path, name: str) -> Mapping[str, Tensor]:
    """Return the tensors of one file, or of the files of all ranks, which are read as they are asked for."""
    whole = folder / f"{name}{_ENDING}"
    return load_file(whole) if whole.exists() else mapped(folder, name)


def mapped(folder: Path, name: str) -> Joined:
    """Return the tensors of one file, or of the files of all ranks, each of which is read when it is asked for."""
    whole = folder / f"{name}{_ENDING}"
    return Joined([whole] if whole.exists() else sorted(folder.glob(f"{name}-*-of-*{_ENDING}")))


class Joined(Mapping[str, Tensor]):
    """Hold whole tensors, whose parts lie in files. Raises ValueError where parts do not make up a whole tensor."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._parts: dict[str, list[tuple[Path, tuple[int, ...]]]] = {}  # file and offset
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                header = opened.metadata() or {}
                wholes = {key: {"shape": opened.get_slice(key).get_shape(), "offset": [0]} for key in [*opened.keys()]}
                for key, place in (json.loads(header[_HEADER]) if _HEADER in header else wholes).items():
                    self._parts.setdefault(key, []).append((file, tuple(place["offset"])))
                    self._shapes[key] = tuple(place["shape"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, key: str) -> Tensor:
        shape = self._shapes[key]
        return self.rows(key, 0, shape[0]) if shape else self._read(self._parts[key][0][0], key, None)

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        """Return some of a tensor's first dimension, the only one along which tensors are divided."""
        parts = sorted(self._parts[key], key=lambda part: part[1])
        found = [self._read(file, key, (start - first, stop - first)) for file, (first, *_) in parts if first < stop]
        joined = torch.cat(found) if found else self._read(parts[0][0], key, (0, 0))
        if joined.shape != (stop - start, *self._shapes[key][1:]):
            raise ValueError(f"the parts of {key} do not make up the whole")
        return joined

    def _read(self, file: Path, key: str, rows: tuple[int, int] | None) -> Tensor:
        """Return these rows of a part, as far as it has them; None: all of it. The file is mapped."""
        with safe_open(file, framework="pt") as opened:
            part: Tensor = opened.get_tensor(key)
        return part if rows is None else part[max(rows[0], 0) : rows[1]]


def part_for(tensors: Mapping[str, Tensor], key: str, weight: Tensor) -> Tensor:
    """Return what a rank that has this part of a weight needs of a tensor of the weight's shape."""
    if not is_sharded(weight):
        return tensors[key]
    start = box_of(weight).offset[0]
    stop = start + local(weight).shape[0]
    return tensors.rows(key, start, stop) if isinstance(tensors, Joined) else tensors[key][start:stop].clone()
