"""Fill `{__context__}` in each row's prompt with labelled rows of the training split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from brim.config.schema import Config, RetrievalConfig
from brim.data.examples import NONE, ExamplePool, Positions, RandomExamples, example_pool, input_texts
from brim.data.nearest_examples import INSTALL, NearestExamples, embeddings_of, is_installed, load_sentence_encoder
from brim.data.read import SPLITS, RowFaults, Source, read
from brim.errors import ConfigError, Problem
from brim.notes import warning
from brim.units import format_count


@dataclass(slots=True, kw_only=True)
class Contexts:
    """Make the examples of each row as text. No example has the row's own input, so that none gives its answer away."""

    pool: ExamplePool
    examples: RandomExamples | NearestExamples
    columns: tuple[str, ...]  # that make the input
    answer_column: str
    elsewhere: str | None  # the name of the data that the pool is from, where it is not that of the rows
    standing_notes: tuple[str, ...] = ()
    num_known: int = 0  # rows, drawn so far, whose input is in the pool

    def of(self, keys: Positions, cells: Mapping[str, list[str]], faults: RowFaults) -> list[str | None]:
        """Return the context of each of these rows; None, and a fault, where the pool has too few other inputs.

        cells: the rows' texts by column.
        """
        inputs = input_texts(cells, self.columns)
        own = self.pool.positions_of(inputs)
        self.num_known += int(np.count_nonzero(own != NONE))
        is_served = len(self.pool) - (own != NONE) >= self.examples.num_examples
        served = np.flatnonzero(is_served)
        chosen = self.examples.choose([inputs[row] for row in served.tolist()], own[served])
        contexts: list[str | None] = [None] * len(keys)
        for row, positions in zip(served.tolist(), chosen.tolist(), strict=True):
            contexts[row] = self.pool.context(positions)
        for key in keys[~is_served].tolist():
            faults.add(key, self._too_few())
        return contexts

    @property
    def row_bytes(self) -> int:
        """Return the bytes that the examples of a row take on average."""
        return self.pool.num_bytes // max(1, len(self.pool)) * self.examples.num_examples

    def notes(self) -> list[str]:
        """Return notes on the rows drawn so far."""
        notes = list(self.standing_notes)
        if self.elsewhere is not None and self.num_known:
            rows = format_count(self.num_known, "row has its", "rows have their")
            them = "it" if self.num_known == 1 else "them"
            notes.append(
                f"{rows} very input in the training split of {self.elsewhere}, where it is not an example for {them}"
            )
        return notes

    def _too_few(self) -> Problem:
        return Problem(
            what=f"only {len(self.pool) - 1:,} training rows have another input, and prompt.retrieval.k asks for "
            f"{format_count(self.examples.num_examples, 'example')}",
            fix="lower prompt.retrieval.k",
        )


def contexts_of(config: Config, source: Source, *, columns: Sequence[str], split: str | None) -> Contexts:
    """Return the contexts of a source's rows, for a configuration that asks for examples.

    columns: that make a row's input. split: of the source, that is prepared alone; None where all are.
    Raises ConfigError where nothing says which data the examples are from; DataError as `example_pool`.
    """
    retrieval = config.prompt.retrieval
    assert retrieval is not None, "asked before"
    training = _training_data(config, source, split)
    pool = example_pool(config, training)
    examples, notes = _examples(retrieval, pool, seed=config.random_seed)
    if pool.num_unknown and training is not source:
        rows = format_count(pool.num_unknown, "training row is", "training rows are")
        notes = (*notes, warning(f"{rows} of an unknown label in {training.name}, and so no examples", topic="rows"))
    is_own = (training.name, training.table.num_rows) == (source.name, source.table.num_rows)  # or looks the same
    return Contexts(
        pool=pool,
        examples=examples,
        columns=tuple(columns),
        answer_column=config.output_features[0].column_name,
        elsewhere=None if is_own else training.name,
        standing_notes=notes,
    )


def without_embeddings(config: Config) -> tuple[Config, list[str]]:
    """Let examples be drawn by chance instead of by likeness, for a caller that loads no model; add a note on it."""
    retrieval = config.prompt.retrieval
    if retrieval is None or retrieval.type != "semantic":
        return config, []
    drawn = RetrievalConfig(type="random", k=retrieval.k)
    lacking = "" if is_installed() else f"; to train or predict so, sentence-transformers must be there: {INSTALL}"
    note = (
        "prompt.retrieval is semantic, and its model is not loaded for a check: the examples here, and the lengths "
        f"with them, are of rows drawn by chance{lacking}"
    )
    return config.model_copy(update={"prompt": config.prompt.model_copy(update={"retrieval": drawn})}), [note]


def _examples(
    retrieval: RetrievalConfig, pool: ExamplePool, *, seed: int
) -> tuple[RandomExamples | NearestExamples, tuple[str, ...]]:
    if retrieval.type == "random":
        return RandomExamples(num_pooled=len(pool), num_examples=retrieval.num_examples, seed=seed), ()
    assert retrieval.model_name is not None, "a rule of the configuration"
    encoder = load_sentence_encoder(retrieval.model_name)
    embeddings, notes = embeddings_of(pool, encoder, index_name=retrieval.index_name)
    return NearestExamples(embeddings=embeddings, encoder=encoder, num_examples=retrieval.num_examples), notes


def _training_data(config: Config, source: Source, split: str | None) -> Source:
    """Return the source where it is trained on, else the configuration's data set, else the source by its split."""
    if split is None and config.trainer.type != "none":
        return source
    if config.dataset is not None:
        return read(config.dataset)
    if split is None or split in SPLITS:
        return source
    raise ConfigError(
        what="prompt.retrieval takes examples from the training split, and it is not said of which data",
        where="dataset",
        expected="the key `dataset`: the labelled data whose training split holds the examples; beside it, the "
        "rows to run over may come from another file",
        fix="add `dataset: train.jsonl` to the configuration, or dataset=train.jsonl to the command; or name a "
        "split of this file with --split",
    )
