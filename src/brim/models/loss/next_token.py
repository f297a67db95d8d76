"""Turn a micro-batch into a loss sum, through an architecture's body and its head.

The loop divides the sums of an effective batch once by its supervised tokens, so a gradient does not depend on how
the batch was partitioned.

The computation from tokens to logits is split in two: body, and head with what follows. The head is the last matrix
product. Which modules these are, how the body is called, and what the architecture does before and after its head is
not looked up by name but found out: the architecture's own forward runs once with stand-ins for body and head, which
compute nothing and return numbers that can be recognised afterwards. What does not fit the pattern is left whole, with
a reason.

Legend: B rows, T tokens, S supervised tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from brim.models.loss.chunked import LogitTransform, chunked_loss_sum, chunked_scores
from brim.models.packing import PackedRows


class TokenBatch(Protocol):
    """Describe padded or packed rows, and where their supervised tokens are predicted (see brim.data.tokens)."""

    @property
    def input_ids(self) -> Tensor: ...  # [B, T] int64

    @property
    def targets(self) -> Tensor: ...  # [S] int64

    @property
    def target_rows(self) -> Tensor: ...  # [S] int64

    @property
    def logit_positions(self) -> Tensor: ...  # [S] int64, among B × num_logits

    @property
    def num_logits(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def packed(self) -> PackedRows | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScores:
    """Hold sums over the supervised tokens of each row, on the device."""

    loss: Tensor  # [B] float64 where the device has it, nats
    num_correct: Tensor  # [B] int64: the most probable token is the target
    num_supervised: Tensor  # [B] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class NextToken:
    """Learn which token follows: the objective of a language model, for training, scoring and tracing alike.

    head: the model's (`logit_head`), to do it in chunks; None: all logits are in memory at once.
    """

    head: LogitHead | None = None

    def loss(self, model: nn.Module, batch: TokenBatch, *, gradient_scale: Tensor | None = None) -> Tensor:
        """Sum the cross-entropy over the supervised tokens of a micro-batch, in fp32: a scalar, in nats.

        gradient_scale: where arithmetic is fp16 and the loss is scaled, all that this sum is multiplied by before the
        backward pass; chunks compute their gradients before it.
        """
        if self.head is None:
            return cross_entropy(target_logits(model, batch).float(), batch.targets, reduction="sum")
        return chunked_loss_sum(
            _target_hidden(self.head, batch),
            self.head.projection.weight,
            self.head.projection.bias,
            batch.targets,
            transform=self.head.transform,
            gradient_scale=gradient_scale,
        )

    def scores(self, model: nn.Module, batch: TokenBatch) -> RowScores:
        """Sum loss and hits by row, for evaluation, without gradients."""
        losses, hits = _whole_scores(model, batch) if self.head is None else _chunked_scores(self.head, batch)
        zeros = torch.zeros(batch.num_rows, device=losses.device, dtype=torch.int64)
        return RowScores(
            loss=_row_sums(losses, batch),
            num_correct=zeros.index_add(0, batch.target_rows, hits),
            num_supervised=zeros.index_add(0, batch.target_rows, torch.ones_like(hits)),
        )


def _row_sums(losses: Tensor, batch: TokenBatch) -> Tensor:
    """Return [B], each row's tokens summed in their order: on a GPU, index_add would sum them in any order."""
    wide = torch.float32 if losses.device.type == "mps" else torch.float64
    if batch.packed is not None:  # whose targets stand row by row; a table of rows and positions could be large
        counts = torch.zeros(batch.num_rows, device=losses.device, dtype=torch.int64)
        counts = counts.index_add(0, batch.target_rows, torch.ones_like(batch.target_rows))
        return torch.segment_reduce(losses.to(wide), "sum", lengths=counts, unsafe=True, initial=0.0)
    by_position = torch.zeros(batch.num_rows * batch.num_logits, device=losses.device, dtype=wide)
    by_position = by_position.index_copy(0, batch.logit_positions, losses.to(wide))
    return by_position.view(batch.num_rows, batch.num_logits).sum(dim=1)


def target_logits(model: nn.Module, batch: TokenBatch) -> Tensor:
    """Return logits [S, V] at the positions that predict the supervised tokens.

    No attention mask is passed: rows are padded on the right and attention is causal, so no real token sees padding,
    and without a mask the fast attention kernels can be used.
    """
    options = {"logits_to_keep": batch.num_logits} if _keeps_logits(model) else {}
    logits: Tensor = model(input_ids=batch.input_ids, use_cache=False, **positions_of(batch), **options).logits
    return logits[:, -batch.num_logits :].flatten(0, 1).index_select(0, batch.logit_positions)


def positions_of(batch: TokenBatch) -> dict[str, Tensor]:
    """Return what the model is told of where tokens stand: nothing of padded rows, which begin at 0."""
    return {} if batch.packed is None else {"position_ids": batch.packed.position_ids}


def _whole_scores(model: nn.Module, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return loss [S] and hits [S] of each supervised token."""
    logits = target_logits(model, batch)
    losses = cross_entropy(logits.float(), batch.targets, reduction="none")
    return losses, (logits.argmax(dim=-1) == batch.targets).long()


def _chunked_scores(head: LogitHead, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    scores = chunked_scores(
        _target_hidden(head, batch),
        head.projection.weight,
        head.projection.bias,
        batch.targets,
        transform=head.transform,
    )
    return scores.loss, scores.is_correct.long()


def _target_hidden(head: LogitHead, batch: TokenBatch) -> Tensor:
    """Return the head's input [S, D] at the positions that predict the supervised tokens."""
    hidden = head.hidden(batch.input_ids, **positions_of(batch))
    return hidden[:, -batch.num_logits :].flatten(0, 1).index_select(0, batch.logit_positions)


def base_model(model: Any) -> Any:
    """Return the architecture itself, without PEFT's wrapper; adapters' layers are inside it."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if get_base_model else model


def _keeps_logits(model: nn.Module) -> bool:
    """Return whether the architecture can leave out the logits of a row's first tokens; most of transformers' can."""
    architecture: type = type(base_model(model))  # PEFT's wrapper hides the signature
    return "logits_to_keep" in _parameters(architecture)


@cache
def _parameters(architecture: type) -> frozenset[str]:
    return frozenset(inspect.signature(architecture.forward).parameters)  # type: ignore[attr-defined]


_PROBE_TOKENS = 3


_SMALL, _LARGE = 2.0**-20, 1e9  # where a cap of logits does nothing; beyond any cap


_TOLERANCE = 1e-6  # some architectures turn their logits into fp32


_PLAIN = (bool, int, float, str, torch.dtype, type(None))


# What an architecture's forward may raise over stand-ins that are not what it expects.
_PROBE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitHead:
    """Run an architecture in its two parts."""

    body: nn.Module
    positional: tuple[Any, ...]  # what the architecture calls its body with; `TOKENS` stands for the tokens
    keywords: Mapping[str, Any]
    projection: nn.Linear
    hidden_scale: float  # the body's output is multiplied by it before the head
    transform: LogitTransform

    def hidden(self, input_ids: Tensor, **others: Tensor) -> Tensor:
        """Return the head's input: [B, T, D]. others: what the body is given beside the tokens."""
        positional = [input_ids if value is TOKENS else value for value in self.positional]
        keywords = {name: input_ids if value is TOKENS else value for name, value in self.keywords.items()}
        hidden: Tensor = self.body(*positional, **{**keywords, **others})[0]
        return hidden if self.hidden_scale == 1 else hidden * self.hidden_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class NoLogitHead:
    """Say why an architecture is run whole."""

    reason: str


class _Tokens:
    """Stand for the tokens among a call's arguments."""


TOKENS = _Tokens()


def logit_head(model: nn.Module) -> LogitHead | NoLogitHead:
    """Find the two parts of a causal language model of transformers, with or without LoRA.

    Nothing is computed with weights, so they may be of any kind or nowhere. But numbers are looked at: no fake tensor
    mode may be active.
    """
    architecture = base_model(model)
    projection = architecture.get_output_embeddings()
    reason = _unfit(projection)
    if reason is not None:
        return NoLogitHead(reason=reason)
    was_training = architecture.training
    try:
        found = []
        with torch.device("cpu"):  # a model without values is built where the default device is another
            for architecture.training in (was_training, not was_training):
                found.append(_probed(architecture, projection))
    except _PROBE_ERRORS as error:
        return _not_in_parts(architecture, f"{type(error).__name__} in its forward")
    finally:
        architecture.training = was_training
    alike = found[0] == found[1]
    return found[0] if alike else _not_in_parts(architecture, "its forward is another one in training")


def _unfit(projection: nn.Module | None) -> str | None:
    """Return why this is not a matrix product that can be done with its weights alone; None if it is."""
    if projection is None:
        return "the model has no output layer"
    if type(projection) is not nn.Linear:
        library = type(projection).__module__.partition(".")[0]
        return f"the output layer is a {type(projection).__name__} of {library}, not a plain linear layer"
    if "forward" in vars(projection) or projection._forward_hooks or projection._forward_pre_hooks:
        return "the output layer has hooks"
    return None


def _not_in_parts(architecture: nn.Module, why: str) -> NoLogitHead:
    return NoLogitHead(reason=f"{type(architecture).__name__} cannot be run as body and output layer: {why}")


def _probed(architecture: nn.Module, projection: nn.Linear) -> LogitHead | NoLogitHead:
    tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64)
    assert type(tokens) is Tensor, "a fake tensor mode is active"
    given, output = _numbers(projection.in_features), _numbers(projection.out_features)
    output[0, :, :2] = torch.tensor([_SMALL, _LARGE])
    with _stand_ins(architecture, projection, hidden=given, output=output) as calls:
        logits = architecture(input_ids=tokens, use_cache=False).logits
    if len(calls) != 2 or calls[1].module is not projection:
        return _not_in_parts(architecture, "its forward calls other modules, too")
    body, head = calls
    positional = tuple(TOKENS if value is tokens else value for value in body.positional)
    keywords = {name: TOKENS if value is tokens else value for name, value in body.keywords.items()}
    values = [*positional, *keywords.values()]
    if values.count(TOKENS) != 1 or not all(isinstance(value, (*_PLAIN, _Tokens)) for value in values):
        return _not_in_parts(architecture, "the body is not given the tokens alone")
    hidden_scale = _hidden_scale(given, head.positional)
    if hidden_scale is None:
        return _not_in_parts(architecture, "what the body gives is changed before the output layer")
    transform = _transform(output, logits)
    if transform is None:
        return _not_in_parts(architecture, "what the output layer gives is changed in a way that is not known")
    return LogitHead(
        body=body.module,
        positional=positional,
        keywords=keywords,
        projection=projection,
        hidden_scale=hidden_scale,
        transform=transform,
    )


def _numbers(width: int) -> Tensor:
    """Return [1, tokens, width] of different numbers from -16 to 16, which 16 bits hold exactly; none is 0."""
    count = _PROBE_TOKENS * width
    numbers = torch.arange(count, dtype=torch.float64) % 31 - 15
    return torch.where(numbers == 0, 16.0, numbers).view(1, _PROBE_TOKENS, width)


def _hidden_scale(given: Tensor, received: tuple[Any, ...]) -> float | None:
    """Return the factor between the body's output and the head's input; None where there is not one."""
    if len(received) != 1 or not isinstance(received[0], Tensor) or received[0].shape != given.shape:
        return None
    ratio = received[0].double() / given
    scale = float(ratio[0, 0, 0])
    return scale if _same(ratio, torch.full_like(ratio, scale)) else None


def _transform(output: Tensor, logits: Any) -> LogitTransform | None:
    """Find what follows the head; None where it is not known."""
    if not isinstance(logits, Tensor) or logits.shape != output.shape:
        return None
    small, large = (float(value) for value in logits[0, 0, :2])
    scale = float(f"{small / _SMALL:.12g}")  # a cap takes something from the last digits
    cap = None if large > scale * _LARGE / 2 else large
    if not (math.isfinite(scale) and scale > 0 and (cap is None or cap > 0)):
        return None
    expected = output * scale if cap is None else torch.tanh(output * scale / cap) * cap
    return LogitTransform(scale=scale, cap=cap) if _same(logits.double(), expected) else None


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    module: nn.Module
    positional: tuple[Any, ...]
    keywords: Mapping[str, Any]


class _BodyOutput:
    """Stand for a body's output: the hidden states first, and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self._values = (hidden,)
        self.last_hidden_state = hidden

    def __getitem__(self, key: Any) -> Any:
        return self._values[key]

    def __getattr__(self, name: str) -> None:
        """Return None for caches, attentions and router logits, which were not asked for."""


@contextmanager
def _stand_ins(
    architecture: nn.Module, projection: nn.Module, *, hidden: Tensor, output: Tensor
) -> Iterator[list[_Call]]:
    """Have every module but the architecture itself record its call and answer at once."""
    calls: list[_Call] = []

    def stand_in(module: nn.Module) -> Callable[..., Any]:
        def forward(*positional: Any, **keywords: Any) -> Any:
            calls.append(_Call(module=module, positional=positional, keywords=keywords))
            return output.clone() if module is projection else _BodyOutput(hidden)

        return forward

    with ExitStack() as undo:
        for module in architecture.modules():
            if module is not architecture:
                undo.enter_context(patch.object(module, "forward", stand_in(module)))
        yield calls
