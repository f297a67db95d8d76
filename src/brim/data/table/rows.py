"""Hold rows of a table: their texts as tokens, and numbers, categories, targets and weights beside them.

All lie in Arrow tables that may be on disk. `batch` makes the tensors of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brim.data.read import gather
from brim.data.table.cells import Floats, Keys
from brim.data.table.columns import TableColumn, TableColumns
from brim.data.tokens import TokenRows, collate, pack

if TYPE_CHECKING:
    import torch

    from brim.models.packing import PackedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class TableBatch:
    """Hold rows to learn from. B rows of C texts; T tokens of the longest; F numbers; G dense categories; O outputs."""

    input_ids: torch.Tensor  # [B·C, T] int64, row by row; packed: [1, all]
    mask: torch.Tensor | None  # [B·C, T] bool, where the encoder sees both sides; None: causal, or packed
    last: torch.Tensor  # [B·C] int64: where each text's last token is in its sequence
    vectors: torch.Tensor  # [B, W] float32: what caches hold; W is 0 without one
    numbers: torch.Tensor  # [B, F] float32, normalised; binaries and one-hot categories among them
    categories: torch.Tensor  # [B, G] int64; 0 is unknown
    targets: torch.Tensor  # [B, O] float32, a class by its number; 0 where there is none
    weights: torch.Tensor  # [B, O] float64; 0: there is no value
    packed: PackedRows | None = None

    @property
    def num_rows(self) -> int:
        return self.targets.shape[0]

    def to(self, device: torch.device) -> TableBatch:
        """Copy to the device; a CUDA stream does it by itself while the CPU goes on."""
        if self.targets.device == device:
            return self

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

        moved = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("mask", "packed")}
        return TableBatch(
            **{name: move(tensor) for name, tensor in moved.items()},
            mask=None if self.mask is None else move(self.mask),
            packed=self.packed
            and replace(self.packed, position_ids=move(self.packed.position_ids), bounds=move(self.packed.bounds)),
        )


class TableRows:
    """Hold N rows in a given order, over the tokens of their texts and a table of their cells.

    columns: what the cells mean. texts: [N·C], row by row; empty where there are none. cells: a table of one column,
    lists of W numbers: key, inputs, targets, weights. is_packed: a row counts with all of its texts, not the longest.
    needs_mask: the encoder sees both sides.
    """

    def __init__(
        self,
        columns: TableColumns,
        texts: TokenRows,
        cells: pa.Table,
        indices: npt.ArrayLike | None = None,
        *,
        is_packed: bool = False,
        needs_mask: bool = False,
    ) -> None:
        self.columns, self.texts = columns, texts
        self.is_packed, self.needs_mask = is_packed, needs_mask
        self._table = cells
        width = cells.schema.field("cells").type.list_size
        chunks = [chunk for chunk in cells["cells"].chunks if len(chunk)]
        self._chunks: list[Floats] = [chunk.flatten().to_numpy().reshape(-1, width) for chunk in chunks]
        self._starts = np.cumsum([0, *map(len, self._chunks)])[:-1]
        self._width = width
        given = np.arange(cells.num_rows) if indices is None else np.asarray(indices)
        self._indices: Keys = given.astype(np.int64)

    @classmethod
    def from_blocks(cls, columns: TableColumns, texts: TokenRows, blocks: Iterable[Floats]) -> TableRows:
        """Return the rows of all blocks [rows, W], on disk where they are many."""
        width = 1 + len(columns.inputs) + 2 * len(columns.outputs)
        schema = pa.schema([("cells", pa.list_(pa.float64(), width))])

        def batches() -> Iterable[pa.RecordBatch]:
            for block in blocks:
                flat = pa.array(np.ascontiguousarray(block, dtype=np.float64).ravel())
                yield pa.RecordBatch.from_arrays([pa.FixedSizeListArray.from_arrays(flat, width)], schema=schema)

        return cls(columns, texts, gather(batches(), schema=schema))

    def __len__(self) -> int:
        return len(self._indices)

    def take(self, positions: npt.ArrayLike) -> TableRows:
        """Return these positions, in this order, as rows over the same tables."""
        at = np.asarray(positions, dtype=np.int64)
        num_texts = self.columns.num_texts
        texts = self.texts.take((at[:, None] * num_texts + np.arange(num_texts)).ravel())
        return self._changed(texts=texts, indices=self._indices[at])

    def read_by(self, *, is_packed: bool, needs_mask: bool) -> TableRows:
        """Return the same rows as an encoder reads them: packed or padded, with or without a mask."""
        return self._changed(is_packed=is_packed, needs_mask=needs_mask)

    def without_texts(self) -> TableRows:
        """Return the same rows without tokens, for those whose texts are read from a cache; each has the length 1."""
        return self._changed(columns=replace(self.columns, num_texts=0), texts=self.texts.take([]))

    @cached_property
    def keys(self) -> Keys:
        """Return the source row number of each row [N]."""
        return self._read([0])[:, 0].astype(np.int64)

    @cached_property
    def weights(self) -> Floats:
        """Return what each row adds to each output's divisor [N, O]; 0: it has no value there."""
        return self._read(list(range(self._width - len(self.columns.outputs), self._width)))

    @cached_property
    def lengths(self) -> Keys:
        """Count the tokens by which rows are cut [N]: of a row's longest text, or of all where they are packed."""
        if not self.columns.num_texts:
            return np.ones(len(self), dtype=np.int64)
        lengths = self.texts.lengths.reshape(len(self), self.columns.num_texts)
        return np.asarray(lengths.sum(axis=1) if self.is_packed else lengths.max(axis=1), dtype=np.int64)

    def batch(self, *, pad_id: int, is_packed: bool) -> TableBatch:
        """Return all rows as tensors; texts are padded on the right, or packed."""
        import torch  # here, since `brim check` makes no tensors

        joined = (pack if is_packed and len(self.texts) else collate)(self.texts, pad_id=pad_id)
        lengths = self.texts.lengths
        last = np.cumsum(lengths) - 1 if joined.packed else lengths - 1
        mask = np.arange(joined.input_ids.shape[1]) < lengths[:, None]
        cells = self._read(list(range(self._width)))
        num_inputs, num_outputs = len(self.columns.inputs), len(self.columns.outputs)
        inputs, targets, weights = np.split(cells[:, 1:], [num_inputs, num_inputs + num_outputs], axis=1)
        are_dense = [_is_dense(column) for column in self.columns.inputs]
        wide = [_numbers(each, inputs[:, at]) for at, each in enumerate(self.columns.inputs) if not are_dense[at]]
        numbers = np.concatenate([np.zeros((len(self), 0)), *wide], axis=1).astype(np.float32)
        return TableBatch(
            input_ids=joined.input_ids,
            mask=torch.from_numpy(mask) if self.needs_mask and not joined.packed else None,
            last=torch.from_numpy(last),
            vectors=torch.zeros(len(self), 0),
            numbers=torch.from_numpy(numbers),
            categories=torch.from_numpy(inputs[:, np.asarray(are_dense, dtype=np.bool_)].astype(np.int64)),
            targets=torch.from_numpy(targets.astype(np.float32)),
            weights=torch.from_numpy(np.ascontiguousarray(weights)),
            packed=joined.packed,
        )

    def save(self, folder: Path) -> None:
        """Write the rows into a folder that is there, for `mapped`. Rows of one table share its files."""
        (folder / "texts").mkdir(exist_ok=True)
        self.texts.save(folder / "texts")
        table, name = folder / f"{id(self._table)}.arrow", folder / f"{len(list(folder.glob('*.npz')))}.npz"
        if not table.exists():
            with pa.ipc.new_file(table, self._table.schema) as file:
                file.write_table(self._table)
        self.columns.save(name.with_suffix(".json"))
        read_by = [self.is_packed, self.needs_mask]
        np.savez(name, indices=self._indices, table=table.name, read_by=read_by)

    @classmethod
    def mapped(cls, folder: Path) -> list[TableRows]:
        """Return what was saved there, in that order, over memory-mapped files, which may then be removed."""
        tables = {path.name: pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in folder.glob("*.arrow")}
        files = sorted(folder.glob("*.npz"), key=lambda path: int(path.stem))
        rows = []
        for path, texts in zip(files, TokenRows.mapped(folder / "texts"), strict=True):
            saved, columns = np.load(path), TableColumns.load(path.with_suffix(".json"))
            is_packed, needs_mask = saved["read_by"].tolist()
            cells = tables[str(saved["table"])]
            rows.append(cls(columns, texts, cells, saved["indices"], is_packed=is_packed, needs_mask=needs_mask))
        return rows

    def _read(self, columns: Sequence[int]) -> Floats:
        """Return these numbers of all rows [N, columns]."""
        cells = np.empty((len(self), len(columns)))
        chunks = np.searchsorted(self._starts, self._indices, side="right") - 1
        by_chunk = np.argsort(chunks, kind="stable")
        for rows in np.split(by_chunk, np.flatnonzero(np.diff(chunks[by_chunk])) + 1):
            if len(rows):
                number = int(chunks[rows[0]])
                cells[rows] = self._chunks[number][(self._indices[rows] - self._starts[number])[:, None], columns]
        return cells

    def _changed(
        self,
        *,
        columns: TableColumns | None = None,
        texts: TokenRows | None = None,
        indices: Keys | None = None,
        is_packed: bool | None = None,
        needs_mask: bool | None = None,
    ) -> TableRows:
        changed = object.__new__(TableRows)
        changed.columns, changed.texts = columns or self.columns, self.texts if texts is None else texts
        changed.is_packed = self.is_packed if is_packed is None else is_packed
        changed.needs_mask = self.needs_mask if needs_mask is None else needs_mask
        changed._table, changed._chunks = self._table, self._chunks
        changed._starts, changed._width = self._starts, self._width
        changed._indices = self._indices if indices is None else indices
        return changed


def _is_dense(column: TableColumn) -> bool:
    return column.type == "category" and column.encoder == "dense"


def _numbers(column: TableColumn, values: Floats) -> Floats:
    """Return a column's numbers [B, width]: one-hot for a category."""
    if column.type != "category":
        return values[:, None]
    return np.asarray(values[:, None] == np.arange(column.width), dtype=np.float64)
