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
        self._ends = tuple(end_ids)
        following: dict[Tokens, dict[int, None]] = {}
        for form in (form for forms in labels.values() for form in forms):
            for number, token in enumerate(form):
                following.setdefault(form[:number], {})[token] = None
            following.setdefault(form, {}).update(dict.fromkeys(self._ends))
        self._following = {tokens: tuple(allowed) for tokens, allowed in following.items()}

    def allowed(self, generated: Sequence[int]) -> Sequence[int]:
        """See Constraint. What no label begins with may only end; beams that are given up hold such tokens."""
        return self._following.get(tuple(generated), self._ends)
