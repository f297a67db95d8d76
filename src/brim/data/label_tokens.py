"""A category's labels as tokens: in every way in which a model would write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from brim.config import Config, FinetuneTrainer
from brim.config.places import dotted
from brim.data.encoder import TextEncoder
from brim.errors import ConfigError, Problem

Tokens: TypeAlias = tuple[int, ...]

_BEFORE = "\n"  # no tokenizer takes it together with a word behind it
MATCH = dotted(("output_features", 0, "decoder", "match"))


def label_tokens(labels: Sequence[str], encoder: TextEncoder) -> dict[str, tuple[Tokens, ...]]:
    """The tokens of each label: as a word of its own after a space, and without a space before it.

    Which of them is natural depends on the prompt's last character and on what the model has learned; where both are
    allowed, the model decides. The end is not among the tokens.
    Raises ConfigError for labels that the tokenizer cannot write so that they are read as they are.
    """
    made = {
        label: tuple(form for form in forms if _text(form, encoder) == label)
        for label, forms in _forms(labels, encoder).items()
    }
    _require_written(made)
    return made


def _forms(labels: Sequence[str], encoder: TextEncoder) -> dict[str, tuple[Tokens, ...]]:
    bare = _bare(labels, encoder)
    plain = encoder.encode(list(labels), special_tokens=False)
    spaced = encoder.encode([f" {label}" for label in labels], special_tokens=False)
    made: dict[str, tuple[Tokens, ...]] = {}
    for number, label in enumerate(labels):
        # Some tokenizers put the space before a text themselves.
        with_space = spaced[number] if plain[number] == bare[number] else plain[number]
        made[label] = tuple(dict.fromkeys((tuple(with_space), tuple(bare[number]))))
    return made


def label_room(config: Config, encoder: TextEncoder) -> int | None:
    """Tokens of the longest label and its end, where nothing else can be generated; else None, or not known yet.

    Raises ConfigError as `label_tokens`.
    """
    feature = config.output_features[0]
    decoder = feature.categories if config.chat is None else None
    if decoder is None or not decoder.constrain_to_vocabulary or not feature.labels:
        return None
    return _room(label_tokens(feature.labels, encoder))


def learned_label_room(config: Config, encoder: TextEncoder) -> int | None:
    """Tokens of the longest label and its end, where a model learns to write a label and nothing else; else None.

    A model that was taught nothing may write words before a label, in which `decoder.match` finds it.
    """
    feature = config.output_features[0]
    is_learned = isinstance(config.trainer, FinetuneTrainer) and config.chat is None and feature.categories is not None
    return _room(_forms(feature.labels, encoder)) if is_learned and feature.labels else None


def _room(forms: Mapping[str, Sequence[Tokens]]) -> int:
    return 1 + max(len(form) for each in forms.values() for form in each)


def _bare(labels: Sequence[str], encoder: TextEncoder) -> list[list[int]]:
    """Tokens of the labels within a text, where nothing is put before them."""
    [before], after = (
        encoder.encode(texts, special_tokens=False) for texts in ([_BEFORE], [f"{_BEFORE}{label}" for label in labels])
    )
    plain = encoder.encode(list(labels), special_tokens=False)
    return [
        ids[len(before) :] if ids[: len(before)] == before else whole for ids, whole in zip(after, plain, strict=True)
    ]


def _text(tokens: Tokens, encoder: TextEncoder) -> str:
    """As a response is read."""
    return encoder.decode(tokens, skip_special_tokens=True).strip()


def _require_written(made: Mapping[str, Sequence[Tokens]]) -> None:
    problems = [
        Problem(
            what=f"the base model's tokenizer cannot write the label {label!r}",
            where=MATCH,
            expected="with constrain_to_vocabulary, labels that come out of the tokenizer as they went in",
            fix="name the label otherwise, or set constrain_to_vocabulary: false",
        )
        for label, forms in made.items()
        if not forms
    ]
    if problems:
        raise ConfigError(*problems)
