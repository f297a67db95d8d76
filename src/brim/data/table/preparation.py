"""Turn a source and its features into rows of a table, with what its columns taught, a ledger and notes.

Rows are sampled and split first: what a column teaches comes from the training split, of rows that nothing else leaves
out. Cells that cannot be read are faults of their rows, and treated as preprocessing.on_bad_row says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from brim.config.schema import PreprocessingConfig
from brim.data.read import SPLITS, Entry, Ledger, RowFaults, Source, blocks, cell_texts
from brim.data.table.cells import LARGEST, Feature, Floats, Keys, Parsed, parse
from brim.data.table.columns import (
    TableColumn,
    TableColumns,
    bounded,
    column_notes,
    labels_of,
    learned,
    placed,
    positions,
    unfilled,
    unknown_label,
)
from brim.data.table.rows import TableRows
from brim.data.tokens import Findings, Limit, Limits, TextEncoder, Texts, TokenRow, TokenRows, tokenize
from brim.data.usable import (
    Column,
    assign_splits,
    bad_rows,
    bounded as bounded_texts,
    few_of,
    leaving_none_unasked,
    require_filled,
    require_fitting,
    sampled_rows,
    usable,
    with_usable_splits,
    without_missing,
    without_unusable,
)
from brim.errors import DataError, Problem, problems_of
from brim.notes import warning
from brim.units import format_count

Marks = npt.NDArray[np.bool_]


FULL = "full"  # the name of all rows together, where they are not split


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTable:
    """Hold rows by split (train, validation, test; each may be empty), what columns taught, the ledger and notes."""

    splits: dict[str, TableRows]
    columns: TableColumns
    ledger: Ledger
    notes: tuple[str, ...]
    num_spare: int = 0  # rows that may yet be left out by preprocessing.max_dropped_fraction


def prepare_table(
    source: Source,
    features: Sequence[Feature],
    encoder: TextEncoder | None,
    *,
    policy: PreprocessingConfig,
    seed: int,
    context_length: int | None = None,
    only: str | None = None,
    columns: TableColumns | None = None,
    with_outputs: bool = True,
) -> PreparedTable:
    """Sample, split, read, tokenize, learn from the training split, and normalise.

    encoder: for texts; None where there are none. only: a split to prepare alone, or "full" for every row.
    columns: what a run learned, for evaluation and prediction; None: it is learned here, which takes a training split.
    with_outputs: False for a prediction; then every row has to be usable, and the outputs' columns need not exist.
    Raises DataError: columns that are missing, hold nothing, one class or no numbers; unusable rows that are not to be
    left out; no rows to train on.
    """
    features = [feature for feature in features if with_outputs or not feature.is_output]
    policy = policy if with_outputs else leaving_none_unasked(policy)
    source = _with_columns(source, features, policy)
    keys, codes, notes = _assigned(source, policy, seed=seed, only=only, used=[feature.column for feature in features])
    num_all = len(keys) if with_outputs else 0
    if only not in (None, FULL):
        keys, codes = (each[codes == SPLITS.index(str(only))] for each in (keys, codes))
    names = np.full(source.table.num_rows, -1, dtype=np.int8)
    names[keys] = codes
    work = _Work(
        source=source,
        features=features,
        split_of=lambda key: only or SPLITS[names[key]],
        is_training=lambda rows: names[rows] == 0,
        ledger=Ledger(num_rows=len(keys) + len(source.faults)),
        faults=RowFaults(locate=source.locate),
        notes=[*source.notes, *source.notes_on_mixed([feature.column for feature in features]), *notes],
    )
    keys = work.without_missing(keys, is_new=columns is None)
    parsed = parse(source, work.cells, keys, work.faults)
    known = [work.labelled(parsed, at, columns) for at in range(len(work.cells))]
    texts, keys, num_spare = work.usable_texts(
        keys, encoder, policy, context_length=context_length, num_all=num_all + len(source.faults) if num_all else 0
    )
    if columns is None:
        _require_train(work.is_training(keys), source)
    known, keys = work.learned(parsed, known, keys, is_new=columns is None)
    found = TableColumns(
        inputs=tuple(column for column in known if not column.is_output),
        outputs=tuple(column for column in known if column.is_output),
        num_texts=sum(feature.type == "text" for feature in features),
    )
    texts = texts.take(np.flatnonzero(_are_among(texts.keys, keys)))
    rows = TableRows.from_blocks(found, texts, work.encoded(parsed, known, keys))
    work.ledger.entries.sort(key=lambda entry: entry.key)
    splits = (
        {only: rows}
        if only
        else {name: rows.take(np.flatnonzero(names[rows.keys] == code)) for code, name in enumerate(SPLITS)}
    )
    empty = [f"the {name} split has no rows" for name, each in splits.items() if not len(each)]
    return PreparedTable(
        splits=splits, columns=found, ledger=work.ledger, notes=(*work.notes, *empty), num_spare=num_spare
    )


def _with_columns(source: Source, features: Sequence[Feature], policy: PreprocessingConfig) -> Source:
    """Return the source with faults for rows whose cells are of another type than most in one of the columns."""
    wanted = {feature.column: feature.place for feature in features}
    there = [name for name in wanted if name in source.table.column_names]
    problems = problems_of(lambda: source.require_columns(wanted), lambda: usable(source, there, policy))
    DataError.raise_for(problems)
    source = usable(source, there, policy)
    source.require_text(there)
    return source


def _assigned(
    source: Source, policy: PreprocessingConfig, *, seed: int, only: str | None, used: Sequence[str]
) -> tuple[Keys, npt.NDArray[np.int8], list[str]]:
    """Return the rows to use, the code of each one's split, and notes. All together, rows have the first code."""
    if only == FULL:
        keys = source.usable_rows()
        return keys, np.zeros(len(keys), dtype=np.int8), []
    source = with_usable_splits(source, policy)
    keys = sampled_rows(source, policy, seed=seed)
    return keys, *assign_splits(source, policy, keys, seed=seed, used=used)


def _require_train(is_training: Marks, source: Source) -> None:
    if not is_training.any():
        raise DataError(
            what="no rows are left to train on",
            where=source.name,
            expected="at least one row in the train split",
            fix="look at preprocessing.split and at what was dropped",
        )


@dataclass(slots=True, kw_only=True)
class _Work:
    """Hold what every step of a preparation needs, and collect what happens to rows."""

    source: Source
    features: Sequence[Feature]
    split_of: Callable[[int], str]
    is_training: Callable[[Keys], Marks]
    ledger: Ledger
    faults: RowFaults
    notes: list[str]
    _places: list[Floats] = field(default_factory=list)  # of each feature's texts; see `positions`

    @property
    def cells(self) -> list[Feature]:
        """Return the features that are no texts."""
        return [feature for feature in self.features if feature.type != "text"]

    def without_missing(self, keys: Keys, *, is_new: bool) -> Keys:
        """Return the rows that stay where cells are missing.

        is_new: columns are learned from.
        Raises DataError for such without any value, and for missing cells whose strategy is `error`.
        """
        columns = {
            feature.name: Column(
                name=feature.column,
                feature=feature.place,
                missing_value_strategy=feature.missing_value_strategy,
                is_label=feature.type != "text",
            )
            for feature in self.features
        }
        missing = {name: self.source.missing(each.name, is_label=each.is_label)[keys] for name, each in columns.items()}
        nothing = [feature for feature in self.features if is_new and len(keys) and missing[feature.name].all()]
        DataError.raise_for(
            Problem(
                what=f"column `{feature.column}` has no value in any row",
                where=self.source.name,
                expected="some rows with a value",
                fix=f"fill the column, or remove {feature.place}",
            )
            for feature in nothing
        )
        require_filled(self.source, list(columns.values()), keys)
        kept = [feature for feature in self.features if feature.missing_value_strategy == "keep_row"]
        others = [columns[feature.name] for feature in self.features if feature not in kept]
        left = without_missing(self.source, others, keys, self.ledger, self.split_of)
        return self._teaching(left, keys, kept, missing)

    def _teaching(self, left: Keys, keys: Keys, kept: Sequence[Feature], missing: dict[str, Marks]) -> Keys:
        """Return the rows that have a value for some output; note those that lack one."""
        stays = _are_among(keys, left)
        outputs = [feature for feature in self.features if feature.is_output]
        for feature in kept:
            num_without = int(np.count_nonzero(missing[feature.name] & stays))
            if num_without:
                rows = format_count(num_without, "row")
                self.notes.append(
                    f"column `{feature.column}` has no value in {rows}, which teach the other outputs alone"
                )
        if not outputs or any(feature not in kept for feature in outputs):
            return left
        without = stays & np.logical_and.reduce([missing[feature.name] for feature in outputs])
        for key in keys[without].tolist():
            entry = Entry(key=key, split=self.split_of(key), event="dropped_missing", why="no value for any output")
            self.ledger.entries.append(entry)
        return np.asarray(keys[stays & ~without], dtype=np.int64)

    def labelled(self, parsed: Parsed, at: int, columns: TableColumns | None) -> TableColumn:
        """Return a feature's column with its labels; rows whose label is none of these become faults."""
        feature, texts = self.cells[at], parsed.texts[at]
        if feature.type == "number":
            self._places.append(np.zeros(0))
            return unfilled(feature, ()) if columns is None else _same(columns, feature)
        keys, values = parsed.keys, parsed.values(at)
        if columns is None:
            column = unfilled(feature, labels_of(feature, texts, values, self.is_training(keys)))
        else:
            column = _same(columns, feature)
        places = positions(column, texts)
        self._places.append(places)
        found = placed(values, places)
        if column.first:
            return column
        for row in np.flatnonzero(found < 0).tolist():
            self.faults.add(int(keys[row]), unknown_label(feature, column.labels, texts[int(values[row])]))
        return column

    def usable_texts(
        self,
        keys: Keys,
        encoder: TextEncoder | None,
        policy: PreprocessingConfig,
        *,
        context_length: int | None,
        num_all: int,
    ) -> tuple[TokenRows, Keys, int]:
        """Return the tokens of all texts, row by row, the rows that can be used, and how many more may be left out.

        Raises DataError where rows cannot be used and are not to be left out.
        """
        limits, findings = Limits(context_length=context_length), Findings(split_of=self.split_of)
        usable_keys = self._without_faulty(keys)
        texts = [feature for feature in self.features if feature.type == "text"]
        tokens = TokenRows.from_rows([])
        if texts:
            assert encoder is not None, "texts need a tokenizer"
            lengths = [_limits(feature, policy, context_length) for feature in texts]
            tokens = TokenRows.from_blocks(self._tokenized(usable_keys, texts, encoder, lengths, findings))
        few = few_of({*self.source.faults, *self.faults.problems}, findings, policy, num_rows=num_all)
        tokens = without_unusable(tokens, findings, policy, self.source, limits=limits, few=few.why or None)
        DataError.raise_for(
            problems_of(
                lambda: self.ledger.entries.extend(
                    bad_rows(self.faults, self.source, policy.on_bad_row, few, len(keys), self.split_of)
                ),
                lambda: require_fitting(findings, self.source, limits, num_rows=len(keys)),
            )
        )
        self.ledger.entries += [
            replace(entry, event="cut_text") if entry.event == "cut_prompt" else entry for entry in findings.entries
        ]
        if findings.special:
            rows = sorted(set(findings.special))
            short = f"the text of {format_count(len(rows), 'row')} spells out special tokens (such as </s>)"
            note = f"{short}, which the model reads as those tokens: {self.source.places(rows)}"
            self.notes.append(warning(note, topic="rows", short=short))
        left = self._without_faulty(keys)
        left = left[_are_among(left, tokens.keys)] if texts else left
        return tokens, left, max(0, few.num_more)

    def _without_faulty(self, keys: Keys) -> Keys:
        return np.asarray(keys[~_are_among(keys, np.array([*self.faults.problems], dtype=np.int64))], dtype=np.int64)

    def _tokenized(
        self, keys: Keys, texts: Sequence[Feature], encoder: TextEncoder, limits: Sequence[Limits], findings: Findings
    ) -> Iterator[list[TokenRow]]:
        """Give the texts' tokens a block at a time, row by row; a text without any is one padding token.

        Rows with a text that is too long to tokenize, or ends with the padding token, become faults.
        """
        for block_keys, block in blocks(self.source.table.select(list({each.column: 0 for each in texts})), keys):
            batches = []
            for feature in texts:
                fill = "" if feature.fill_value is None else str(feature.fill_value)
                batch = Texts(keys=block_keys, prompts=cell_texts(block[feature.column], fill=fill), answers=[])
                batches.append(batch)
                list(bounded_texts([batch], self.faults))
            short = [at for at, key in enumerate(block_keys.tolist()) if key not in self.faults.problems]
            tokens = [
                list(next(tokenize([batch.only(short)], encoder, limit, findings)))
                for batch, limit in zip(batches, limits, strict=True)
            ]
            yield [
                self._filled(each, encoder, texts[at])
                for row in zip(*tokens, strict=True)
                for at, each in enumerate(row)
            ]

    def _filled(self, row: TokenRow, encoder: TextEncoder, feature: Feature) -> TokenRow:
        if not len(row.input_ids):
            return replace(row, input_ids=np.array([encoder.pad_id], np.int32), supervised=np.zeros(1, np.bool_))
        if row.input_ids[-1] == encoder.pad_id:
            what = f"the text of column `{feature.column}` ends with the padding token, which marks the end of a text"
            self.faults.add(row.key, Problem(what=what, fix="remove the token's name from the text"))
        return row

    def learned(
        self, parsed: Parsed, columns: list[TableColumn], keys: Keys, *, is_new: bool
    ) -> tuple[list[TableColumn], Keys]:
        """Return the columns with what the training split taught, and the rows without outliers that are left out."""
        is_left = _are_among(parsed.keys, keys)
        if is_new:
            training = is_left & self.is_training(parsed.keys)
            columns = [
                bounded(feature, column, parsed.values(at)[training])
                for at, (feature, column) in enumerate(zip(self.cells, columns, strict=True))
            ]
        for at, (feature, column) in enumerate(zip(self.cells, columns, strict=True)):
            if column.low is not None:
                is_left &= ~self._outliers(feature, column, parsed.keys, parsed.values(at), is_left)
        keys = parsed.keys[is_left]
        if is_new:
            columns = self._taught(parsed, columns, is_left & self.is_training(parsed.keys))
        training = self.is_training(keys)
        for at, (feature, column) in enumerate(zip(self.cells, columns, strict=True)):
            found = placed(parsed.values(at)[is_left], self._places[at]) if column.labels else np.zeros(0)
            taught = np.unique(found[training & (found >= column.first)]) if is_new and column.labels else column.labels
            num_unknown = int(np.count_nonzero(found == 0)) if column.first else 0
            self.notes += column_notes(feature, column, num_unknown=num_unknown, num_taught=len(taught))
        return columns, keys

    def _taught(self, parsed: Parsed, columns: list[TableColumn], training: Marks) -> list[TableColumn]:
        """Return the columns as the training rows teach. Raises DataError for all columns that they cannot teach."""
        found: list[TableColumn] = []

        def teach(at: int) -> None:
            values = parsed.values(at)[training]
            values = values if self.cells[at].type == "number" else placed(values, self._places[at])
            found.append(learned(self.cells[at], columns[at], values, self.source))

        DataError.raise_for(problems_of(*(lambda at=at: teach(at) for at in range(len(columns)))))
        return found

    def _outliers(self, feature: Feature, column: TableColumn, keys: Keys, values: Floats, is_left: Marks) -> Marks:
        """Return which rows leave for an outlier; the ledger takes them, and those whose outlier is replaced."""
        outliers = is_left & column.is_outlier(values)
        is_dropped = feature.outlier_strategy == "drop_row"
        for key, value in zip(keys[outliers].tolist(), values[outliers].tolist(), strict=True):
            why = f"`{feature.column}` is {value:g}, not between {column.low:g} and {column.high:g}"
            event = "dropped_outlier" if is_dropped else "filled_outlier"
            self.ledger.entries.append(Entry(key=key, split=self.split_of(key), event=event, why=why))
        return outliers & is_dropped

    def encoded(self, parsed: Parsed, columns: Sequence[TableColumn], keys: Keys) -> Iterator[Floats]:
        """Give blocks of cells [rows, W]: key, inputs, targets and weights, as `TableRows` holds them.

        Raises DataError for a number that is too large once it is normalised.
        """
        weights = [_label_weights(feature, column) for feature, column in zip(self.cells, columns, strict=True)]
        is_left, done = _are_among(parsed.keys, keys), 0
        for block_keys, block in parsed.blocks():
            here = is_left[done : done + len(block_keys)]
            done += len(block_keys)
            inputs, targets, divisors = [], [], []
            for at, (feature, column) in enumerate(zip(self.cells, columns, strict=True)):
                values = block[at][here]
                values = values if feature.type == "number" else placed(values, self._places[at])
                values = column.encoded(values)
                self._require_small(feature, values, block_keys[here])
                if column.is_output:
                    is_there = ~np.isnan(values)
                    values = np.where(is_there, values, 0.0)
                    weight = weights[at][values.astype(np.int64)] if len(weights[at]) else 1.0
                    targets.append(values)
                    divisors.append(np.where(is_there, weight, 0.0))
                else:
                    inputs.append(values)
            yield np.stack([block_keys[here].astype(np.float64), *inputs, *targets, *divisors], axis=1)

    def _require_small(self, feature: Feature, values: Floats, keys: Keys) -> None:
        large = np.abs(values) > LARGEST
        if large.any():
            raise DataError(
                what=f"column `{feature.column}` has numbers that no 32 bits hold once they are normalised",
                where=self.source.places(keys[large].tolist()),
                expected="numbers of about the size of those in the training split",
                fix=f"correct them, or set {feature.place}.preprocessing.outlier_strategy",
            )


def _are_among(keys: Keys, chosen: Keys) -> Marks:
    """Return which of these rows are among the chosen ones."""
    marks = np.zeros(1 + max(keys.max(initial=0), chosen.max(initial=0)), dtype=np.bool_)
    marks[chosen] = True
    return marks[keys]


def _same(columns: TableColumns, feature: Feature) -> TableColumn:
    """Return the column that a run learned for this feature."""
    found = {(column.name, column.is_output): column for column in (*columns.inputs, *columns.outputs)}
    return found[feature.name, feature.is_output]


def _limits(feature: Feature, policy: PreprocessingConfig, context_length: int | None) -> Limits:
    """Return where a text is cut: at its own length, and at the context where `on_overlong` is truncate."""
    limits = []
    if feature.max_sequence_length is not None:
        why = f"{feature.place}.preprocessing.max_sequence_length is {feature.max_sequence_length:,}"
        limits.append(Limit(num_tokens=feature.max_sequence_length, why=why))
    if policy.on_overlong == "truncate" and context_length is not None:
        why = f"preprocessing.on_overlong is truncate, and the context is {context_length:,} tokens"
        limits.append(Limit(num_tokens=context_length, why=why))
    shortest = min(limits, key=lambda limit: limit.num_tokens, default=None)
    return Limits(prompt=shortest, context_length=context_length)


def _label_weights(feature: Feature, column: TableColumn) -> Floats:
    """Return the weight of each label of an output; nothing for other columns."""
    if not column.is_output or column.type == "number":
        return np.zeros(0)
    return np.array([feature.class_weights.get(label, 1.0) for label in column.labels])
