"""What traces found, kept on disk, so that later runs of the same model need none."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from brim.digests import source_digest
from brim.memory.work import Work, WorkCount, WorkPlace
from brim.planning.cache import Cache, digest

_KIND = "traces"
_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")
# What a trace runs; a change in it makes what earlier traces found worthless.
_TRACED_PACKAGES = ("data", "memory", "models", "planning", "train")

Shape = tuple[int, int]  # rows, tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Basics:
    """What a way takes whatever the shape; bytes that PyTorch has allocated."""

    static_bytes: int  # before a micro-batch: weights, optimizer state, gradients if steps have several, workspaces
    state_bytes: int  # of them the optimizer's state
    unrecorded_bytes: int  # of them what a micro-batch's own trace does not know: state and workspaces
    first_update_bytes: int  # peak of the optimizer's step that bears its state
    update_bytes: int  # and of those that find it
    load_bytes: int  # peak of the load of the weights
    chunk_positions: int | None  # of a full chunk of the loss; None: all logits stand at once


@dataclass(slots=True, kw_only=True)
class KnownShapes:
    """What is known of one way on one kind of device."""

    basics: Basics | None = None
    peaks_bytes: dict[Shape, int] = field(default_factory=dict)
    work: dict[Shape, WorkCount] = field(default_factory=dict)  # of a micro-batch
    update_work: WorkCount | None = None  # of the optimizer's step
    overheads_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, other: KnownShapes) -> None:
        """Take what the other knows and this does not."""
        self.basics = self.basics or other.basics
        self.update_work = self.update_work or other.update_work
        self.peaks_bytes = {**other.peaks_bytes, **self.peaks_bytes}
        self.work = {**other.work, **self.work}
        self.overheads_bytes = {**other.overheads_bytes, **self.overheads_bytes}


class ShapeCache:
    """What is kept of one way.

    facts: all that a trace depends on, beside the versions of the packages.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self._cache = Cache(folder, _KIND)
        self._name = digest({"facts": facts, "versions": versions()})

    @property
    def note(self) -> str | None:
        """What was wrong with it, if anything was."""
        return self._cache.note

    def read(self) -> KnownShapes:
        """What is kept; nothing where nothing is, or what is damaged."""
        saved = self._cache.read(self._name)
        if saved is None:
            return KnownShapes()
        try:
            return _parsed(saved)
        except (ValueError, TypeError, KeyError, AttributeError):
            self._cache.refuse(self._name)
            return KnownShapes()

    def write(self, known: KnownShapes) -> None:
        """Keep what is known; what another run has found meanwhile stays."""
        known.add(self.read())
        self._cache.write(self._name, _as_json(known))


@cache
def versions() -> dict[str, str]:
    """Of the packages that a trace runs, and of brim's own code, which changes between releases, too."""
    found = {"brim": source_digest(_TRACED_PACKAGES)}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def _as_json(known: KnownShapes) -> dict[str, Any]:
    return {
        "basics": None if known.basics is None else asdict(known.basics),
        "peaks_bytes": [[*shape, peak] for shape, peak in sorted(known.peaks_bytes.items())],
        "work": [[*shape, places_as_json(work)] for shape, work in sorted(known.work.items())],
        "update_work": None if known.update_work is None else places_as_json(known.update_work),
        "overheads_bytes": known.overheads_bytes,
    }


def _parsed(saved: Any) -> KnownShapes:
    basics, update_work = saved["basics"], saved["update_work"]
    return KnownShapes(
        basics=None if basics is None else Basics(**{key: _whole(value) for key, value in basics.items()}),
        peaks_bytes={(_whole(rows), _whole(tokens)): _whole(peak) for rows, tokens, peak in saved["peaks_bytes"]},
        work={(_whole(rows), _whole(tokens)): work_from_json(places) for rows, tokens, places in saved["work"]},
        update_work=None if update_work is None else work_from_json(update_work),
        overheads_bytes={str(key): _whole(value) for key, value in saved["overheads_bytes"].items()},
    )


def places_as_json(work: WorkCount) -> list[list[Any]]:
    """All kernels."""
    return [[*place, each.flops, each.num_bytes, each.kernels] for place, each in work.places.items()]


def work_from_json(places: Any) -> WorkCount:
    """What `places_as_json` gave; of anything else a TypeError or ValueError."""
    return WorkCount(
        places={
            WorkPlace(*place): Work(_whole(flops), _whole(num_bytes), _whole(kernels))
            for *place, flops, num_bytes, kernels in places
        }
    )


def _whole(value: Any) -> Any:
    """A number as it was written; None where a field may be."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(value)
    return value
