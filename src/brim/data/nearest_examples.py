"""Find the examples whose input is most like a row's own: exact nearest neighbours by cosine, in blocks.

The search is exact and needs numpy alone: a block of rows against a block of examples is one product of matrices, so
that memory is flat, and the result depends on no index's settings. Embeddings lie on the unit sphere. Those of a
training split's inputs are kept on disk for later processes, with a digest of what made them.

The encoder is a sentence-transformers model from a folder or by its Hub id; it runs no code of its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from brim.data.examples import NONE, ExamplePool, Positions
from brim.errors import ConfigError, ModelError, OutputError, Problem
from brim.models.folders import local_folder, read_json, refusals, require_plain_files
from brim.storage import cache_folder, forget_oldest, mark_used, verified, whole_folder, write_manifest, write_text

_VECTORS, _FACTS = "embeddings.npy", "facts.json"


_MOST_KEPT_BYTES = 8 * 2**30  # of all embeddings in the cache


def embeddings_of(
    pool: ExamplePool, encoder: FolderSentenceEncoder, *, index_name: str | None
) -> tuple[Embeddings, tuple[str, ...]]:
    """Return the pool's embeddings, mapped from disk, and notes on how they came about.

    They are those of the cache where the same model made them of the same inputs, else they are computed and kept.
    Raises OutputError when the cache cannot be written.
    """
    facts = {"model": encoder.identity, "inputs": _digest(pool), "num_rows": len(pool)}
    name = index_name or hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()
    folder = cache_folder() / "retrieval" / name
    notes = []
    try:
        if _facts(folder) == facts:
            mark_used(folder)
            return np.load(folder / _VECTORS, mmap_mode="r", allow_pickle=False), ()
        notes.append(f"prompt.retrieval: the data or the model changed since {name} was made: it is made again")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        notes.append(f"prompt.retrieval: what is kept in {folder} is damaged ({error}): it is made again")
    _write(folder, facts, lambda path: _embed(pool, encoder, path))
    made = np.load(folder / _VECTORS, mmap_mode="r", allow_pickle=False)
    forget_oldest(folder.parent, "[!.]*", most_bytes=_MOST_KEPT_BYTES)  # what is mapped outlives its name
    return made, tuple(notes)


def _facts(folder: Path) -> object:
    """Read what the folder's embeddings were made of.

    Raises FileNotFoundError where there is no folder, other OSErrors and ValueError where it is incomplete.
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
            what=f"the embeddings of the training split cannot be kept: {error.strerror or error}",
            where=str(folder),
            fix="make room there, or set BRIM_CACHE_DIR to a folder on a larger disk",
        ) from error


def _embed(pool: ExamplePool, encoder: FolderSentenceEncoder, path: Path) -> None:
    """Write the pool's embeddings as they are made: all of them need not fit into memory."""
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
    """Return a digest of all inputs in their order, each with its length, so that texts cannot run into each other."""
    digest = hashlib.blake2b(digest_size=16)
    for inputs in pool.inputs():
        for text in inputs:
            content = text.encode("utf-8", "surrogatepass")
            digest.update(len(content).to_bytes(8, "little"))
            digest.update(content)
    return digest.hexdigest()


KEY = "prompt.retrieval.model_name"


INSTALL = "pip install 'brim[retrieval]'"


_PACKAGE = "sentence_transformers"


_ORGANISATION = "sentence-transformers"  # of a Hub id that names none, as in the library


_HUB_PATTERNS = ["*.json", "*.txt", "*.model", "*.safetensors", "*.jinja"]


_PICKLED = "pytorch_model.bin"


_WEIGHTS = "model.safetensors"


class FolderSentenceEncoder:
    """Run a model of sentence-transformers, loaded when it is first needed, on the GPU where there is one.

    It leaves the GPU after each call: the memory is the language model's, and its plan counts what is free.
    """

    def __init__(self, folder: Path) -> None:
        self.identity = _identity(folder)  # changes when the model does
        self._folder = folder
        self._model: Any = None

    def encode(self, texts: Sequence[str]) -> Embeddings:
        """Return one row of length 1 for each text; texts of like length are padded together.

        Raises ModelError where the model cannot be loaded.
        """
        import torch

        if self._model is None:
            self._model = _loaded(self._folder)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model.to(device)
        vectors = self._model.encode(
            list(texts), convert_to_numpy=True, normalize_embeddings=True, show_progress_bar=False, device=device
        )
        if device == "cuda":
            self._model.to("cpu")
            torch.cuda.empty_cache()
        return np.asarray(vectors, dtype=np.float32)


def load_sentence_encoder(name: str) -> FolderSentenceEncoder:
    """Find the model of a folder or a Hub id.

    Raises ConfigError where the extra is not installed or there is no such model; ModelError for a folder that asks for
    code of its own, holds pickled weights or does not hold a model of sentence-transformers.
    """
    if not is_installed():
        raise ConfigError(
            what="prompt.retrieval.type: semantic needs the package sentence-transformers, which is not installed",
            where=KEY,
            fix=f"{INSTALL}, or set prompt.retrieval.type: random",
        )
    folder = _folder(name)
    _require_harmless(folder)
    return FolderSentenceEncoder(folder)


def is_installed() -> bool:
    """Return whether the package is installed, without importing it."""
    return importlib.util.find_spec(_PACKAGE) is not None


def _loaded(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    from brim.models import no_library_bars  # here, since it imports torch, which `brim check` does without

    try:
        with no_library_bars():
            return SentenceTransformer(
                str(folder),
                device="cpu",
                trust_remote_code=False,
                local_files_only=True,
                model_kwargs={"use_safetensors": True},
            )
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ModelError(_problem(f"the model that compares inputs cannot be loaded: {reason}", folder)) from error


def _folder(name: str) -> Path:
    local = local_folder(name)
    if local is not None:
        return local
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise ConfigError(_problem(f"no such folder: {_cut(name)}", KEY))
    return _from_hub(name if "/" in name else f"{_ORGANISATION}/{name}")


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS))
    except HFValidationError:
        what = f"{_cut(name)} is neither a folder nor a Hub id"
    except (HfHubHTTPError, OSError) as error:
        what = f"{_cut(name)} is not on this machine, and the Hub did not provide it ({type(error).__name__})"
    raise ConfigError(_problem(what, KEY))


def _require_harmless(folder: Path) -> None:
    """Refuse what a language model's folder may not hold either, and modules that are not the library's own."""
    require_plain_files(folder)
    problems = []
    with suppress(FileNotFoundError):  # older models have it in a module's folder; transformers refuses code there
        problems += refusals(folder, read_json(folder / "config.json"), name=str(folder), trust_remote_code=False)
    for file in sorted(folder.rglob(_PICKLED)):
        if not file.with_name(_WEIGHTS).is_file():
            what = f"weights are pickled ({file.relative_to(folder)}), which can run code when they are opened"
            problems.append(_problem(what, folder, fix="save the model again with sentence-transformers"))
    problems += [
        _problem(f"a module is not the library's own: {kind!r}", folder / "modules.json") for kind in _foreign(folder)
    ]
    ModelError.raise_for(problems)


def _foreign(folder: Path) -> list[object]:
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(_problem(f"modules.json cannot be read: {error}", folder)) from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(_problem("modules.json is not a list of modules", folder))
    kinds = [module.get("type") for module in modules]
    return [kind for kind in kinds if not (isinstance(kind, str) and kind.startswith(f"{_PACKAGE}."))]


def _identity(folder: Path) -> str:
    """The folder's files by name, size and time of change: reading gigabytes of weights would tell little more."""
    facts = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            status = path.stat()
            facts.append(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}")
    return hashlib.blake2b("\n".join([str(folder), *facts]).encode(), digest_size=16).hexdigest()


def _cut(name: str) -> str:
    return name if len(name) <= 200 else f"{name[:200]}…"


def _problem(what: str, where: str | Path, *, fix: str = "") -> Problem:
    return Problem(
        what=what,
        where=str(where),
        expected="a model of sentence-transformers with safetensors: a folder, or a Hub id such as "
        "sentence-transformers/all-MiniLM-L6-v2",
        fix=fix or f"check {KEY}",
    )


# Examples at once: with 1,024 rows 16 MiB of likenesses, and long enough for the product to run at full speed.
_BLOCK_EXAMPLES = 4096


# Candidates beside the k best, which are compared once more in float64: those whose float32 likenesses may be in
# another order, since a product's last bits depend on the shape of its block.
_SPARE = 16


Embeddings = npt.NDArray[np.float32]  # [N, D], each of length 1; may be mapped from disk
Likenesses = npt.NDArray[np.float32]  # [B, examples]


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestExamples:
    """Choose the examples most like each row's input, the most like first."""

    embeddings: Embeddings  # of the pool, by position
    encoder: FolderSentenceEncoder
    num_examples: int

    def choose(self, inputs: Sequence[str], own: Positions) -> Positions:
        """Return positions [B, k] in the pool: distinct ones for each row, and never its own.

        own: the row's own position, NONE where it is not in the pool.
        """
        return nearest(self._embedded(inputs, own), self.embeddings, own, self.num_examples)

    def _embedded(self, inputs: Sequence[str], own: Positions) -> Embeddings:
        """Return the embeddings of inputs; one that is in the pool has its embedding there."""
        queries = np.empty((len(inputs), self.embeddings.shape[1]), np.float32)
        is_known = own != NONE
        queries[is_known] = self.embeddings[own[is_known]]
        if not is_known.all():
            queries[~is_known] = self.encoder.encode([inputs[row] for row in np.flatnonzero(~is_known).tolist()])
        return queries


def nearest(queries: Embeddings, embeddings: Embeddings, own: Positions, num_examples: int) -> Positions:
    """Return the `num_examples` embeddings of the largest product with each query, in falling order, without its own.

    Of equally near ones, the first is taken.
    """
    num_kept = min(num_examples + _SPARE, len(embeddings))
    best = np.full((len(queries), num_kept), -np.inf, np.float32)
    positions = np.zeros((len(queries), num_kept), np.int64)
    for start in range(0, len(embeddings), _BLOCK_EXAMPLES):
        block = np.asarray(embeddings[start : start + _BLOCK_EXAMPLES])
        likeness = queries @ block.T
        rows = np.flatnonzero((own >= start) & (own < start + len(block)))
        likeness[rows, own[rows] - start] = -np.inf
        best, positions = _kept(best, positions, likeness, start)
    return _in_order(queries, embeddings, best, positions)[:, :num_examples]


def _kept(best: Likenesses, positions: Positions, likeness: Likenesses, start: int) -> tuple[Likenesses, Positions]:
    """Merge the best so far with a block's, and keep as many as before; in no order."""
    num_kept = best.shape[1]
    in_block = np.broadcast_to(np.arange(start, start + likeness.shape[1]), likeness.shape)
    if likeness.shape[1] > num_kept:
        top = np.argpartition(-likeness, num_kept - 1, axis=1)[:, :num_kept]
        likeness, in_block = np.take_along_axis(likeness, top, 1), top + start
    likeness, in_block = np.hstack([best, likeness]), np.hstack([positions, in_block])
    top = np.argpartition(-likeness, num_kept - 1, axis=1)[:, :num_kept]
    return np.take_along_axis(likeness, top, 1), np.take_along_axis(in_block, top, 1)


def _in_order(queries: Embeddings, embeddings: Embeddings, best: Likenesses, positions: Positions) -> Positions:
    """Sort candidates by their likeness in float64, added up in one order for all; then by position."""
    ordered = np.empty_like(positions)
    for row, (query, candidates) in enumerate(zip(queries.astype(np.float64), positions, strict=True)):
        exact = (np.asarray(embeddings[candidates], np.float64) * query).sum(axis=1)
        exact[np.isneginf(best[row])] = -np.inf
        ordered[row] = candidates[np.lexsort((candidates, -exact))]
    return ordered
