"""`prompt`: how a row becomes the text that the model reads."""

from brim.config.schema.base import Section, key


class PromptConfig(Section):
    """The prompt around the row's values."""

    template: str | None = key(
        None,
        "The prompt with `{column}` for a column's value (`{price:.2f}` with a number format) and `{__sample__}` for "
        "the input feature's value; `{{` and `}}` are literal braces. null: the input feature's value as it is.",
    )
