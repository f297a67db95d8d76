"""Collect all the advice on a data set, the most important first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow.compute as pc

from brim.config import prompt_columns, template_text
from brim.config.schema import Config, FixedSplit, HashSplit
from brim.data.advice.boundaries import (
    Facts,
    Watcher,
    broken_characters,
    end_in_text,
    no_separator,
    space_at_end,
    unfinished,
)
from brim.data.advice.finding import Finding, Slip
from brim.data.advice.rows import (
    BY_ROWS,
    answer_in_prompt,
    different_answers,
    duplicates,
    leakage,
    one_answer,
    one_prompt,
    small_split,
)
from brim.data.read import Source
from brim.data.tokens import TextEncoder, TokenRows
from brim.units import format_count


def advise(
    watcher: Watcher,
    splits: Mapping[str, TokenRows],
    *,
    config: Config,
    source: Source,
    encoder: TextEncoder,
    slips: Sequence[Slip] = (),
) -> list[Finding]:
    """What the texts tell that passed the watcher, of the rows that are in a split.

    Repetition is looked for within train (within all rows where they are not split), leakage between splits, and the
    form of the texts in all rows. slips: labels that are probably misspelt.
    """
    facts = watcher.facts()
    by_split = {name: facts.of(rows.keys) for name, rows in splits.items()}
    everything = facts.of(np.concatenate([rows.keys for rows in splits.values()]))
    found = [*_misspelt(slips), *broken_characters(everything.keys, everything.broken)]
    if config.chat is None:
        found += _on_the_seam(watcher, everything, config=config, encoder=encoder)
    if watcher.has_answers:
        found += _on_answers(by_split.get("train", everything), everything, config=config, encoder=encoder)
        found += leakage(by_split, fix=_against_leakage(config, source))
    if config.trainer.type != "none":
        found += small_split({name: len(rows) for name, rows in splits.items()})
    return found


def _misspelt(slips: Sequence[Slip]) -> list[Finding]:
    """Advice on each label from the data that is probably another's."""
    return [
        Finding(
            kind="misspelt_label",
            what=f"the label {slip.label!r} has {format_count(len(slip.rows), 'row')} and "
            f"{slip.meant!r}, but for a letter the same, {slip.num_meant:,}",
            why="it is learned, predicted and counted as a label of its own",
            fix=f"if {slip.meant!r} is meant, write it so in these rows",
            rows=np.asarray(slip.rows, dtype=np.int64),
        )
        for slip in slips
    ]


def _on_the_seam(watcher: Watcher, facts: Facts, *, config: Config, encoder: TextEncoder) -> list[Finding]:
    """Between prompt and answer. In a conversation the template separates them."""
    is_trap = _space_is_a_token(watcher.samples, encoder) if watcher.has_answers else _lone_space(encoder)
    found = space_at_end(facts.keys, facts.prompt_ends, is_trap=is_trap, fix=_without_space(config))
    if watcher.has_answers:
        found += no_separator(facts.keys, facts.prompt_ends, fix=_with_separator(config))
    return found


def _on_answers(train: Facts, everything: Facts, *, config: Config, encoder: TextEncoder) -> list[Finding]:
    found = [*one_prompt(train), *different_answers(train), *duplicates(train), *one_answer(train)]
    found += answer_in_prompt(everything.keys, everything.answer_in_prompt)
    if config.chat is None:
        found += end_in_text(everything.keys, everything.answer_ends, eos_text=eos_text(encoder))
        found += unfinished(everything.keys, everything.answer_ends, everything.answer_characters)
    return found


def eos_text(encoder: TextEncoder) -> str:
    """How the end-of-sequence token is written."""
    return encoder.decode([encoder.eos_id], skip_special_tokens=False).strip()


def _space_is_a_token(samples: Sequence[tuple[str, str]], encoder: TextEncoder) -> bool:
    """Whether prompt and answer, encoded together, are mostly cut elsewhere than between them."""
    prompts = encoder.encode([prompt for prompt, _ in samples], special_tokens=False)
    whole = encoder.encode([prompt + answer for prompt, answer in samples], special_tokens=False)
    moved = [both[: len(prompt)] != prompt for prompt, both in zip(prompts, whole, strict=True)]
    return sum(moved) > len(moved) / 2


def _lone_space(encoder: TextEncoder) -> bool:
    return _space_is_a_token([("a: ", "word")], encoder)


def _without_space(config: Config) -> str:
    where = "the prompts" if config.prompt.template is None else "prompt.template"
    return f"take the space off the end of {where}, and begin the answers with it"


def _with_separator(config: Config) -> str:
    template = template_text(config.prompt)
    if template is None:
        column = config.input_features[0].column_name
        return f'set prompt.template: "{{{column}}}\\n\\n### Answer:\\n"'
    return 'end prompt.template with a line of its own, such as "\\n\\n### Answer:\\n"'


def _against_leakage(config: Config, source: Source) -> str:
    split = config.preprocessing.split
    take_out = f"take these rows out ({BY_ROWS})"
    if config.chat is not None or isinstance(split, HashSplit):
        return take_out
    anew = f"preprocessing.split: {{type: hash, column: {_column_to_hash(config, source)}}}"
    return f"{take_out}, or set {anew}" if isinstance(split, FixedSplit) else f"set {anew}"


def _column_to_hash(config: Config, source: Source) -> str:
    """Of the prompt's columns the one with the most values: equal prompts have it equal, and few others do.

    The answer's, where all prompts are the same.
    """
    column = config.input_features[0].column_name
    num_values = {name: pc.count_distinct(source.table[name]).as_py() for name in prompt_columns(config)}
    best = max(num_values, key=lambda name: num_values[name], default=column)
    return best if num_values.get(best, 1) > 1 else config.output_features[0].column_name
