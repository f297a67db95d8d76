"""What layers of a model make of rows: one vector a row, or one a token.

Legend: B rows, T tokens, D width of a layer's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize as to_unit_length

from brim.data import TokenRows
from brim.data.collate import collate
from brim.errors import InputError, Problem
from brim.infer.named_layers import LAST
from brim.infer.passes import base_model
from brim.infer.rows_at_once import Batches, batches, longest_first
from brim.infer.vectors import VectorStore
from brim.models.precision import Precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Pooling: TypeAlias = Literal["mean", "last"] | None


def first_vectors(rows: TokenRows, pooling: Pooling) -> NDArray[np.int64]:
    """[N + 1]: at which vector each row's begin, and where the last row's end."""
    counts = rows.lengths if pooling is None else np.ones(len(rows), dtype=np.int64)
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def collect_activations(
    model: PreTrainedModel,
    rows: TokenRows,
    layers: Mapping[str, nn.Module],
    *,
    into: Mapping[str, VectorStore],
    pooling: Pooling,
    normalize: bool,
    pad_id: int,
    batch_rows: int | Batches,
    device: torch.device,
    precision: Precision,
    on_batch: Callable[[int], None] = lambda rows: None,
) -> None:
    """Put the outputs of layers for each row into stores, in fp32, in the order of the rows (`first_vectors`).

    pooling: the mean over the row's tokens, its last token, or None for every token. normalize: to length 1.
    Rows of like length share a batch, the longest first, and fewer of them once memory has run out; only what is asked
    for is kept of a pass. No layer is hooked into any more when this ends, whatever ended it.
    Raises InputError for a layer that gives no vector a token, OutOfMemoryError when a row alone runs out of memory.
    """
    starts = first_vectors(rows, pooling)
    body = _to_run(base_model(model), layers)

    def pass_over(positions: NDArray[np.intp]) -> None:
        batch = collate([rows[int(position)] for position in positions], pad_id=pad_id).to(device)
        lengths = torch.from_numpy(rows.lengths[positions]).to(device)
        look = partial(_vectors, shape=batch.input_ids.shape, lengths=lengths, pooling=pooling, normalize=normalize)
        with torch.no_grad(), precision.autocast(device, keeps_copies=False), _seen_in(layers, look) as seen:
            body(input_ids=batch.input_ids, use_cache=False)
        for name, store in into.items():
            for position, vectors in zip(positions, _only(seen[name], name).cpu().numpy(), strict=True):
                store.put(int(starts[position]), vectors[: starts[position + 1] - starts[position]])
        on_batch(len(positions))

    was_training = model.training
    model.eval()
    try:
        batches(batch_rows).run(rows, longest_first(rows), pass_over, doing="evaluation")
    finally:
        model.train(was_training)


def _to_run(architecture: PreTrainedModel, layers: Mapping[str, nn.Module]) -> nn.Module:
    """The part of the model that has to run: without its output layer where that is not asked for."""
    body: nn.Module = architecture.base_model
    inside = set(body.modules())
    return body if all(layer in inside for layer in layers.values()) else architecture


Look: TypeAlias = Callable[[str, Any], Tensor]


@contextmanager
def _seen_in(layers: Mapping[str, nn.Module], look: Look) -> Iterator[dict[str, list[Tensor]]]:
    """What `look` makes of each layer's output, call after call, as long as the block runs."""
    seen: dict[str, list[Tensor]] = {name: [] for name in layers}

    def hook(module: nn.Module, given: Any, output: Any, *, name: str) -> None:
        seen[name].append(look(name, output))

    handles = [layer.register_forward_hook(partial(hook, name=name)) for name, layer in layers.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _vectors(
    name: str, output: Any, *, shape: torch.Size, lengths: Tensor, pooling: Pooling, normalize: bool
) -> Tensor:
    """[B, 1, D], or [B, T, D] without pooling, in fp32. Padding, on the right, has no part in it.

    output: of the layer; of several things the first, which is how transformers gives hidden states.
    """
    values = output
    if isinstance(output, tuple | list | dict):
        values = next(iter(output.values() if isinstance(output, dict) else output), None)
    if not isinstance(values, Tensor) or values.dim() < 3 or values.shape[:2] != shape:
        kind = f"a tensor {list(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise _unusable(f"the layer {name} gives {kind}, not a vector for each token")
    vectors = values.flatten(2)
    if pooling == "last":
        rows = torch.arange(len(vectors), device=vectors.device)
        vectors = vectors[rows, lengths - 1][:, None]
    vectors = vectors.float()
    if pooling == "mean":
        is_padding = torch.arange(shape[1], device=vectors.device) >= lengths[:, None]
        sums = vectors.masked_fill(is_padding[..., None], 0.0).sum(dim=1)
        vectors = (sums / lengths[:, None])[:, None]
    return to_unit_length(vectors, dim=-1) if normalize else vectors


def _only(seen: list[Tensor], name: str) -> Tensor:
    if len(seen) != 1:
        raise _unusable(f"the layer {name} is passed {len(seen)} times by each row")
    return seen[0]


def _unusable(what: str) -> InputError:
    return InputError(
        Problem(
            what=what,
            expected="a layer that is passed once and gives [rows, tokens, width]",
            fix=f'name another, or "{LAST}"',
        )
    )
