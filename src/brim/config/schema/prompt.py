"""`prompt`: how a row becomes the text that the model reads."""

from typing import Annotated, Literal

from pydantic import Field

from brim.config.schema.base import NonNegativeInt, Section, Text, key


class RetrievalConfig(Section):
    """Which rows of the training split stand in the prompt as examples."""

    type: Literal["random", "semantic"] | None = key(
        None,
        "`random`: rows drawn by chance, for each row its own, which `random_seed` and the row's input alone decide. "
        "`semantic`: the rows whose input is most like the row's own. null: none. No example has the row's own input.",
    )
    k: NonNegativeInt = key(0, "Examples in a prompt. 0 with a `type`: 1.")
    model_name: Text | None = key(
        None,
        "For `semantic`: the sentence-transformers model that compares inputs, a folder or a Hub id "
        "(`pip install 'brim[retrieval]'`).",
    )
    index_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")] | None = key(
        None,
        "The folder's name under which what `semantic` computed is kept in the cache; it is made anew when data or "
        "model changed. null: a name made of both.",
        expected="a name of letters, digits, dots, dashes and underscores, or null",
    )

    @property
    def num_examples(self) -> int:
        """Examples in a prompt."""
        return 0 if self.type is None else max(1, self.k)


class PromptConfig(Section):
    """The prompt around the row's values."""

    template: str | None = key(
        None,
        "The prompt with `{column}` for a column's value (`{price:.2f}` with a number format), `{__sample__}` for the "
        "input feature's value as JSON writes it, `{__task__}` for `task`, `{__labels__}` for the labels of a category "
        "and `{__context__}` for the retrieved rows; `{{` and `}}` are literal braces. null: a built-in one where "
        "`task` is set, else the input feature's value as it is, or a line for each of several.",
    )
    task: Text | None = key(None, "What the model shall do with the input, in words: the template's `{__task__}`.")
    retrieval: RetrievalConfig | None = key(
        None,
        "Examples from the training split in the prompt: the template's `{__context__}`.",
        expected="a mapping such as {type: random, k: 2}, or null",
    )

    @property
    def num_examples(self) -> int:
        """Rows of the training split that stand in each prompt."""
        return 0 if self.retrieval is None else self.retrieval.num_examples
