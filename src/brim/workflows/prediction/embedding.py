"""Collect the outputs of a model's layers for a data set's prompts: in memory, or as a parquet file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from brim.config.prompts import LABELS
from brim.data import prompts_of, with_labels_of_data
from brim.data.read import Data, Ledger, RowFaults, read
from brim.data.tokens import TokenRows
from brim.errors import InputError, OutputError, Problem, WriteError
from brim.infer import LayerName, Pooling, VectorStore, first_vectors, named_layers
from brim.models import LLM, model_note, no_library_warnings
from brim.notes import OnBatch, Say, planned, status
from brim.session import Session
from brim.storage import whole_file
from brim.units import format_count
from brim.workflows.prediction.members import Several, is_one_process
from brim.workflows.prediction.output import ROW, ledger_path, require_free, require_writable, write_ledger
from brim.workflows.prediction.prompts import Integers, require_rows
from brim.workflows.prediction.scoring import Load, batches_for, collected

Stores: TypeAlias = Mapping[str, VectorStore]  # by layer, or by column
Vectors: TypeAlias = NDArray[np.float32]


PARQUET = ".parquet"


_BLOCK_BYTES = 16 << 20  # of vectors that are read, and written, together


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Hold the outputs of layers for rows of a data set, in the order of the rows."""

    rows: Integers  # their numbers in the data
    num_tokens: Integers  # of each row's prompt
    widths: Mapping[str, int]  # by layer
    by_layer: Mapping[str, Vectors | list[Vectors]]  # [rows, width]; a list of [tokens, width] without pooling
    output: Path | None  # the file, where one was asked for; `by_layer` is then empty
    ledger: Path | None  # the file beside it that names the rows that were cut or left out, where there are any
    seconds: float  # of the passes

    def __repr__(self) -> str:
        layers = ", ".join(f"{name} ({width:,} wide)" for name, width in self.widths.items())
        return f"Activations: {format_count(len(self.rows), 'row')} of {layers}, {self.output or 'in memory'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """Say what to collect, beside the configuration."""

    layers: Sequence[LayerName]
    split: str = "full"
    pooling: Pooling = "mean"
    normalize: bool = False
    output: Path | None = None
    columns: Sequence[str] | None = None  # of the output, for the layers; None: the layers' names
    num_members: int = 1  # processes that do it

    @no_library_warnings()
    def activations(
        self,
        session: Session,
        data: Data,
        *,
        llm: LLM | None,
        weights: Load,
        notes: Sequence[str],
        say: Say,
        on_batch: OnBatch,
    ) -> Activations:
        """Run the prompts of the split through the model and keep the outputs of the layers.

        llm: the weights where they are loaded already; otherwise `weights` loads them.
        Raises InputError for an unknown layer, DataError for rows that cannot be used, OutputError and WriteError.
        """
        if self.output is not None:
            check_output(self.output)
        say(status("reading the data"))
        rows, ledger, prompt_notes = _prompts(session, data, split=self.split)
        for line in [*notes, *prompt_notes, *ledger.summary()]:
            say(line)
        tokens = format_count(int(rows.lengths.sum()), "token")
        data_note = planned("data", f"{format_count(len(rows), 'prompt')}, {tokens}")
        how: dict[str, Any] = {"pooling": self.pooling, "normalize": self.normalize, "on_batch": on_batch}
        if not is_one_process(session.config, self.num_members):
            with Several(session, self.num_members, is_spent=True, say=say) as several:
                how |= {"layers": self.layers, "batches": several.batches_for(rows)}
                say(data_note)
                return self._collected(rows, ledger, partial(several.embed, rows, **how))
        how["batches"] = batches_for(session, [rows], llm=llm, say=say)
        loaded = weights()
        say(model_note(session.config, loaded, trains=False))
        say(data_note)
        say(status("reading the layers", is_planned=True))
        layers = named_layers(loaded.model, self.layers)

        def collect(into: Stores) -> float:
            started = time.perf_counter()
            collected(loaded, session, rows, layers, into=into, **how)
            return time.perf_counter() - started

        return self._collected(rows, ledger, collect)

    def _collected(self, rows: TokenRows, ledger: Ledger, collect: Callable[[Stores], float]) -> Activations:
        """Return what is collected. collect: puts vectors into the stores, and returns the seconds of the passes."""
        starts = first_vectors(rows, self.pooling)
        by_token, folder = self.pooling is None, None if self.output is None else self.output.parent
        with ExitStack() as files:
            names = dict.fromkeys(map(str, self.layers))
            stores = {name: files.enter_context(VectorStore(int(starts[-1]), folder=folder)) for name in names}
            seconds = collect(stores)
            by_layer, ledger_file = {}, None
            if self.output is None:
                by_layer = _held(stores, starts, by_token=by_token)
            else:
                columns = dict(zip(self.columns or stores, stores.values(), strict=True))
                ledger_file = _write(self.output, columns, rows.keys, starts, ledger, by_token=by_token)
            return Activations(
                rows=rows.keys,
                num_tokens=rows.lengths,
                widths={name: store.width for name, store in stores.items()},
                by_layer=by_layer,
                output=self.output,
                ledger=ledger_file,
                seconds=seconds,
            )


def check_pooling(name: str | None) -> Pooling:
    """Return the pooling that a person typed; "none" is None. Raises InputError for one that does not exist."""
    known: dict[str | None, Pooling] = {"mean": "mean", "last": "last", "none": None, None: None}
    if name not in known:
        raise InputError(what=f"there is no pooling {name!r}", expected="mean, last or none")
    return known[name]


def check_output(path: Path) -> None:
    """Raise OutputError, before any work is done, for a file that cannot be written or exists already."""
    if path.suffix != PARQUET:
        raise OutputError(
            what="vectors are written as parquet alone",
            where=str(path),
            expected=PARQUET,
            fix="name the file embeddings.parquet, say",
        )
    require_writable(path)
    require_free(path)
    require_free(ledger_path(path))


def _prompts(session: Session, data: Data, *, split: str) -> tuple[TokenRows, Ledger, Sequence[str]]:
    """Return prompts of at least one token that the context holds, the ledger of the others, and notes."""
    source, config = read(data), session.config
    if LABELS in (config.prompt.template or ""):
        config, _ = with_labels_of_data(config, source)
    found = prompts_of(source, config, session.encoder, only=split, context_length=session.folder.context_length)
    is_empty = found.rows.lengths == 0
    problem = Problem(what="the prompt is empty", expected="at least one token", fix="fill or remove the row")
    faults = RowFaults(locate=source.locate, problems=dict.fromkeys(found.rows.keys[is_empty].tolist(), problem))
    entries = faults.settle(
        config.preprocessing.on_bad_row, num_rows=len(found.rows), name=source.name, split_of=lambda key: split
    )
    rows = found.rows.take(np.flatnonzero(~is_empty))
    require_rows(rows, split, source)
    return rows, found.ledger.with_more(entries), found.notes


def _held(stores: Stores, starts: Integers, *, by_token: bool) -> dict[str, Any]:
    every = {name: store.read(0, int(starts[-1])) for name, store in stores.items()}
    return {name: np.split(vectors, starts[1:-1]) for name, vectors in every.items()} if by_token else every


def _write(
    output: Path, columns: Stores, keys: Integers, starts: Integers, ledger: Ledger, *, by_token: bool
) -> Path | None:
    """Write the ledger and then the vectors, which are never there without it. Return the ledger's path."""
    beside = write_ledger(ledger, output)
    try:
        with whole_file(output) as temporary:
            _write_blocks(temporary, columns, keys, starts, by_token=by_token)
    except BaseException as error:
        if beside is not None:
            beside.unlink()
        if isinstance(error, OSError):
            raise WriteError(
                what=f"the output cannot be written: {error.strerror or error}",
                where=str(output),
                fix="free disk space, or name a file on a larger disk",
            ) from error
        raise
    return beside


def _write_blocks(path: Path, columns: Stores, keys: Integers, starts: Integers, *, by_token: bool) -> None:
    kinds = {name: pa.list_(pa.float32(), store.width) for name, store in columns.items()}
    schema = pa.schema(
        [(ROW, pa.int64()), *((name, pa.list_(kind) if by_token else kind) for name, kind in kinds.items())]
    )
    most_vectors = max(1, _BLOCK_BYTES // (4 * max(store.width for store in columns.values())))
    with pq.ParquetWriter(path, schema, use_dictionary=False) as writer:
        for first, end in _blocks(starts, most_vectors):
            offsets = pa.array((starts[first : end + 1] - starts[first]).astype(np.int32))
            arrays: list[pa.Array] = [pa.array(keys[first:end])]
            for name, store in columns.items():
                values = store.read(int(starts[first]), int(starts[end]))
                vectors = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), type=kinds[name])
                arrays.append(pa.ListArray.from_arrays(offsets, vectors) if by_token else vectors)
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _blocks(starts: Integers, most_vectors: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows with at most so many vectors, or of one row."""
    first, num_rows = 0, len(starts) - 1
    while first < num_rows:
        end = int(np.searchsorted(starts, starts[first] + most_vectors, side="right")) - 1
        yield first, max(first + 1, min(end, num_rows))
        first = max(first + 1, min(end, num_rows))
