"""The way from tokens to logits, in two parts: an architecture's body, and the last matrix product with what follows.

Which modules these are, how the body is called, and what the architecture does before and after its head is not looked
up by name but found out: the architecture's own forward runs once with stand-ins for body and head, which compute
nothing, and is given numbers whose way can be told. What does not fit the pattern is left whole, with a reason.

Legend: B rows, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from brim.models.chunked_loss import LogitTransform

_PROBE_TOKENS = 3
_SMALL, _LARGE = 2.0**-20, 1e9  # where a cap of logits does nothing; beyond any cap
_TOLERANCE = 1e-6  # some architectures turn their logits into fp32
_PLAIN = (bool, int, float, str, torch.dtype, type(None))

# What an architecture's forward may raise over stand-ins that are not what it expects.
_PROBE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitHead:
    """An architecture that can be run in its two parts."""

    body: nn.Module
    positional: tuple[Any, ...]  # what the architecture calls its body with; `TOKENS` stands for the tokens
    keywords: Mapping[str, Any]
    projection: nn.Linear
    hidden_scale: float  # the body's output is multiplied by it before the head
    transform: LogitTransform

    def hidden(self, input_ids: Tensor) -> Tensor:
        """What the head is given: [B, T, D]."""
        positional = [input_ids if value is TOKENS else value for value in self.positional]
        keywords = {name: input_ids if value is TOKENS else value for name, value in self.keywords.items()}
        hidden: Tensor = self.body(*positional, **keywords)[0]
        return hidden if self.hidden_scale == 1 else hidden * self.hidden_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class NoLogitHead:
    """An architecture that is run whole, and why."""

    reason: str


class _Tokens:
    """Stands for the tokens among a call's arguments."""


TOKENS = _Tokens()


def logit_head(model: nn.Module) -> LogitHead | NoLogitHead:
    """The two parts of a causal language model of transformers, or of one with LoRA in it.

    Nothing is computed with weights, so they may be of any kind or nowhere. But numbers are looked at: no fake tensor
    mode may be active.
    """
    get_base_model: Any = getattr(model, "get_base_model", None)  # PEFT's wrapper; its layers stand in the base model
    architecture: Any = get_base_model() if get_base_model else model
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
    """Why this is no matrix product that can be done with its weights alone."""
    if projection is None:
        return "the model has no output layer"
    if type(projection) is not nn.Linear:
        library = type(projection).__module__.partition(".")[0]
        return f"the output layer is a {type(projection).__name__} of {library}, no plain linear layer"
    if "forward" in vars(projection) or projection._forward_hooks or projection._forward_pre_hooks:
        return "the output layer is hooked into"
    return None


def _not_in_parts(architecture: nn.Module, why: str) -> NoLogitHead:
    return NoLogitHead(reason=f"{type(architecture).__name__} is no body with an output layer behind it: {why}")


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
    """[1, tokens, width] of different numbers from -16 to 16, which 16 bits hold exactly; none is 0."""
    count = _PROBE_TOKENS * width
    numbers = torch.arange(count, dtype=torch.float64) % 31 - 15
    return torch.where(numbers == 0, 16.0, numbers).view(1, _PROBE_TOKENS, width)


def _hidden_scale(given: Tensor, received: tuple[Any, ...]) -> float | None:
    """By how much the head's input is the body's output; None where it is anything else."""
    if len(received) != 1 or not isinstance(received[0], Tensor) or received[0].shape != given.shape:
        return None
    ratio = received[0].double() / given
    scale = float(ratio[0, 0, 0])
    return scale if _same(ratio, torch.full_like(ratio, scale)) else None


def _transform(output: Tensor, logits: Any) -> LogitTransform | None:
    """What was made of the head's output; None where it is none of what is known."""
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
    """What a body gives, as far as anyone asks: the hidden states first, and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self._values = (hidden,)
        self.last_hidden_state = hidden

    def __getitem__(self, key: Any) -> Any:
        return self._values[key]

    def __getattr__(self, name: str) -> None:
        """Caches, attentions, router logits: none were asked for."""


@contextmanager
def _stand_ins(
    architecture: nn.Module, projection: nn.Module, *, hidden: Tensor, output: Tensor
) -> Iterator[list[_Call]]:
    """Every module but the architecture itself notes its call and answers at once."""
    calls: list[_Call] = []

    def stand_in(module: nn.Module) -> Callable[..., Any]:
        def forward(*positional: Any, **keywords: Any) -> Any:
            calls.append(_Call(module=module, positional=positional, keywords=keywords))
            return output.clone() if module is projection else _BodyOutput(hidden)

        return forward

    with ExitStack() as undo:
        for module in architecture.modules():
            if module is not architecture:
                undo.enter_context(_replaced_forward(module, stand_in(module)))
        yield calls


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = vars(module).get("forward")  # of a module that something has been hooked into
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own
