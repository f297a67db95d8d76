"""Sum the gradient of a batch of any size in a training loop that is not brim's own.

A batch is whatever the loop has: its rows are counted and taken out by the first dimension of each column, or by the
samples of a list. `require_sum` refuses a loss function that averages its rows' losses instead of adding them up.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from brim.batching.costs import Costs, Surface
from brim.batching.memory import OutOfMemory, attempt, random_states, restore_random_states
from brim.batching.microbatch import ByLength, ByRows
from brim.batching.step import GradientStep
from brim.errors import InputError

Loss: TypeAlias = Callable[[Any], Tensor]


Weight: TypeAlias = Callable[[Any], float | Tensor]


Lengths: TypeAlias = Callable[[Any], Sequence[int] | NDArray[np.integer] | Tensor]


_NO_LIMIT = 1 << 53  # more than any batch has, and still exact as a float


# One "byte" for each token, padding included, so that max_tokens is the cap. Times do not count when the largest
# micro-batches are asked for.
_PADDED_TOKENS = Surface(base=0.0, lengths=(1,), tokens=((1, 2),), values=((1.0, 2.0),))


_TOKEN_COSTS = Costs(peak=_PADDED_TOKENS, static_bytes=0, time=_PADDED_TOKENS)


class AdaptiveStep:
    """Sum the gradient of a batch's mean loss, in as many pieces as memory demands.

        step = brim.AdaptiveStep(model, loss)
        for batch in loader:
            mean_loss = step(batch)  # p.grad of the whole batch
            optimizer.step()

    The batch goes through whole, as long as it fits. Where memory runs out, what had been computed is dropped, random
    states and saved buffers are put back, the batch is divided into smaller pieces, and the step begins again; later
    steps keep to the smaller size, and try the larger one again after 50 steps (and after 100, 200, … if it fails
    again). Gradients that were there before are dropped, so that no zero_grad() is needed.

    model: whose parameters learn. Several models go into an nn.ModuleList.
    loss: of a batch of some of the rows: the sum of their losses as a scalar (one in 16 bits is warned of), or the loss
        of each. It does the forward pass, and moves the batch to the device, if need be. What it computes for a row
        must not depend on the others.
    max_rows: rows of a piece at first; None: the whole batch.
    lengths: returns the tokens of each row of a batch; pieces are then formed by length, under a limit of rows ×
        longest row.
    max_tokens: that limit at first; None: the whole batch.
    weight: of the whole batch, by which the sum is divided; None: its rows. Supervised tokens, for instance.
    scale: GradScaler.scale, where fp16 needs one.
    samples: a batch is a list of samples, not columns (tensors whose first dimension is the rows, in tuples, lists and
        dictionaries).
    on_event: is called when memory ran out, and with how the step goes on; None: a warning is logged.
    check: on the first batch, call the loss three times with copies of one row, to see that it is a sum.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        max_rows: int | None = None,
        lengths: Lengths | None = None,
        max_tokens: int | None = None,
        weight: Weight | None = None,
        scale: Callable[[Tensor], Tensor] | None = None,
        samples: bool = False,
        on_event: Callable[[Mapping[str, Any]], None] | None = None,
        check: bool = True,
    ) -> None:
        _require_usable(model, max_rows=max_rows, max_tokens=max_tokens, has_lengths=lengths is not None)
        self._model = model
        self._loss = loss
        self._lengths = lengths
        self._weight = weight
        self._scale = scale
        self._samples = samples
        self._on_event = on_event or _log
        self._check = check
        self._parameters: list[nn.Parameter] = []
        self._batch: Any = None
        self._num_rows = 0
        self._divisor = 1.0
        self._few_digits: torch.dtype | None = None  # of 16 bits, in which the loss was summed
        self._has_warned = False  # of them
        self._cutter = (
            ByRows(max_rows=max_rows or _NO_LIMIT)
            if lengths is None
            else ByLength(costs=_TOKEN_COSTS, cap_bytes=max_tokens or _NO_LIMIT, most_rows=max_rows, largest=True)
        )
        self._step = GradientStep(
            cutter=self._cutter,
            parameters=self._parameters,
            backward=self._backward,
            on_event=self._translate,
            module=model,
            tells_lengths=lengths is not None,
        )

    def __call__(self, batch: Any) -> float:
        """Return the mean loss of the batch; its gradient is in the parameters' `grad`.

        Raises OutOfMemoryError when a single row runs out of memory twice, and InputError for a mistake in the batch,
        the loss or the weight. Any other exception comes from the loss, and passes through.
        """
        self._num_rows = count_rows(batch, samples=self._samples)
        if self._check:
            require_sum(self._model, self._loss, batch, samples=self._samples)
            self._check = False
        self._divisor = self._weight_of(batch)
        self._parameters[:] = self._model.parameters()  # adapters can come and go between steps
        self._batch = batch
        try:
            outcome = self._step.run(self._lengths_of(batch))
        finally:
            self._batch = None  # or it would take memory until the next one comes
        self._warn_of_few_digits()
        if len(outcome.parts) > 1:
            _warn_of_batch_norm(self._model)
        return outcome.loss

    def state_dict(self) -> dict[str, Any]:
        """Return, as JSON, what a resumed run needs to partition the same."""
        return self._cutter.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state, of a step that was made with the same arguments."""
        self._cutter.restore(state)

    def _backward(self, rows: NDArray[np.intp]) -> Tensor:
        """Add the gradient of some rows; return their share of the mean loss."""
        is_all = len(rows) == self._num_rows and bool((np.diff(rows) == 1).all())
        loss = self._loss(self._batch if is_all else take_rows(self._batch, rows, samples=self._samples))
        _require_gradient(loss)
        if loss.ndim == 0 and torch.finfo(loss.dtype).bits < 32:
            self._few_digits = loss.dtype
        share = loss.sum(dtype=torch.promote_types(loss.dtype, torch.float32)) / self._divisor
        (share if self._scale is None else self._scale(share)).backward()  # type: ignore[no-untyped-call]
        return share.detach()

    def _warn_of_few_digits(self) -> None:
        """Warn once: what a sum has rounded away before it comes here cannot be brought back."""
        if self._few_digits is None or self._has_warned:
            return
        self._has_warned = True
        digits = round(-math.log10(torch.finfo(self._few_digits).eps / 2))
        warnings.warn(
            f"the loss is a sum in {str(self._few_digits).removeprefix('torch.')}, which keeps about {digits} decimal"
            " digits, however many rows it is of. Add up in float32: scores.float() before the loss, or"
            ' loss.float() of each row (reduction="none") before the sum.',
            stacklevel=3,
        )

    def _lengths_of(self, batch: Any) -> NDArray[np.int64]:
        if self._lengths is None:
            return np.ones(self._num_rows, dtype=np.int64)
        lengths = self._lengths(batch)
        tokens = np.asarray(lengths.tolist() if isinstance(lengths, Tensor) else lengths, dtype=np.int64)
        if tokens.shape != (self._num_rows,):
            raise InputError(
                what=f"lengths(batch) has shape {tokens.shape}",
                expected=f"a number for each of the {self._num_rows} rows",
            )
        return np.maximum(tokens, 1)

    def _weight_of(self, batch: Any) -> float:
        weight = float(self._num_rows if self._weight is None else self._weight(batch))
        if not (weight > 0 and math.isfinite(weight)):
            raise InputError(
                what=f"weight(batch) is {weight}", expected="more than 0", fix="leave such a batch out of the training"
            )
        return weight

    def _translate(self, event: Mapping[str, Any]) -> None:
        """Pass an event on with its cap in rows or padded tokens, and no higher than what the batch has."""
        if event["event"] == "cap":
            most = int(self._lengths_of(self._batch).max()) * self._num_rows
            unit = "rows" if self._lengths is None else "tokens"
            event = {**event, "before": min(event["before"], most), "after": min(event["after"], most), "unit": unit}
        elif event["event"] == "oom":
            event = {key: value for key, value in event.items() if key != "predicted_bytes"}
        self._on_event(event)


def _require_usable(model: nn.Module, *, max_rows: int | None, max_tokens: int | None, has_lengths: bool) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(
            what=f"AdaptiveStep was given a {type(model).__name__} as the model",
            expected="an nn.Module, whose parameters learn and whose buffers are put back",
            fix="nn.ModuleList([…]) for several models",
        )
    if isinstance(model, DistributedDataParallel):
        raise InputError(
            what="DistributedDataParallel waits for all ranks in each backward pass, and each may cut otherwise",
            expected="the module inside it",
            fix="AdaptiveStep(model.module, …), and all-reduce the gradients after each step",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(what="no parameter of the model learns", expected="one that requires a gradient")
    for name, limit in (("max_rows", max_rows), ("max_tokens", max_tokens)):
        if limit is not None and limit < 1:
            raise InputError(what=f"{name} is {limit}", expected="at least 1, or None")
    if max_tokens is not None and not has_lengths:
        raise InputError(what="max_tokens without lengths", expected="lengths, by which rows are cut, or max_rows")


def _require_gradient(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise InputError(
            what=f"loss(batch) is a {type(loss).__name__}", expected="a tensor: the sum of the rows' losses"
        )
    if not loss.requires_grad:
        raise InputError(
            what="loss(batch) has no gradient",
            expected="a loss in which parameters that require a gradient had a part",
            fix="look for no_grad(), detach() and item() in the loss function, and for frozen parameters",
        )


def _warn_of_batch_norm(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            warnings.warn(
                f"{type(module).__name__} {name!r} normalises over the rows of a piece: the gradient depends on how the"
                " batch is cut. GroupNorm or LayerNorm does not; nor does BatchNorm in eval().",
                stacklevel=3,
            )
            return


def _log(event: Mapping[str, Any]) -> None:
    logger = logging.getLogger("brim")
    if event["event"] == "oom":
        logger.warning("out of memory in the %s pass of %d rows: %s", event["where"], event["rows"], event["message"])
    elif event["event"] == "cap":
        logger.warning("at most %s %s at a time from now on", f"{event['after']:,}", event["unit"])


# In a batch of three the same row goes through other kernels, by which its loss in bf16 can differ by as much.
_TOLERANCE = 0.01


def require_sum(model: nn.Module, loss: Callable[[Any], Tensor], batch: Any, *, samples: bool) -> None:
    """Raise InputError where a row that is taken two and three times has the loss that it has when taken once.

    A mean does not grow with copies of a row, whatever it is taken over; a sum does. Without dropout, so that a mean
    is not missed; modes and random states are left as they were.
    """
    states = random_states()
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        losses = attempt(
            lambda: [loss(take_rows(batch, np.zeros(copies, dtype=np.intp), samples=samples)) for copies in (1, 2, 3)]
        )
    finally:
        for module in training:
            module.training = True
        restore_random_states(states)
    if isinstance(losses, OutOfMemory):
        return
    if not all(isinstance(value, Tensor) for value in losses):
        return  # the step itself says what is wrong with that
    once, twice, thrice = (float(value.detach().sum()) for value in losses)
    if once and math.isfinite(once) and all(abs(copies / once - 1) < _TOLERANCE for copies in (twice, thrice)):
        raise InputError(
            what="the loss function averages: two copies of a row have the loss of one",
            expected="the sum of the rows' losses, to be divided once, by the weight of the whole batch",
            fix='reduction="sum" or "none"; weight= for a mean over something else than rows;'
            " check=False if this is meant",
        )


Rows: TypeAlias = NDArray[np.intp] | slice


def count_rows(batch: Any, *, samples: bool) -> int:
    """Count the rows of a batch: by the first dimension of each of its columns, or the samples of a list.

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
    """Return a batch of these rows alone, in this order; everything that is not by row stays as it is.

    Neighbours in their order are views, which take no memory.
    """
    if samples:
        return [batch[int(row)] for row in rows]
    first, last = int(rows[0]), int(rows[-1])
    in_order = last - first == len(rows) - 1 and bool((np.diff(rows) == 1).all())
    return _take(batch, slice(first, last + 1) if in_order else rows)


def _columns(value: Any, name: str) -> Iterator[tuple[str, int]]:
    """Yield each column's name and number of rows."""
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
    """Say whether it is a tuple or a list with an item for each row, as PyTorch's loaders make of texts."""
    return (
        isinstance(value, (tuple, list)) and bool(value) and all(isinstance(i, (str, bytes, int, float)) for i in value)
    )


def _at_least_one(num_rows: int) -> int:
    if not num_rows:
        raise _wrong("an empty batch", "at least one row")
    return num_rows


def _wrong(what: str, expected: str, *, fix: str = "") -> InputError:
    return InputError(what=f"AdaptiveStep was given {what}", expected=expected, fix=fix)
