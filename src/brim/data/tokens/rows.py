"""Hold token rows, what the model sees of each source row, over an Arrow table that may lie on disk.

`collate` makes padded tensors of them; targets go by position, so the padding token may equal EOS. The order in which
a run sees its rows is a pure function of the seed and of the samples consumed so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from brim.models.packing import PackedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Hold rows to learn from, padded on the right or packed. B rows, T tokens of the longest, S supervised tokens.

    There is no attention mask: with causal attention a token sees only what is before it, and padding comes last.
    Where the targets are is computed here, on the CPU, so that nobody waits for a GPU.
    Packed rows are one sequence, in which the last row fills it up: B is 1, T its tokens.
    """

    input_ids: torch.Tensor  # [B, T] int64
    targets: torch.Tensor  # [S] int64: the supervised tokens
    target_rows: torch.Tensor  # [S] int64: the row of each
    logit_positions: torch.Tensor  # [S] int64: which of the B × num_logits positions predicts each
    num_logits: int  # logits are needed at this many positions, the last ones: before them, all rows are prompt
    packed: PackedRows | None = None  # None: padded

    @property
    def num_rows(self) -> int:
        return self.packed.num_rows if self.packed else self.input_ids.shape[0]

    def to(self, device: torch.device) -> Batch:
        if self.input_ids.device == device:
            return self
        return Batch(
            input_ids=_move(self.input_ids, device),
            targets=_move(self.targets, device),
            target_rows=_move(self.target_rows, device),
            logit_positions=_move(self.logit_positions, device),
            num_logits=self.num_logits,
            packed=self.packed
            and replace(
                self.packed,
                position_ids=_move(self.packed.position_ids, device),
                bounds=_move(self.packed.bounds, device),
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """Hold left-padded prompts to continue. B rows, T tokens of the longest."""

    input_ids: torch.Tensor  # [B, T] int64
    attention_mask: torch.Tensor  # [B, T] int64; 1 on the prompt

    def to(self, device: torch.device) -> PromptBatch:
        return PromptBatch(input_ids=_move(self.input_ids, device), attention_mask=_move(self.attention_mask, device))


def collate(rows: Iterable[TokenRow], *, pad_id: int) -> Batch:
    """Pad rows on the right to the longest. A row's first token has nothing before it and is never a target."""
    import torch  # here, since `brim check` needs the rest of this file alone

    rows = list(rows)
    longest = max([len(row.input_ids) for row in rows], default=0)
    input_ids = np.full((len(rows), longest), pad_id, dtype=np.int64)
    supervised = np.zeros(input_ids.shape, dtype=np.bool_)
    for number, row in enumerate(rows):
        length = len(row.input_ids)
        input_ids[number, :length] = row.input_ids
        supervised[number, 1:length] = row.supervised[1:]
    places = np.flatnonzero(supervised)
    target_rows, target_columns = np.divmod(places, longest)
    first = int(target_columns.min()) - 1 if len(places) else 0  # a token is predicted at the position before it
    num_logits = longest - first
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        targets=torch.from_numpy(input_ids.take(places)),
        target_rows=torch.from_numpy(target_rows),
        logit_positions=torch.from_numpy(target_rows * num_logits + target_columns - (1 + first)),
        num_logits=num_logits,
    )


def pack(rows: Iterable[TokenRow], *, pad_id: int) -> Batch:
    """Put rows behind one another, as one sequence that is filled up to a multiple of `MULTIPLE` tokens."""
    import torch

    from brim.batching import MULTIPLE
    from brim.models.packing import packed_rows

    rows = list(rows)
    lengths = [len(row.input_ids) for row in rows]
    filling = -sum(lengths) % MULTIPLE
    input_ids = np.concatenate([*(row.input_ids for row in rows), np.full(filling, pad_id)]).astype(np.int64)
    supervised = np.concatenate([*(row.supervised for row in rows), np.zeros(filling, dtype=np.bool_)])
    begins = np.cumsum([0, *lengths[:-1]])
    supervised[begins] = False  # a row's first token has nothing before it
    places = np.flatnonzero(supervised)
    first = int(places[0]) - 1 if len(places) else 0
    return Batch(
        input_ids=torch.from_numpy(input_ids[None]),
        targets=torch.from_numpy(input_ids[places]),
        target_rows=torch.from_numpy(np.searchsorted(begins, places, side="right") - 1),
        logit_positions=torch.from_numpy(places - (1 + first)),
        num_logits=len(input_ids) - first,
        packed=packed_rows(lengths, filling=filling),
    )


def collate_prompts(rows: Iterable[TokenRow], *, pad_id: int) -> PromptBatch:
    """Pad the tokens of each row before its first supervised one, on the left, to the longest."""
    import torch

    prompts = [row.input_ids[: row.num_prompt_tokens] for row in rows]
    longest = max((len(prompt) for prompt in prompts), default=0)
    input_ids = np.full((len(prompts), longest), pad_id, dtype=np.int64)
    attention_mask = np.zeros_like(input_ids)
    for number, prompt in enumerate(prompts):
        start = longest - len(prompt)
        input_ids[number, start:] = prompt
        attention_mask[number, start:] = 1
    return PromptBatch(input_ids=torch.from_numpy(input_ids), attention_mask=torch.from_numpy(attention_mask))


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to the device; a CUDA stream does it by itself while the CPU goes on."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def rows_of_step(*, num_rows: int, seed: int, consumed_samples: int, size: int) -> tuple[int, npt.NDArray[np.int64]]:
    """Return the epoch and the rows (positions, in order) of the next effective batch.

    Each epoch is a permutation of all rows, drawn from (seed, epoch). A batch never crosses an epoch's end: the last
    one of an epoch may hold fewer than `size` rows.
    """
    assert num_rows > 0, "no rows have no order"
    assert size > 0, "a batch holds at least one row"
    epoch, start = divmod(consumed_samples, num_rows)
    return epoch, _epoch_order(num_rows, seed, epoch)[start : start + size]


def random_order(num_rows: int, *entropy: int) -> npt.NDArray[np.int64]:
    """Draw a permutation from these numbers; it is the same with every version of numpy.

    The raw stream of PCG64 and SeedSequence are promised never to change, numpy's own `permutation` is not.
    """
    keys = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(num_rows)
    return np.argsort(np.asarray(keys, dtype=np.uint64), kind="stable").astype(np.int64)


@lru_cache(maxsize=2)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    order = random_order(num_rows, seed, epoch)
    order.setflags(write=False)
    return order


_BATCH_ROWS = 1024
_COLUMNS = ["key", "input_ids", "supervised"]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """Hold one row: `supervised[t]` says that token t is a target of the loss."""

    key: int  # 0-based row number in the source
    input_ids: npt.NDArray[np.int32]  # [T]
    supervised: npt.NDArray[np.bool_]  # [T]

    @property
    def num_supervised(self) -> int:
        """Count the targets that the loss sees; the first token has nothing before it to be predicted from."""
        return int(np.count_nonzero(self.supervised[1:]))

    @property
    def num_prompt_tokens(self) -> int:
        """Count the tokens before the first target; all where there is none."""
        return int(self.supervised.argmax()) if self.supervised.any() else len(self.supervised)

    def prompt(self) -> TokenRow:
        """Return the tokens before the first target."""
        return self.first(self.num_prompt_tokens)

    def first(self, num_tokens: int) -> TokenRow:
        """Return the row with its first tokens only."""
        return TokenRow(key=self.key, input_ids=self.input_ids[:num_tokens], supervised=self.supervised[:num_tokens])

    def last(self, num_tokens: int, *, after: int | None) -> TokenRow:
        """Return the row with its last tokens only.

        A row that begins with the token `after` keeps it in front, and it counts among them.
        """
        if len(self.input_ids) <= num_tokens:
            return self
        kept = np.arange(len(self.input_ids) - num_tokens, len(self.input_ids))
        if self.input_ids[0] == after:
            kept[0] = 0
        return TokenRow(key=self.key, input_ids=self.input_ids[kept], supervised=self.supervised[kept])


class TokenRows(Sequence[TokenRow]):
    """Hold rows of a table as `from_blocks` makes it, in a given order; a row is read when it is asked for.

    table: its buffers may be memory-mapped. indices: positions in the table; all of them in order by default.
    """

    def __init__(self, table: pa.Table, indices: npt.ArrayLike | None = None) -> None:
        self._table = table.select(_COLUMNS)
        self._chunks = [_Chunk(batch) for batch in self._table.to_batches() if batch.num_rows]
        self._places, self._all_keys = _places(self._chunks), _joined([chunk.keys for chunk in self._chunks])
        given = np.arange(table.num_rows) if indices is None else np.asarray(indices)
        self._indices: Integers = given.astype(np.int64)

    @classmethod
    def from_blocks(cls, blocks: Iterable[Sequence[TokenRow]]) -> TokenRows:
        """Return the rows of all blocks, on disk where they are many."""
        import pyarrow as pa  # here, since a prediction of memory imports this module and reads no rows

        from brim.data.read import gather

        types = (pa.int64(), pa.list_(pa.int32()), pa.list_(pa.bool_()))
        schema = pa.schema(list(zip(_COLUMNS, types, strict=True)))
        return cls(gather((_record_batch(rows, schema) for rows in blocks), schema=schema))

    @classmethod
    def from_rows(cls, rows: Iterable[TokenRow]) -> TokenRows:
        """Return a small set of rows."""
        return cls.from_blocks([list(rows)])

    def save(self, folder: Path) -> None:
        """Write the rows into a folder that is there, for `mapped`. Rows of one table share its file."""
        import pyarrow as pa

        table, name = folder / f"{id(self._table)}.arrow", folder / f"{len(list(folder.glob('*.npz')))}.npz"
        if not table.exists():
            with pa.ipc.new_file(table, self._table.schema) as file:
                file.write_table(self._table)
        np.savez(name, indices=self._indices, table=table.name)

    @classmethod
    def mapped(cls, folder: Path) -> list[TokenRows]:
        """Return what was saved there, in that order, over memory-mapped files, which may then be removed."""
        import pyarrow as pa

        tables = {path.name: pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in folder.glob("*.arrow")}
        files = sorted(folder.glob("*.npz"), key=lambda path: int(path.stem))
        return [cls(tables[str(saved["table"])], saved["indices"]) for saved in map(np.load, files)]

    def to_bytes(self) -> bytes:
        """Return the rows as `of_bytes` reads them in another process."""
        import pyarrow as pa

        batches = [batch for batch in self._table.to_batches() if batch.num_rows]  # pyarrow would join all of them
        firsts, chunks = np.cumsum([0, *(batch.num_rows for batch in batches)]), self._places[self._indices, 0]
        inside = ((batches[kind], self._indices[chunks == kind] - firsts[kind]) for kind in np.unique(chunks).tolist())
        table = pa.Table.from_batches([batch.take(pa.array(rows)) for batch, rows in inside], self._table.schema)
        table = table.combine_chunks().take(pa.array(np.argsort(np.argsort(chunks, kind="stable"))))
        table, text = table.set_column(0, "key", pa.array(self.keys)), pa.BufferOutputStream()
        with pa.ipc.new_stream(text, table.schema) as stream:
            stream.write_table(table)
        return bytes(text.getvalue())

    @classmethod
    def of_bytes(cls, text: bytes) -> TokenRows:
        """Return the rows of `to_bytes`, over that memory."""
        import pyarrow as pa

        return cls(pa.ipc.open_stream(text).read_all())

    @classmethod
    def of_lengths(cls, lengths: npt.ArrayLike) -> TokenRows:
        """Return rows of which nothing but the lengths is known, for plans of data that are not there yet.

        lengths: tokens of each row; all but the first are supervised.
        """
        return _MadeUp(lengths)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, position: Any) -> Any:
        if isinstance(position, slice):
            return self.take(np.arange(len(self))[position])
        return next(self._read([position]))

    def __iter__(self) -> Iterator[TokenRow]:
        for start in range(0, len(self), _BATCH_ROWS):
            yield from self._read(slice(start, start + _BATCH_ROWS))

    def take(self, indices: npt.ArrayLike) -> TokenRows:
        """Return these positions, in this order, as rows over the same table."""
        taken = object.__new__(TokenRows)
        taken._table, taken._chunks = self._table, self._chunks
        taken._places, taken._all_keys = self._places, self._all_keys
        taken._indices = self._indices[np.asarray(indices, dtype=np.int64)]
        return taken

    def prompts(self) -> TokenRows:
        """Return what stands before the first target of each row, as rows to be continued."""
        return self._changed(TokenRow.prompt)

    def cut_to(self, num_tokens: int) -> TokenRows:
        """Return the same rows with their first tokens only."""
        return self._changed(lambda row: row.first(num_tokens))

    def cut_to_last(self, num_tokens: int, *, after: int | None) -> TokenRows:
        """Return the same rows with their last tokens only; see TokenRow.last."""
        return self._changed(lambda row: row.last(num_tokens, after=after))

    def with_keys(self, keys: npt.NDArray[np.uint64]) -> TokenRows:
        """Return the same rows under other keys."""
        return _Renamed(self, keys.astype(np.int64))

    @cached_property
    def keys(self) -> Integers:
        """Return the source row number of each row."""
        return self._all_keys[self._indices]

    @cached_property
    def lengths(self) -> Integers:
        """Count the tokens of each row."""
        return np.asarray(self._places[self._indices, 2], dtype=np.int64)

    @cached_property
    def num_supervised(self) -> Integers:
        """Count the targets of each row that the loss sees (the first token never is one)."""
        return _joined([chunk.num_supervised() for chunk in self._chunks])[self._indices]

    @cached_property
    def num_prompt_tokens(self) -> Integers:
        """Count the tokens before the first target of each row."""
        return _joined([chunk.num_prompt_tokens() for chunk in self._chunks])[self._indices]

    def _read(self, positions: slice | list[int]) -> Iterator[TokenRow]:
        """Yield these rows, read together: one by one they take twice as long."""
        indices = self._indices[positions]
        places = self._places[indices].tolist()
        bits = [self._chunks[chunk].bits[first // 8 : (first + length + 7) // 8] for chunk, _, length, first in places]
        supervised = np.unpackbits(np.concatenate(bits), bitorder="little").view(np.bool_)
        done = 0
        for key, (chunk, begin, length, first) in zip(self._all_keys[indices].tolist(), places, strict=True):
            ids, start = self._chunks[chunk].ids, done + first % 8
            end = start + length
            yield TokenRow(key=key, input_ids=ids[begin : begin + length], supervised=supervised[start:end])
            done = (end + 7) // 8 * 8

    def _changed(self, changed: Callable[[TokenRow], TokenRow]) -> TokenRows:
        starts = range(0, len(self), _BATCH_ROWS)
        return self.from_blocks([changed(row) for row in self[start : start + _BATCH_ROWS]] for start in starts)


def _joined(parts: Sequence[Integers]) -> Integers:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


class _Renamed(TokenRows):
    """Give rows other keys."""

    def __init__(self, rows: TokenRows, keys: Integers) -> None:
        self.__dict__.update(rows.__dict__)
        self.keys = keys

    def _read(self, positions: slice | list[int]) -> Iterator[TokenRow]:
        for row, key in zip(super()._read(positions), self.keys[positions].tolist(), strict=True):
            yield replace(row, key=key)

    def take(self, indices: npt.ArrayLike) -> TokenRows:
        return _Renamed(super().take(indices), self.keys[np.asarray(indices, dtype=np.int64)])


class _MadeUp(TokenRows):
    """Hold rows without tokens."""

    def __init__(self, lengths: npt.ArrayLike) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self._indices = self.keys = np.arange(len(self.lengths))
        self.num_supervised = np.maximum(self.lengths - 1, 0)
        self.num_prompt_tokens = np.minimum(self.lengths, 1)

    def __getitem__(self, position: Any) -> Any:
        raise TypeError("rows that are made up hold no tokens")


def _record_batch(rows: Sequence[TokenRow], schema: pa.Schema) -> pa.RecordBatch:
    """Return rows as one record batch."""
    import pyarrow as pa

    offsets = pa.array(np.concatenate([[0], np.cumsum([len(row.input_ids) for row in rows])]).astype(np.int32))
    ids = np.concatenate([row.input_ids for row in rows]) if rows else np.zeros(0)
    supervised = np.concatenate([row.supervised for row in rows]) if rows else np.zeros(0)
    columns = [
        pa.array(np.asarray([row.key for row in rows], dtype=np.int64)),
        pa.ListArray.from_arrays(offsets, pa.array(ids.astype(np.int32))),
        pa.ListArray.from_arrays(offsets, pa.array(supervised.astype(bool))),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


class _Chunk:
    """Hold one record batch, with views of its buffers that cost nothing to slice."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        keys, ids, supervised = batch.columns
        self.keys = keys.to_numpy()
        self.offsets = ids.offsets.to_numpy()
        self.ids = ids.values.to_numpy()
        self._supervised = supervised.values
        self._supervised_offsets = supervised.offsets.to_numpy()
        self.bits = np.frombuffer(self._supervised.buffers()[1] or b"", dtype=np.uint8)
        self.first_bits = self._supervised_offsets[:-1] + self._supervised.offset  # of what is supervised

    def num_supervised(self) -> Integers:
        marks = self._supervised.to_numpy(zero_copy_only=False)
        before = np.concatenate([[0], np.cumsum(marks, dtype=np.int64)])
        starts, ends = self._supervised_offsets[:-1], self._supervised_offsets[1:]
        firsts = np.minimum(starts + 1, ends)
        return np.asarray(before[ends] - before[firsts], dtype=np.int64)

    def num_prompt_tokens(self) -> Integers:
        marks = np.flatnonzero(self._supervised.to_numpy(zero_copy_only=False))
        starts, ends = self._supervised_offsets[:-1], self._supervised_offsets[1:]
        firsts = np.append(marks, ends[-1])[np.searchsorted(marks, starts)]
        return np.asarray(np.minimum(firsts, ends) - starts, dtype=np.int64)


def _places(chunks: Sequence[_Chunk]) -> npt.NDArray[np.int32]:
    """Return of each row [rows, 4] its chunk, and in that its first token, its tokens and its first bit."""
    columns = [
        np.stack([np.full(len(chunk.keys), number), chunk.offsets[:-1], np.diff(chunk.offsets), chunk.first_bits])
        for number, chunk in enumerate(chunks)
    ]
    return np.ascontiguousarray(np.concatenate([np.zeros((4, 0)), *columns], axis=1).T, dtype=np.int32)
