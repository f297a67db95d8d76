"""A batch as people's own loops have it: how many rows it holds, and some of its rows alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from brim.errors import InputError, Problem

Rows: TypeAlias = NDArray[np.intp] | slice


def count_rows(batch: Any, *, samples: bool) -> int:
    """Rows of a batch: of each of its columns the first dimension, or the samples of a list.

    Columns are tensors and arrays of at least one dimension, and lists of texts or numbers, in tuples, lists and
    dictionaries of any depth. Raises InputError where they disagree, or where there is none.
    """
    if samples:
        if not isinstance(batch, Sequence) or isinstance(batch, (str, bytes)):
            raise _wrong(f"samples=True, and the batch is a {type(batch).__name__}", "a list of samples")
        return _at_least_one(len(batch))
    columns = dict(_columns(batch, "batch"))
    if not columns:
        if isinstance(batch, Sequence):
            raise _wrong("a list without a tensor", "columns of tensors", fix="samples=True, if these are samples")
        raise _wrong(f"a batch of type {type(batch).__name__}", "columns of tensors")
    if len(set(columns.values())) > 1:
        counts = ", ".join(f"{name} has {num_rows}" for name, num_rows in columns.items())
        raise _wrong(
            f"columns of different numbers of rows: {counts}",
            "the same number in each",
            fix="let the loss function find what is not by row elsewhere than in the batch",
        )
    return _at_least_one(next(iter(columns.values())))


def take_rows(batch: Any, rows: NDArray[np.intp], *, samples: bool) -> Any:
    """A batch of these rows alone, in this order; everything that is not by row as it is.

    Neighbours in their order are views, which take no memory.
    """
    if samples:
        return [batch[int(row)] for row in rows]
    first, last = int(rows[0]), int(rows[-1])
    in_order = last - first == len(rows) - 1 and bool((np.diff(rows) == 1).all())
    return _take(batch, slice(first, last + 1) if in_order else rows)


def _columns(value: Any, name: str) -> Iterator[tuple[str, int]]:
    """Each column's name and rows."""
    if isinstance(value, (Tensor, np.ndarray)):
        if value.ndim:
            yield name, value.shape[0]
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _columns(item, f"{name}[{key!r}]")
    elif _is_list_column(value):
        yield name, len(value)
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from _columns(item, f"{name}[{number}]")


def _take(value: Any, rows: Rows) -> Any:
    if isinstance(value, Tensor) and value.ndim:
        return value[rows if isinstance(rows, slice) else torch.as_tensor(rows, device=value.device)]
    if isinstance(value, np.ndarray) and value.ndim:
        return value[rows]
    if isinstance(value, Mapping):
        taken = {key: _take(item, rows) for key, item in value.items()}
        return taken if type(value) is dict else type(value)(taken)  # type: ignore[call-arg]
    if _is_list_column(value):
        return value[rows] if isinstance(rows, slice) else [value[int(row)] for row in rows]
    if isinstance(value, tuple):
        items = [_take(item, rows) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_take(item, rows) for item in value]
    return value


def _is_list_column(value: Any) -> bool:
    """As PyTorch's loaders make of texts: a tuple or a list with an item for each row."""
    return (
        isinstance(value, (tuple, list)) and bool(value) and all(isinstance(i, (str, bytes, int, float)) for i in value)
    )


def _at_least_one(num_rows: int) -> int:
    if not num_rows:
        raise _wrong("an empty batch", "at least one row")
    return num_rows


def _wrong(what: str, expected: str, *, fix: str = "") -> InputError:
    return InputError(Problem(what=f"AdaptiveStep was given {what}", expected=expected, fix=fix))
