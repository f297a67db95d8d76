"""Collect the outputs of a model's layers for rows: one vector a row, or one a token.

Legend: B rows, T tokens, D width of a layer's output.

Layers are named by module, by number, or as "last". The vectors, all of one width, may be written in any order: in
memory, or in a file without a name where that would be much.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize as to_unit_length
from torch.nn.utils.rnn import pad_sequence

from brim.config.text import misspelt
from brim.data.tokens import Batch, TokenRows, collate, pack
from brim.errors import InputError, WriteError
from brim.infer.engines import Batches, longest_first
from brim.models import Precision
from brim.models.loss import base_model, positions_of
from brim.models.packing import PackedAttention, passing

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Pooling: TypeAlias = Literal["mean", "last"] | None


def first_vectors(rows: TokenRows, pooling: Pooling) -> NDArray[np.int64]:
    """Return [N + 1]: at which vector each row's begin, and where the last row's end."""
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
    batches: Batches,
    device: torch.device,
    precision: Precision,
    packed: PackedAttention | None = None,
    on_batch: Callable[[int], None] = lambda rows: None,
) -> None:
    """Put the outputs of layers for each row into stores, in fp32, in the order of the rows (`first_vectors`).

    pooling: the mean over the row's tokens, its last token, or None for every token. normalize: to length 1. packed:
    the attention of packed rows; None: rows are padded.
    Rows of like length share a batch, the longest first, and fewer of them once memory has run out; only what is asked
    for is kept of a pass. No layer is hooked into any more when this ends, whatever ended it.
    Raises InputError for a layer that gives no vector a token, OutOfMemoryError when a row alone runs out of memory.
    """
    starts = first_vectors(rows, pooling)
    body = _to_run(base_model(model), layers)

    def pass_over(positions: NDArray[np.intp]) -> None:
        layout = collate if packed is None else pack
        batch = layout(rows.take(positions), pad_id=pad_id).to(device)
        lengths = torch.from_numpy(rows.lengths[positions]).to(device)
        look = partial(_vectors, batch=batch, lengths=lengths, pooling=pooling, normalize=normalize)
        with (
            torch.no_grad(),
            passing(packed, batch.packed),
            precision.autocast(device, keeps_copies=False),
            _seen_in(layers, look) as seen,
        ):
            body(input_ids=batch.input_ids, use_cache=False, **positions_of(batch))
        for name, store in into.items():
            if len(seen[name]) != 1:
                raise _unusable(f"the layer {name} is passed {len(seen[name])} times by each row")
            for position, vectors in zip(positions, seen[name][0].cpu().numpy(), strict=True):
                store.put(int(starts[position]), vectors[: starts[position + 1] - starts[position]])
        on_batch(len(positions))

    was_training = model.training
    model.eval()
    try:
        batches.run(rows, longest_first(rows), pass_over, doing="evaluation")
    finally:
        model.train(was_training)


def _to_run(architecture: PreTrainedModel, layers: Mapping[str, nn.Module]) -> nn.Module:
    """Return the part of the model that has to run: without its output layer where that is not asked for."""
    body: nn.Module = architecture.base_model
    inside = set(body.modules())
    return body if all(layer in inside for layer in layers.values()) else architecture


@contextmanager
def _seen_in(layers: Mapping[str, nn.Module], look: Callable[[str, Any], Tensor]) -> Iterator[dict[str, list[Tensor]]]:
    """Collect what `look` makes of each layer's output, call after call, as long as the block runs."""
    seen: dict[str, list[Tensor]] = {name: [] for name in layers}

    def hook(module: nn.Module, given: Any, output: Any, *, name: str) -> None:
        seen[name].append(look(name, output))

    handles = [layer.register_forward_hook(partial(hook, name=name)) for name, layer in layers.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _vectors(name: str, output: Any, *, batch: Batch, lengths: Tensor, pooling: Pooling, normalize: bool) -> Tensor:
    """Return [B, 1, D], or [B, T, D] without pooling, in fp32. Padding, on the right, has no part in it.

    output: of the layer; of several things the first, which is how transformers gives hidden states.
    """
    values = output
    if isinstance(output, tuple | list | dict):
        values = next(iter(output.values() if isinstance(output, dict) else output), None)
    if not isinstance(values, Tensor) or values.dim() < 3 or values.shape[:2] != batch.input_ids.shape:
        kind = f"a tensor {list(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise _unusable(f"the layer {name} gives {kind}, not a vector for each token")
    vectors = values.flatten(2)
    if batch.packed is not None:
        of_rows = torch.split(vectors[0], list(batch.packed.lengths))[: batch.num_rows]
        vectors = pad_sequence(list(of_rows), batch_first=True)
    if pooling == "last":
        rows = torch.arange(len(vectors), device=vectors.device)
        vectors = vectors[rows, lengths - 1][:, None]
    vectors = vectors.float()
    if pooling == "mean":
        is_padding = torch.arange(vectors.shape[1], device=vectors.device) >= lengths[:, None]
        sums = vectors.masked_fill(is_padding[..., None], 0.0).sum(dim=1)
        vectors = (sums / lengths[:, None])[:, None]
    return to_unit_length(vectors, dim=-1) if normalize else vectors


def _unusable(what: str) -> InputError:
    return InputError(
        what=what,
        expected="a layer that is passed once and gives [rows, tokens, width]",
        fix=f'name another, or "{LAST}"',
    )


LayerName: TypeAlias = str | int


LAST = "last"


def named_layers(model: PreTrainedModel, wanted: Sequence[LayerName]) -> dict[str, nn.Module]:
    """Return each name as it was given, with its module.

    A number is that of a decoder layer, from 0; negative ones count from the end. "last" is what the output layer
    reads: the last layer's output after the final normalisation. Any other name is that of a module, as in
    `named_modules()` of the base model, with or without the prefix of its body.
    Raises InputError, with the nearest name, for a layer that is not there, is named twice, or when none is named.
    """
    architecture = base_model(model)
    if not wanted:
        raise InputError(what="no layer is named", expected=_EXPECTED, fix=f'name "{LAST}", say')
    twice = [str(name) for position, name in enumerate(wanted) if str(name) in map(str, wanted[:position])]
    if twice:
        raise InputError(what=f"the layer {twice[0]} is named twice", fix="name it once")
    return {str(name): _named(architecture, name) for name in wanted}


_EXPECTED = f'the number of a decoder layer, "{LAST}", or the name of a module'


def _named(architecture: PreTrainedModel, name: LayerName) -> nn.Module:
    body: nn.Module = architecture.base_model
    if name == LAST and body is architecture:
        what = f"{type(architecture).__name__} has no part before its output layer that is known"
        raise InputError(what=what, fix="name a module, the final normalisation, say")
    if name == LAST:
        return body
    if isinstance(name, int) or name.removeprefix("-").isdecimal():  # a command line passes text alone
        return _numbered(body, int(name), count=architecture.config.get_text_config().num_hidden_layers)
    prefix = architecture.base_model_prefix
    modules: dict[str, nn.Module] = dict(architecture.named_modules())
    for candidate in (name, f"{prefix}.{name}"):
        if candidate and candidate in modules:
            return modules[candidate]
    likely = misspelt(name, [*modules, *(module.removeprefix(f"{prefix}.") for module in modules)])
    raise InputError(
        what=f"the model has no layer {name!r}",
        expected=_EXPECTED,
        fix=f"did you mean {likely!r}?" if likely else "`model.named_modules()` of transformers lists the names",
    )


def _numbered(body: nn.Module, number: int, *, count: int) -> nn.Module:
    if not -count <= number < count:
        raise InputError(
            what=f"the model has no layer {number}",
            expected=f"0 to {count - 1}, or -1 to -{count} counted from the end",
        )
    for module in body.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module[number]
    raise InputError(what="the layers of this architecture have no numbers", fix=f'name a module, or "{LAST}"')


Vectors = NDArray[np.float32]


_ITEM_BYTES = 4


class VectorStore:
    """Keep places for N vectors of fp32, whose width is known once the first of them is there.

    folder: where the file lies, which has no name and disappears with the object; None keeps all in memory.
    """

    def __init__(self, num_vectors: int, *, folder: Path | None) -> None:
        self._num_vectors, self._folder = num_vectors, folder
        self.width = 0
        self._held: Vectors = np.zeros((num_vectors, 0), dtype=np.float32)
        with self._explained():
            self._file = None if folder is None else tempfile.TemporaryFile(dir=folder)  # noqa: SIM115

    def __enter__(self) -> VectorStore:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def put(self, first: int, vectors: Vectors) -> None:
        """Take [n, D] for the places from `first` on. Raises WriteError when the disk does not take them."""
        if not self.width:
            self.width = vectors.shape[1]
            if self._file is None:
                self._held = np.zeros((self._num_vectors, self.width), dtype=np.float32)
        assert vectors.shape[1] == self.width, "vectors of one width"
        if self._file is None:
            self._held[first : first + len(vectors)] = vectors
            return
        with self._explained():
            self._file.seek(first * self.width * _ITEM_BYTES)
            self._file.write(np.ascontiguousarray(vectors, dtype=np.float32).data)
            self._file.flush()

    def put_at(self, places: NDArray[np.int64], vectors: Vectors) -> None:
        """Take [n, D] for these places, of which neighbours are put together. Raises WriteError as `put` does."""
        ends = np.flatnonzero(np.diff(places) != 1) + 1
        for first, end in pairwise([0, *ends.tolist(), len(places)]):
            self.put(int(places[first]), vectors[first:end])

    def read(self, first: int, end: int) -> Vectors:
        """Return [end - first, D], what was put there; a view of what is held in memory."""
        if self._file is None:
            return self._held[first:end]
        self._file.seek(first * self.width * _ITEM_BYTES)
        content = self._file.read((end - first) * self.width * _ITEM_BYTES)
        return np.frombuffer(content, dtype=np.float32).reshape(end - first, self.width)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WriteError(
                what=f"the collected vectors cannot be written: {error.strerror}",
                where=str(self._folder),
                fix="free space there, or name an output on a larger disk",
            ) from error
