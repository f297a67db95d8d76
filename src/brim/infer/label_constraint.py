"""Only labels can be written: which tokens may follow what has been written of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from brim.data.label_tokens import Tokens


class LabelConstraint:
    """A Constraint (see infer/engine.py) to the texts of labels, each followed by the end.

    Where one label begins with another, the model decides between the end and going on.
    """

    def __init__(self, labels: Mapping[str, Sequence[Tokens]], *, end_ids: Sequence[int]) -> None:
        """labels: what `label_tokens` gives. end_ids: the tokens that end a response."""
        assert end_ids, "a response ends"
        self._end = (end_ids[0],)
        whole = {form for forms in labels.values() for form in forms}
        following: dict[Tokens, dict[int, None]] = {}
        for form in (form for forms in labels.values() for form in forms):
            for number, token in enumerate(form):
                following.setdefault(form[:number], {})[token] = None
        self._following = {
            tokens: (*(end_ids if tokens in whole else ()), *allowed) for tokens, allowed in following.items()
        }

    def allowed(self, generated: Sequence[int]) -> Sequence[int]:
        """See Constraint. A label that none goes on from has one end alone, so that no pass is needed to find it.

        So has what no label begins with, such as in beams that were given up.
        """
        return self._following.get(tuple(generated), self._end)
