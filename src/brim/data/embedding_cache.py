"""Embeddings of a training split's inputs, kept on disk for later processes with a digest of what made them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from brim.cache_folder import cache_folder
from brim.data.example_pool import ExamplePool
from brim.data.nearest_examples import Embeddings, SentenceEncoder
from brim.digests import verified, write_manifest
from brim.errors import OutputError, Problem
from brim.files import whole_folder, write_text

_VECTORS, _FACTS = "embeddings.npy", "facts.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The pool's embeddings, mapped from disk, and what is to be told of how they came."""

    embeddings: Embeddings
    notes: tuple[str, ...] = ()


def embeddings_of(pool: ExamplePool, encoder: SentenceEncoder, *, index_name: str | None) -> Kept:
    """Those of the cache where they were made of the same inputs by the same model, else made anew and kept.

    Raises OutputError when the cache cannot be written.
    """
    facts = {"model": encoder.identity, "inputs": _digest(pool), "num_rows": len(pool)}
    name = index_name or hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()
    folder = cache_folder() / "retrieval" / name
    notes = []
    try:
        if _facts(folder) == facts:
            return Kept(embeddings=np.load(folder / _VECTORS, mmap_mode="r", allow_pickle=False))
        notes.append(f"prompt.retrieval: the data or the model changed since {name} was made: it is made anew")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        notes.append(f"prompt.retrieval: what is kept in {folder} is damaged ({error}): it is made anew")
    _write(folder, facts, lambda path: _embed(pool, encoder, path))
    return Kept(embeddings=np.load(folder / _VECTORS, mmap_mode="r", allow_pickle=False), notes=tuple(notes))


def _facts(folder: Path) -> object:
    """What the folder's embeddings were made of.

    Raises FileNotFoundError where there is none, other OSErrors and ValueError where it is not whole.
    """
    if not folder.exists():
        raise FileNotFoundError(folder)
    try:
        verified(folder)
    except FileNotFoundError as error:
        raise ValueError(f"{Path(str(error.filename)).name} is missing") from None
    return json.loads((folder / _FACTS).read_text(encoding="utf-8"))


def _write(folder: Path, facts: dict[str, object], fill: Callable[[Path], None]) -> None:
    try:
        with whole_folder(folder) as temporary:
            fill(temporary / _VECTORS)
            write_text(temporary / _FACTS, json.dumps(facts, indent=1))
            write_manifest(temporary)
    except OSError as error:
        raise OutputError(
            Problem(
                what=f"the embeddings of the training split cannot be kept: {error.strerror or error}",
                where=str(folder),
                fix="make room there, or set BRIM_CACHE_DIR to a folder on a larger disk",
            )
        ) from error


def _embed(pool: ExamplePool, encoder: SentenceEncoder, path: Path) -> None:
    """Written as they come: all of them need not fit into memory."""
    vectors: Embeddings | None = None
    start = 0
    for inputs in pool.inputs():
        block = encoder.encode(inputs)
        if vectors is None:
            shape = (len(pool), block.shape[1])
            vectors = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
        vectors[start : start + len(block)] = block
        start += len(block)
    assert vectors is not None, "a pool has at least one example"
    vectors.flush()  # type: ignore[attr-defined]


def _digest(pool: ExamplePool) -> str:
    """Of all inputs in their order, each with its length, so that no two lists of texts have the same."""
    digest = hashlib.blake2b(digest_size=16)
    for inputs in pool.inputs():
        for text in inputs:
            content = text.encode("utf-8", "surrogatepass")
            digest.update(len(content).to_bytes(8, "little"))
            digest.update(content)
    return digest.hexdigest()
