"""Where rows are cut: the configuration's lengths and the model's context."""

from __future__ import annotations

from brim.config import Config, PreprocessingConfig
from brim.data.columns import INPUT, OUTPUT
from brim.data.encoder import TextEncoder
from brim.data.prompt import Prompter
from brim.data.source import Source
from brim.data.tokenize import Limit, Limits
from brim.errors import DataError, Problem

_GLOBAL = "preprocessing.global_max_sequence_length"
_TRUNCATE = "preprocessing.on_overlong is truncate"


def learning_limits(config: Config, context_length: int | None) -> Limits:
    """Limits for rows with an answer. A global length beyond the context counts as the context's.

    Without one, the context is the limit where preprocessing.on_overlong is truncate.
    """
    return Limits(
        prompt=_feature_limit(config.input_features[0].preprocessing.max_sequence_length, INPUT),
        answer=_feature_limit(config.output_features[0].preprocessing.max_sequence_length, OUTPUT),
        joined=_joined_limit(config.preprocessing, context_length),
        context_length=context_length,
    )


def prompt_limits(config: Config, context_length: int | None = None) -> Limits:
    """Limits for prompts alone. context_length: where nothing is to follow them."""
    preprocessing = config.preprocessing.model_copy(update={"global_max_sequence_length": None})  # of whole rows
    return Limits(
        prompt=_feature_limit(config.input_features[0].preprocessing.max_sequence_length, INPUT),
        joined=_joined_limit(preprocessing, context_length),
        context_length=context_length,
    )


def require_room_for_template(asked: Prompter, encoder: TextEncoder, limits: Limits, source: Source) -> None:
    """Raise DataError when the template alone, with nothing filled in, is longer than a limit."""
    if asked.template is None:
        return
    num_tokens = len(encoder.encode([asked.bare_template], special_tokens=True)[0])
    problems = [
        Problem(
            what=f"the prompt template alone takes {num_tokens:,} tokens, and {limit.why}",
            where=asked.template_key,
            expected="a length that leaves room for the row's values",
            fix=f"raise the length or shorten the {asked.template_key.removeprefix('prompt.')}",
        )
        for limit in (limits.prompt, limits.joined)
        if limit is not None and num_tokens > limit.num_tokens
    ]
    if problems:
        raise DataError(*problems)


def _feature_limit(length: int | None, feature: str) -> Limit | None:
    if length is None:
        return None
    return Limit(num_tokens=length, why=f"{feature}.preprocessing.max_sequence_length is {length:,}")


def _joined_limit(preprocessing: PreprocessingConfig, context_length: int | None) -> Limit | None:
    length = preprocessing.global_max_sequence_length
    if length is None:
        if preprocessing.on_overlong != "truncate" or context_length is None:
            return None
        return Limit(num_tokens=context_length, why=f"{_TRUNCATE}, and the context is {context_length:,} tokens")
    if context_length is not None and length > context_length:
        return Limit(num_tokens=context_length, why=f"{_GLOBAL} is {length:,}, the model's context {context_length:,}")
    return Limit(num_tokens=length, why=f"{_GLOBAL} is {length:,}")
