"""Find what spoils training or its measurement in the rows: repeated, leaked, cut or unseparated ones, and too few.

Each detector looks at the facts of the rows and gives what it found. `advise` asks them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import sqrt

import numpy as np
import numpy.typing as npt

from brim.config.prompts import prompt_columns, prompt_template
from brim.config.schema import Config, FixedSplit, HashSplit
from brim.data.advice.facts import AnswerEnds, Bits, Facts, Flags, PromptEnds, Watcher
from brim.data.advice.finding import BY_ROWS, Finding, Integers, Slip, finding, share
from brim.data.read import Source, blocks, cell_texts
from brim.data.tokens import TextEncoder, TokenRows
from brim.units import format_count

_MOST = 0.5  # of the rows; what more of them have is normal for this data


_WORTH_REPORTING = 0.1  # of the rows; a few odd ones do not mean that a separator is missing


_LOOSE_SHARE = 0.001


_FEW_ROWS = 10  # below this, a text in half of the rows says little


_ENOUGH_ROWS = 30  # to measure by


_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no bit of the prompt's hash is lost


def advise(
    watcher: Watcher,
    splits: Mapping[str, TokenRows],
    *,
    config: Config,
    source: Source,
    encoder: TextEncoder,
    slips: Sequence[Slip] = (),
) -> list[Finding]:
    """Return advice on the texts that passed the watcher, for the rows that are in a split.

    Repetition is looked for within train (within all rows where they are not split), leakage between splits, and the
    form of the texts in all rows. slips: labels that are probably misspelt.
    """
    facts = watcher.facts()
    by_split = {name: facts.of(rows.keys) for name, rows in splits.items()}
    everything = facts.of(np.concatenate([rows.keys for rows in splits.values()]))
    found = [misspelt(slips), broken_characters(everything)]
    if config.chat is None:  # in a conversation, the template separates prompt and answer, and ends it
        found.append(space_at_end(everything, watcher, encoder, config))
        if watcher.has_answers:
            found += [no_separator(everything, config), end_in_text(everything, watcher.eos_text)]
            found += [cut_at_one_length(everything), stops_in_a_sentence(everything)]
    if watcher.has_answers:
        train = by_split.get("train", everything)
        found += [one_prompt(train), different_answers(train), duplicates(train), one_answer(train)]
        found += [answer_in_prompt(everything), leakage(by_split, fix=lambda: _against_leakage(config, source))]
    if config.trainer.type != "none":
        found.append(small_split({name: len(rows) for name, rows in splits.items()}))
    return list(chain.from_iterable(found))


def misspelt(slips: Sequence[Slip]) -> Iterator[Finding]:
    """Find labels from the data that are probably others."""
    for slip in slips:
        what = (
            f"the label {slip.label!r} has {format_count(len(slip.rows), 'row')} and "
            f"{slip.meant!r}, but for a letter the same, {slip.num_meant:,}"
        )
        yield finding("misspelt_label", what, np.asarray(slip.rows, dtype=np.int64), meant=slip.meant)


def broken_characters(facts: Facts) -> Iterator[Finding]:
    """Find rows with characters that nobody typed."""
    rows = facts.keys[facts.broken]
    if len(rows):
        shown = share(len(rows), len(facts))
        what = f"{shown} hold characters that nobody typed (\ufffd, Ã© for é, control codes)"
        yield finding("broken_characters", what, rows)


def answer_in_prompt(facts: Facts) -> Iterator[Finding]:
    """Find rows whose answer, of a sentence's length, stands in the prompt word for word.

    It is quoted from the prompt in some rows of many tasks; where it is so in most, the template gives it away.
    """
    count = int(facts.answer_in_prompt.sum())
    if count > max(1, _MOST * len(facts)):
        what = f"{share(count, len(facts))} have their answer in the prompt, word for word"
        yield finding("answer_in_prompt", what, facts.keys[facts.answer_in_prompt])


def small_split(num_rows: Mapping[str, int]) -> Iterator[Finding]:
    """Find validation and test with a few rows. num_rows: of each split; an empty split is reported elsewhere.

    The uncertainty of a share of n rows is at most 0.98 / sqrt(n), at 95% confidence.
    """
    small = {name: num_rows[name] for name in ("validation", "test") if 0 < num_rows.get(name, 0) < _ENOUGH_ROWS}
    if small:
        what = f"few rows to measure by: {', '.join(f'{name} has {count:,}' for name, count in small.items())}"
        uncertainty = min(0.98 / sqrt(min(small.values())), 1)
        yield finding("small_split", what, np.zeros(0, np.int64), uncertainty=uncertainty)


def one_prompt(facts: Facts) -> Iterator[Finding]:
    """Find a prompt that is not blank and stands in most rows, with different answers."""
    is_it = _says_nothing(facts) & ~facts.blank_prompt
    answers = facts.answer[is_it]
    if len(answers) and (answers != answers[0]).any():
        what = f"{share(len(answers), len(facts))} have the very same prompt, with different answers"
        yield finding("one_prompt", what, facts.keys[is_it])


def different_answers(facts: Facts) -> Iterator[Finding]:
    """Find one prompt with several answers: letter for letter, and apart from that but for case and spacing."""
    skip = _says_nothing(facts)
    exact = _several_answers(facts, facts.prompt) & ~skip
    loose = _several_answers(facts, facts.loose_prompt) & ~skip & ~exact
    if exact.any():
        rows, like = _side_by_side(facts.keys[exact], facts.prompt[exact])
        prompts = format_count(int(np.count_nonzero(rows == like)), "prompt")
        what = f"{share(len(rows), len(facts))} ask the same as another and are answered differently ({prompts})"
        yield finding("different_answers", what, rows, like)
    if loose.sum() >= max(2, _LOOSE_SHARE * len(facts)):
        rows, like = _side_by_side(facts.keys[loose], facts.loose_prompt[loose])
        shown = share(len(rows), len(facts))
        what = f"{shown} differ from another's prompt in case or spacing alone and are answered differently"
        yield finding("nearly_the_same", what, rows, like)


def duplicates(facts: Facts) -> Iterator[Finding]:
    """Find rows whose prompt and answer stood there before."""
    groups = _Groups.of(_pair_hashes(facts))
    again = groups.first != np.arange(len(facts))
    if again.any():
        what = f"{share(int(again.sum()), len(facts))} repeat an earlier row, prompt and answer"
        yield finding("duplicates", what, facts.keys[again], facts.keys[groups.first[again]])


def one_answer(facts: Facts) -> Iterator[Finding]:
    """Find an answer that most rows share."""
    groups = _Groups.of(facts.answer)
    largest = int(groups.sizes.max(initial=0))
    if largest > max(_FEW_ROWS, _MOST * len(facts)):
        what = f"{share(largest, len(facts))} have one and the same answer"
        yield finding("one_answer", what, facts.keys[groups.sizes == largest], share=largest / len(facts))


def leakage(by_split: Mapping[str, Facts], *, fix: Callable[[], str]) -> Iterator[Finding]:
    """Find rows of validation and test whose prompt, or whole row where the prompt says nothing, is in train, too.

    The split with the larger share is named first. fix: what to do, worked out where there is a leak.
    """
    train = by_split.get("train")
    if train is None or not len(train):
        return
    leaks = [_Leak(name, by_split[name], train) for name in ("validation", "test") if len(by_split.get(name, ()))]
    leaks = sorted((leak for leak in leaks if leak.known.any()), key=lambda leak: -leak.known.mean())
    if leaks:
        rows, like = (np.concatenate(each) for each in zip(*(leak.rows for leak in leaks), strict=True))
        yield finding("leakage", "; ".join(leak.what for leak in leaks), rows, like, fix=fix())


class _Leak:
    """Find the rows of a split that are in train, too."""

    def __init__(self, name: str, split: Facts, train: Facts) -> None:
        pairs, train_pairs = _pair_hashes(split), _pair_hashes(train)
        whole: Flags = np.isin(pairs, train_pairs)
        silent = np.unique(train.prompt[_says_nothing(train)])
        says_something = ~np.isin(split.prompt, silent) & ~split.blank_prompt
        self.known: Flags = whole | (np.isin(split.prompt, train.prompt) & says_something)
        by_prompt = _first_like(split.prompt, train.prompt, train.keys)
        by_pair = _first_like(pairs.view(np.int64), train_pairs.view(np.int64), train.keys)
        self.rows = split.keys[self.known], np.where(whole, by_pair, by_prompt)[self.known]
        known = share(int(self.known.sum()), len(split), f"{name} rows")
        with_answer = f" ({int(whole.sum()):,} with the same answer)" if whole.any() else ""
        self.what = f"{known} have a prompt that stands in train{with_answer}"


def _first_like(values: Integers, among: Integers, keys: Integers) -> Integers:
    """Return for each value the key of the first equal one; where there is none, some key."""
    known, first = np.unique(among, return_index=True)
    at = np.minimum(np.searchsorted(known, values), len(known) - 1)
    return np.asarray(keys[first[at]], dtype=np.int64)


def _pair_hashes(facts: Facts) -> npt.NDArray[np.uint64]:
    """Return a hash of prompt and answer together."""
    prompts, answers = facts.prompt.view(np.uint64), facts.answer.view(np.uint64)
    return np.asarray(prompts * _MIX + answers, dtype=np.uint64)


def _says_nothing(facts: Facts) -> Flags:
    """Return rows whose prompt does not tell them apart: blank, as where text is learned alone, or in most the same."""
    return facts.blank_prompt | (_Groups.of(facts.prompt).sizes > max(_FEW_ROWS, _MOST * len(facts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """Group equal values: for each entry, hold the first entry of its group and the group's size."""

    first: Integers
    sizes: Integers

    @classmethod
    def of(cls, values: npt.NDArray[np.generic]) -> _Groups:
        _, first, group, counts = np.unique(values, return_index=True, return_inverse=True, return_counts=True)
        return cls(first=first[group], sizes=counts[group])


def _several_answers(facts: Facts, prompts: Integers) -> Flags:
    """Return rows whose prompt has more than one answer."""
    _, group = np.unique(prompts, return_inverse=True)
    pairs = group.astype(np.uint64) * _MIX + facts.answer.view(np.uint64)
    _, first_of_pair = np.unique(pairs, return_index=True)
    num_answers = np.bincount(group[first_of_pair], minlength=len(facts))
    return np.asarray(num_answers[group] > 1, dtype=np.bool_)


def _side_by_side(keys: Integers, values: Integers) -> tuple[Integers, Integers]:
    """Return the rows after the first of each group, groups by their first row, and that first row for each."""
    groups = _Groups.of(values)
    order = np.lexsort((np.arange(len(keys)), groups.first))
    return keys[order], keys[groups.first[order]]


def _against_leakage(config: Config, source: Source) -> str:
    split = config.preprocessing.split
    take_out = f"take these rows out ({BY_ROWS})"
    if config.chat is not None or isinstance(split, HashSplit):
        return take_out
    by_hash = f"set preprocessing.split: {{type: hash, column: {_column_to_hash(config, source)}}}"
    return f"{take_out}, or {by_hash}" if isinstance(split, FixedSplit) else by_hash


def _column_to_hash(config: Config, source: Source) -> str:
    """Return the prompt's column with the most values: equal prompts have it equal, and few others do.

    The answer's, where all prompts are the same.
    """
    num_values = {name: _num_values(source, name) for name in prompt_columns(config)}
    best = max(num_values, key=lambda name: num_values[name], default=config.input_features[0].column_name)
    return best if num_values.get(best, 1) > 1 else config.output_features[0].column_name


def _num_values(source: Source, column: str) -> int:
    """Return how many different values a column has, by their hashes: the values may be too large to be held."""
    rows = np.arange(source.table.num_rows)
    texts = (text for _, block in blocks(source.table.select([column]), rows) for text in cell_texts(block[column]))
    return len(np.unique(np.fromiter(map(hash, texts), dtype=np.int64)))


def no_separator(facts: Facts, config: Config) -> Iterator[Finding]:
    """Find prompts that end in the middle of their text, with nothing between it and the answer."""
    is_open = _has(facts.prompt_ends, PromptEnds.OPEN)
    num_open, num_glued = int(is_open.sum()), int(_has(facts.prompt_ends, PromptEnds.GLUED).sum())
    if num_open < max(2, _WORTH_REPORTING * len(facts)):
        return
    glued = f"; in {num_glued:,} not even a space stands between them" if num_glued else ""
    shown = share(num_open, len(facts))
    what = f"{shown} have no separator: the prompt ends in a word, and the answer goes on{glued}"
    if prompt_template(config) is None:
        fix = f'set prompt.template: "{{{config.input_features[0].column_name}}}\\n\\n### Answer:\\n"'
    else:
        fix = 'end prompt.template with a line of its own, such as "\\n\\n### Answer:\\n"'
    yield finding("no_separator", what, facts.keys[is_open], fix=fix)


def space_at_end(facts: Facts, watcher: Watcher, encoder: TextEncoder, config: Config) -> Iterator[Finding]:
    """Find prompts that end in a space which the tokenizer would have put into the answer's first word."""
    has_space = _has(facts.prompt_ends, PromptEnds.SPACE)
    samples = watcher.samples if watcher.has_answers else [("a: ", "word")]
    if has_space.sum() < max(2, _WORTH_REPORTING * len(facts)) or not _space_is_a_token(samples, encoder):
        return
    what = f"{share(int(has_space.sum()), len(facts), 'prompts')} end in a space, a token of its own"
    where = "the prompts" if config.prompt.template is None else "prompt.template"
    fix = f"take the space off the end of {where}, and begin the answers with it"
    yield finding("space_at_end", what, facts.keys[has_space], fix=fix)


def _space_is_a_token(samples: Sequence[tuple[str, str]], encoder: TextEncoder) -> bool:
    """Return whether prompt and answer, encoded together, are mostly cut elsewhere than between them."""
    prompts = encoder.encode([prompt for prompt, _ in samples], special_tokens=False)
    whole = encoder.encode([prompt + answer for prompt, answer in samples], special_tokens=False)
    moved = [both[: len(prompt)] != prompt for prompt, both in zip(prompts, whole, strict=True)]
    return sum(moved) > len(moved) / 2


def _has(bits: Bits, flag: int) -> Flags:
    return np.asarray((bits & flag) > 0, dtype=np.bool_)


_NEARLY_ALL = 0.9  # of the long last lines end as sentences do: it is prose, and what does not stands out


_TIMES_AS_OFTEN = 3


_FEW = 3  # fewer that stand out are chance


_LEAST_SHARE = 0.005  # of all rows


_WIDE_CHARACTERS = 50  # answers that may have been cut at a width; shorter ones are labels


_SIGNS = (  # what of the answers, why it matters, what to do
    (
        AnswerEnds.EOS_INSIDE,
        "have the end-of-sequence token {eos} inside",
        "the model learns to stop there; what follows is never generated",
        "take {eos} out of the answers, or split the rows",
    ),
    (
        AnswerEnds.EOS_AT_END,
        "end in {eos} already",
        "brim ends each answer with it, so that it stands there twice",
        "take {eos} off the answers",
    ),
    (
        AnswerEnds.FOREIGN,
        "end in another model's end sign, such as </s>",
        "this tokenizer ends with {eos}, which brim adds; the other sign is text that is learned",
        "take the sign off the answers",
    ),
)


def end_in_text(facts: Facts, eos_text: str) -> Iterator[Finding]:
    """Find answers that spell out an end sign, of this tokenizer or of another."""
    for flag, *texts in _SIGNS:
        rows = facts.keys[_has(facts.answer_ends, flag)]
        if len(rows):
            what, why, fix = (text.format(eos=eos_text) for text in texts)
            shown = share(len(rows), len(facts), "answers")
            yield finding("end_in_text", f"{shown} {what}", rows, why=why, fix=fix)


def cut_at_one_length(facts: Facts) -> Iterator[Finding]:
    """Find many answers as long as the longest, most of them ending anywhere, and far fewer of any other length."""
    characters = facts.answer_characters
    longest = int(characters.max(initial=0))
    at_longest = characters == longest
    num_cut = int(at_longest.sum())
    num_alike = int(np.unique(characters[~at_longest], return_counts=True)[1].max(initial=0))  # of another length
    num_anywhere = int(_has(facts.answer_ends[at_longest], AnswerEnds.WORD).sum())
    if (
        longest >= _WIDE_CHARACTERS
        and num_cut >= max(5, _LEAST_SHARE * len(facts))
        and num_cut > _TIMES_AS_OFTEN * num_alike
        and 2 * num_anywhere > num_cut
        and np.quantile(characters, 0.1) <= 0.8 * longest
    ):
        shown = share(num_cut, len(facts), "answers")
        what = f"{shown} have exactly {longest:,} characters, and none has more: they look cut"
        fix = "make the data again without that limit, or take these rows out"
        yield finding("unfinished", what, facts.keys[at_longest], of="", fix=fix)


def stops_in_a_sentence(facts: Facts) -> Iterator[Finding]:
    """Find answers that end in a word where nearly all end as sentences do, or most do and the long ones do not."""
    is_long, is_open = (_has(facts.answer_ends, flag) for flag in (AnswerEnds.LONG, AnswerEnds.OPEN))
    num_long, num_sentences = int(is_long.sum()), int(_has(facts.answer_ends, AnswerEnds.SENTENCE).sum())
    if num_sentences < _NEARLY_ALL * num_long:
        is_open &= _among_the_longest(is_long, is_open, facts.answer_characters)
    num_open = int(is_open.sum())
    if num_open >= max(_FEW, _LEAST_SHARE * len(facts)) and num_sentences >= _MOST * num_long:
        what = (
            f"{share(num_open, len(facts), 'answers')} stop in a word or at a comma, where "
            f"{num_sentences / num_long:.0%} of those of their length end as sentences do"
        )
        fix = "look at some; complete them, or take them out"
        yield finding("unfinished", what, facts.keys[is_open], of=" of a sentence", fix=fix)


def _among_the_longest(is_long: Flags, is_open: Flags, characters: npt.NDArray[np.int32]) -> Flags:
    """Return the longest quarter, if it stops in a word far more often than the others: a limit cuts what is long.

    None, if it does not: then full stops are left out as a matter of style.
    """
    longest = is_long & (characters >= np.quantile(characters[is_long], 0.75)) if is_long.any() else is_long
    others = is_long & ~longest
    stands_out = is_open[longest].sum() * others.sum() > _TIMES_AS_OFTEN * is_open[others].sum() * longest.sum()
    return longest if stands_out else np.zeros_like(longest)
