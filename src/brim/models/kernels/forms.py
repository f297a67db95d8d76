"""Let a model's norms, gated MLPs and rotary embeddings compute by other functions than its own, such as Liger's.

Which classes of a model compute what is tried on random tensors, not listed. Only this model's modules change: they get
a `forward` of their own; an attention module's is that of its class, with another `apply_rotary_pos_emb` among the
names that it sees. Weights and their names stay, so adapters, saving and loading know nothing of it.

Legend: B rows, T tokens, H query heads, K key heads, D features or head dimension, I features of a gated MLP.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Hold the functions of one library."""

    # x [..., D], weight [D], epsilon, what is added to the weight, and where 16 bits come in: see `_norm`
    norm: Callable[[Tensor, Tensor, float, float, str], Tensor]
    gate: Callable[[Tensor, Tensor], Tensor]  # silu(gate) * up, of [..., I] each
    # query [B, H, T, D], key [B, K, T, D], cosines and sines [B or 1, T, D]; may overwrite query and key
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """Say which classes, by their full names, compute what `Kernels` has."""

    norms: Mapping[str, tuple[float, str]]  # with what is added to the weight, and the casting
    gated: tuple[str, ...]
    rotating: tuple[str, ...]  # whose modelling code rotates, not those that rotate in one piece with something else

    @property
    def names(self) -> list[str]:
        """Return the kinds of layers, by the names of the field."""
        kinds = {"RMSNorm": self.norms, "SwiGLU": self.gated, "RoPE": self.rotating}
        return [name for name, found in kinds.items() if found]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKernels:
    """Hold what a model's layers are to compute by."""

    forms: Forms
    kernels: Kernels

    def use(self, model: nn.Module) -> None:
        """Let the model's modules, with adapters or without, compute so from now on."""
        rotating: dict[type, Any] = {}
        for module in model.modules():
            kind, name = type(module), _name_of(module)
            if name in self.forms.norms:
                self._bind(module, _normed_by(self.kernels, _epsilon(module) or 0.0, *self.forms.norms[name]))
            elif name in self.forms.gated:
                self._bind(module, _gated_by(self.kernels))
            elif name in self.forms.rotating:
                if kind not in rotating:
                    rotating[kind] = _rotating_by(self.kernels, cast(FunctionType, kind.forward))
                self._bind(module, rotating[kind])

    def _bind(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        vars(module)["forward"] = MethodType(forward, module)


def _normed_by(kernels: Kernels, epsilon: float, offset: float, casting: str) -> Callable[[Any, Tensor], Tensor]:
    return lambda module, x: kernels.norm(x, module.weight, epsilon, offset, casting)


def _gated_by(kernels: Kernels) -> Callable[[Any, Tensor], Tensor]:
    return lambda module, x: module.down_proj(kernels.gate(module.gate_proj(x), module.up_proj(x)))


def _rotating_by(kernels: Kernels, forward: FunctionType) -> FunctionType:
    """Return a class's `forward`, which sees another function where it rotates."""
    own = forward.__globals__[_ROTATE]

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *others: Any, **options: Any) -> Any:
        is_plain = not others and not options and query.dim() == 4 and cos.dim() == 3
        if is_plain and query.shape[-1] == key.shape[-1] == cos.shape[-1]:
            return kernels.rotate(query, key, cos, sin)
        return own(query, key, cos, sin, *others, **options)

    names = {**forward.__globals__, _ROTATE: rotate}
    made = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


_ROTATE = "apply_rotary_pos_emb"  # in transformers' modelling code, one function for each architecture
_TOLERANCE = 1e-5  # in fp32: rounding makes some 1e-7, another formula more than 1e-2
_CASTINGS = ("llama", "gemma")  # Liger's names
# What modules raise over tensors, or a number of them, that they do not take: another signature, other dimensions or
# sizes, an object in place of a tensor. Such a module is none of these layers. Any other error is raised.
_NOT_TAKEN = (TypeError, ValueError, RuntimeError, IndexError, AttributeError, AssertionError)


def forms_of(model: nn.Module) -> Forms:
    """Try the model's classes on random tensors. model: in fp32, on a CPU; it is left as it is."""
    norms, gated, rotating = {}, [], []
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(0)
        for name, module in {_name_of(module): module for module in model.modules()}.items():
            try:
                if (form := _norm_form(module)) is not None:
                    norms[name] = form
                elif _is_gated(module):
                    gated.append(name)
                elif _rotates(type(module)):
                    rotating.append(name)
            except _NOT_TAKEN:
                continue
    return Forms(norms=norms, gated=tuple(gated), rotating=tuple(rotating))


def _name_of(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _epsilon(module: nn.Module) -> float | None:
    found = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    return found if isinstance(found, float) else None


def _norm_form(module: nn.Module) -> tuple[float, str] | None:
    """Return the form of a root mean square norm; None for all else, and for PyTorch's, which is one kernel on CUDA."""
    weight, epsilon = getattr(module, "weight", None), _epsilon(module)
    if len(list(module.parameters())) != 1 or epsilon is None or isinstance(module, nn.RMSNorm):
        return None
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or not _takes_one(module):
        return None
    module = copy.deepcopy(module)
    drawn = module.get_parameter("weight").uniform_(0.5, 1.5).clone()
    x = torch.randn(50, len(weight))
    expected = module(x)
    narrow, low = module.bfloat16()(x.bfloat16()), drawn.bfloat16()

    def rounds_apart(form: tuple[float, str]) -> float:
        return float((PLAIN.norm(x.bfloat16(), low, epsilon, *form).float() - narrow.float()).abs().mean())

    tried = product((0.0, 1.0), _CASTINGS)
    forms = [form for form in tried if _is_near(PLAIN.norm(x, drawn, epsilon, *form), expected)]
    return min(forms, key=rounds_apart, default=None)


def _is_gated(module: nn.Module) -> bool:
    """Return whether this is an MLP of three linear layers whose gate is a SiLU."""
    layers = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(isinstance(each, nn.Linear) for each in layers) or not _takes_one(module):
        return False
    gate, up, down = cast("list[nn.Linear]", layers)
    x = torch.randn(5, gate.in_features)
    return _is_near(copy.deepcopy(module).train()(x), down(PLAIN.gate(gate(x), up(x))))  # training: with what it drops


def _rotates(kind: type[nn.Module]) -> bool:
    """Return whether a class's `forward` rotates both halves of each head, by a function of its module."""
    forward = kind.forward
    if not isinstance(forward, FunctionType) or _ROTATE not in forward.__code__.co_names:
        return False
    query, key = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 5, 16)
    angles = torch.randn(2, 5, 8).repeat(1, 1, 2)
    given = (query, key, angles.cos(), angles.sin())
    found = forward.__globals__[_ROTATE](*given)
    return all(_is_near(one, other) for one, other in zip(found, PLAIN.rotate(*given), strict=True))


def _takes_one(module: nn.Module) -> bool:
    return len(inspect.signature(type(module).forward).parameters) == 2


def _is_near(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and float((found - expected).norm()) <= _TOLERANCE * float(expected.norm())


def _norm(x: Tensor, weight: Tensor, epsilon: float, offset: float, casting: str) -> Tensor:
    """Divide by the root mean square, in fp32. llama: rounded before the weight comes in; gemma: after that."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    if casting == "llama":
        return (offset + weight) * wide.to(x.dtype)
    return (wide * (offset + weight.float())).to(x.dtype)


def _gate(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[:, None], sin[:, None]

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)

    return rotated(query), rotated(key)


# What classes are compared with.
PLAIN = Kernels(norm=_norm, gate=_gate, rotate=_rotate)
