"""Draw examples for each row at random from the training split, by the seed and the row's input alone.

The pool holds the rows that may stand in a prompt as examples: those of the training split, the first of each input,
with answers. Their texts lie in an Arrow table, on disk where they are many; a digest of each input stays in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brim.config.prompts import prompt_columns
from brim.config.schema import Config
from brim.data.read import Source, blocks, gather
from brim.data.split import answer_column, input_columns
from brim.data.usable import Column, assign_splits, require_filled, sampled_rows, usable, with_usable_splits
from brim.errors import DataError
from brim.units import format_count

_RETRIEVAL = 4  # ends the entropy, so that the draws of one seed do not repeat those of splits, samples and epochs


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomExamples:
    """Draw examples from a pool by chance.

    Neither state nor the row's number matters: a row has the same examples wherever it stands in the data.
    """

    num_pooled: int
    num_examples: int
    seed: int

    def choose(self, inputs: Sequence[str], own: Positions) -> Positions:
        """Return positions [B, k] in the pool: distinct ones for each row, and never its own.

        own: the row's own position, NONE where it is not in the pool.
        """
        rows = zip(digests_of(inputs).tolist(), own.tolist(), strict=True)
        return np.array([self._drawn(*row) for row in rows], np.int64).reshape(len(inputs), self.num_examples)

    def _drawn(self, digest: int, own: int) -> list[int]:
        if own == NONE:
            return drawn(self.num_pooled, self.num_examples, self.seed, digest, _RETRIEVAL)
        others = drawn(self.num_pooled - 1, self.num_examples, self.seed, digest, _RETRIEVAL)
        return [position + (position >= own) for position in others]


def drawn(population: int, size: int, *entropy: int) -> list[int]:
    """Draw `size` different numbers below `population`, in a random order, with these numbers as entropy.

    The first steps of a Fisher-Yates shuffle, of which only what was moved is kept. A remainder of 64 random bits
    favours no number by more than population / 2^64.
    """
    assert size <= population, "a pool has at least as many examples as are drawn"
    bits = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(size).tolist()
    moved: dict[int, int] = {}
    picked = []
    for step, random in enumerate(bits):
        at = step + random % (population - step)
        picked.append(moved.get(at, at))
        moved[at] = moved.get(step, step)
    return picked


NONE = -1  # the position of an input that is not in the pool


_SCHEMA = pa.schema([("input", pa.large_string()), ("example", pa.large_string())])


Positions = npt.NDArray[np.int64]


class ExamplePool:
    """Examples by position, 0 to len - 1, in the order of their rows; no two have the same input.

    table: columns `input` (the text that inputs are compared by) and `example` (the row as text).
    num_unknown: training rows that are not examples, since their answer is not a label of the category.
    """

    def __init__(self, table: pa.Table, *, num_unknown: int = 0) -> None:
        self.num_unknown, self.num_bytes = num_unknown, int(table.nbytes)
        self._inputs, self._examples = table["input"], table["example"]
        digests = np.concatenate([np.zeros(0, np.uint64), *map(digests_of, self.inputs())])
        self._order = np.argsort(digests, kind="stable")
        self._digests = digests[self._order]

    def __len__(self) -> int:
        return len(self._digests)

    def inputs(self) -> Iterator[list[str]]:
        """Give the inputs of all examples, in their order, a batch at a time."""
        for chunk in self._inputs.chunks:
            if len(chunk):
                yield chunk.to_pylist()

    def positions_of(self, inputs: Sequence[str]) -> Positions:
        """Return the position of the example with this very input; NONE where there is none."""
        digests = digests_of(inputs)
        at = np.minimum(np.searchsorted(self._digests, digests), len(self) - 1)
        return np.where(self._digests[at] == digests, self._order[at], NONE).astype(np.int64)

    def context(self, positions: Sequence[int]) -> str:
        """Write these examples, in this order, as they stand in a prompt: as Python writes a list of dicts."""
        return f"[{', '.join(self._examples[position].as_py() for position in positions)}]"


def example_pool(config: Config, source: Source) -> ExamplePool:
    """Return the examples of a configuration's training split.

    Raises DataError: missing columns, missing cells whose strategy is `error`, an unusable split column, no rows.
    """
    fields = _fields(config)
    keys, source = _training_rows(config, source, fields)
    num_rows = len(keys)
    keys = _with_known_label(config.output_features[0].labels, fields.answer, source, keys)
    digests = np.concatenate([np.zeros(0, np.uint64), *_input_digests(fields, source, keys)])
    first = np.sort(np.unique(digests, return_index=True)[1])  # the first row of each input
    table = gather(_batches(fields, source, keys[first]), schema=_SCHEMA)
    pool = ExamplePool(table, num_unknown=num_rows - len(keys))
    num_examples = config.prompt.num_examples
    if len(pool) < num_examples:
        raise DataError(
            what=f"the training split has {len(pool):,} different inputs, and prompt.retrieval.k asks for "
            f"{format_count(num_examples, 'example')}",
            where=source.name,
            fix="lower prompt.retrieval.k, or look at preprocessing.split",
        )
    return pool


def digests_of(texts: Sequence[str]) -> npt.NDArray[np.uint64]:
    """Return 64 bits of each text: among a million texts, two different ones collide with a probability of 3e-8."""
    whole = b"".join(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts)
    return np.frombuffer(whole, dtype="<u8")


def input_texts(cells: Mapping[str, list[str]], columns: Iterable[str]) -> list[str]:
    """Return the text by which each row's input is compared: its column, or its columns line by line."""
    return ["\n".join(values) for values in zip(*(cells[name] for name in columns), strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fields:
    """Name what an example shows of a row: the columns that the prompt reads, and the answer."""

    inputs: tuple[Column, ...]
    answer: Column
    names: tuple[str, ...]  # as they are called in the example

    @property
    def columns(self) -> tuple[Column, ...]:
        return (*self.inputs, self.answer)


def _fields(config: Config) -> _Fields:
    target = config.output_features[0]
    columns, named = prompt_columns(config), {each.column_name: each.name for each in config.input_features}
    return _Fields(
        inputs=input_columns(config, columns),
        answer=answer_column(target),
        names=(*(named.get(name, name) for name in columns), target.name),
    )


def _training_rows(config: Config, source: Source, fields: _Fields) -> tuple[Positions, Source]:
    """Return the keys of the training rows, without those that lack a value in a column whose strategy is drop_row."""
    names = [column.name for column in fields.columns]
    source.require_columns({column.name: column.feature for column in fields.columns})
    policy, seed = config.preprocessing, config.random_seed
    source = with_usable_splits(usable(source, names, policy), policy)
    source.require_text(names)
    keys = sampled_rows(source, policy, seed=seed)
    codes, _ = assign_splits(source, policy, keys, seed=seed)
    keys = keys[codes == 0]
    require_filled(source, fields.columns, keys)
    for column in fields.columns:
        if column.missing_value_strategy == "drop_row":
            keys = keys[~source.missing(column.name, is_label=column.is_label)[keys]]
    return keys, source


def _with_known_label(labels: Sequence[str], answer: Column, source: Source, keys: Positions) -> Positions:
    """Return the rows whose answer is one of the labels; all rows where there are no labels."""
    if not labels:
        return keys
    known = frozenset(labels)
    kept = [np.zeros(0, np.int64)]
    for block_keys, block in blocks(source.table.select([answer.name]), keys):
        kept.append(block_keys[[text.strip() in known for text in answer.texts(block)]])
    return np.concatenate(kept)


def _input_digests(fields: _Fields, source: Source, keys: Positions) -> Iterator[npt.NDArray[np.uint64]]:
    names = [column.name for column in fields.inputs]
    for _, block in blocks(source.table.select(names), keys):
        cells = {column.name: column.texts(block) for column in fields.inputs}
        yield digests_of(input_texts(cells, names))


def _batches(fields: _Fields, source: Source, keys: Positions) -> Iterator[pa.RecordBatch]:
    inputs = [column.name for column in fields.inputs]
    for _, block in blocks(source.table.select(list(dict.fromkeys([*inputs, fields.answer.name]))), keys):
        cells = {column.name: column.texts(block) for column in fields.columns}
        values = [_values(block[column.name], cells[column.name]) for column in fields.columns]
        examples = [repr(dict(zip(fields.names, row, strict=True))) for row in zip(*values, strict=True)]
        columns = [pa.array(texts, pa.large_string()) for texts in (input_texts(cells, inputs), examples)]
        yield pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


def _values(column: pa.ChunkedArray, texts: list[str]) -> list[object]:
    """Return numbers and truth values as such, all else as text."""
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_float64(kind)):
        return list(texts)
    values = zip(column.to_pylist(), texts, strict=True)
    return [text if value is None or value != value else value for value, text in values]
