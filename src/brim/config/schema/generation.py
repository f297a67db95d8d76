"""`generation`: how text is generated. Keys and meaning are those of transformers' GenerationConfig."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, Strict

from brim.config.schema.base import Fraction, Items, NonNegativeFloat, NonNegativeInt, PositiveInt, Section, key

TokenIds: TypeAlias = Items[NonNegativeInt]


class GenerationConfig(Section):
    """How text is generated. Defaults are Ludwig's, not the base model's."""

    engine: Literal["auto", "slots", "static", "paged", "vllm"] = key(
        "auto",
        "What writes the answers: `slots` is brim's own (rows that end leave, waiting ones take their place), `static` "
        "transformers' `generate` in batches that stay together, `paged` transformers' continuous batching, `vllm` an "
        "installed vLLM on a GPU. `auto` takes the one that is fastest, see docs/engines.md.",
        brim=True,
    )

    max_new_tokens: PositiveInt | None = key(
        None,
        "Most tokens of an answer. null: the output feature's max_sequence_length, else global_max_sequence_length, "
        "else 256 (Ludwig: 32). Of a category with `trainer.type: finetune`, unless its feature has a length: its "
        "longest label and the end.",
    )
    min_new_tokens: NonNegativeInt | None = key(None, "Fewest tokens of an answer.")
    max_time: Annotated[float, Field(gt=0)] | None = key(None, "Seconds after which a batch's generation ends.")
    do_sample: bool = key(True, "Draw tokens by their probability; `false` takes the likeliest.")
    temperature: NonNegativeFloat = key(0.1, "Divides the scores before sampling: lower is less varied.")
    top_k: PositiveInt | None = key(50, "Sample from this many of the likeliest tokens. null: all.")
    top_p: Fraction = key(1.0, "Sample from the likeliest tokens that make up this probability together.")
    typical_p: Annotated[float, Field(gt=0, le=1)] = key(
        1.0, "Sample from the most typical tokens that make up this probability together."
    )
    epsilon_cutoff: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0, "Drop tokens that are less probable than this. 0: off."
    )
    eta_cutoff: Annotated[float, Field(ge=0, lt=1)] = key(0.0, "Drop tokens by eta sampling. 0: off.")
    num_beams: PositiveInt = key(1, "Beams of a beam search. 1: none.")
    early_stopping: bool | Literal["never"] = key(
        False,
        "When a beam search ends: `true` at enough candidates, `never` when none can be better.",
        expected="true, false or never",
    )
    length_penalty: float = key(1.0, "Above 0, a beam search prefers long answers; below, short ones.")
    repetition_penalty: Annotated[float, Field(gt=0)] = key(1.0, "Above 1, tokens that occurred become less likely.")
    encoder_repetition_penalty: Annotated[float, Field(gt=0)] = key(
        1.0, "Above 1, tokens that are not in the prompt become less likely."
    )
    no_repeat_ngram_size: NonNegativeInt = key(0, "No run of this many tokens occurs twice. 0: off.")
    bad_words_ids: Items[TokenIds] | None = key(
        None, "Token sequences that are not generated.", expected="a list of lists of token ids, or null"
    )
    suppress_tokens: TokenIds | None = key(
        None, "Tokens that are not generated.", expected="a list of token ids, or null"
    )
    begin_suppress_tokens: TokenIds | None = key(
        None, "Tokens that do not begin an answer.", expected="a list of token ids, or null"
    )
    forced_bos_token_id: NonNegativeInt | None = key(None, "The token that every answer begins with.")
    forced_eos_token_id: NonNegativeInt | TokenIds | None = key(
        None,
        "The token that ends an answer of the longest allowed length.",
        expected="a token id, a list of token ids, or null",
    )
    sequence_bias: Items[Annotated[tuple[TokenIds, float], Strict(False)]] | None = key(
        None,
        "Added to the scores of token sequences.",
        expected="a list of pairs, token ids and a number, such as [[[12, 7], -1.5]], or null",
    )
    exponential_decay_length_penalty: Annotated[tuple[NonNegativeInt, float], Strict(False)] | None = key(
        None,
        "From this many tokens on, the end becomes likelier by this factor at each token.",
        expected="a whole number and a number, such as [100, 1.05], or null",
    )
    guidance_scale: Annotated[float, Field(ge=1)] | None = key(
        None, "Above 1, the prompt weighs more (classifier-free guidance)."
    )
    renormalize_logits: bool = key(False, "Normalise the scores after all changes to them.")
    remove_invalid_values: bool = key(False, "Replace NaN and infinite scores.")
    prompt_lookup_num_tokens: PositiveInt | None = key(
        None, "Propose this many tokens at once from matching places in the prompt. One row at a time."
    )
    use_cache: bool = key(True, "Keep keys and values of earlier tokens: faster, more memory.")
    pad_token_id: NonNegativeInt | None = key(None, "The padding token. null: the tokenizer's.")
    bos_token_id: NonNegativeInt | None = key(None, "The token that begins a text. null: the tokenizer's.")
    eos_token_id: NonNegativeInt | TokenIds | None = key(
        None,
        "The token that ends an answer. null: the tokenizer's.",
        expected="a token id, a list of token ids, or null",
    )
