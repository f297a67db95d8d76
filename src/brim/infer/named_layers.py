"""The modules of a model that a person means: by name, by number, or "last"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from torch import nn

from brim.config.wording import misspelt
from brim.errors import InputError, Problem
from brim.infer.passes import base_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LayerName: TypeAlias = str | int
LAST = "last"


def named_layers(model: PreTrainedModel, wanted: Sequence[LayerName]) -> dict[str, nn.Module]:
    """Each name as it was given, and its module.

    A number is that of a decoder layer, from 0; negative ones count from the end. "last" is what the output layer
    reads: the last layer's output after the final normalisation. Any other name is that of a module, as in
    `named_modules()` of the base model, with or without the prefix of its body.
    Raises InputError, with the nearest name, for a layer that is not there, is named twice, or when none is named.
    """
    architecture = base_model(model)
    if not wanted:
        raise InputError(Problem(what="no layer is named", expected=_EXPECTED, fix=f'name "{LAST}", say'))
    twice = [str(name) for position, name in enumerate(wanted) if str(name) in map(str, wanted[:position])]
    if twice:
        raise InputError(Problem(what=f"the layer {twice[0]} is named twice", fix="name it once"))
    return {str(name): _named(architecture, name) for name in wanted}


_EXPECTED = f'the number of a decoder layer, "{LAST}", or the name of a module'


def _named(architecture: PreTrainedModel, name: LayerName) -> nn.Module:
    body: nn.Module = architecture.base_model
    if name == LAST and body is architecture:
        what = f"{type(architecture).__name__} has no part before its output layer that is known"
        raise InputError(Problem(what=what, fix="name a module, the final normalisation, say"))
    if name == LAST:
        return body
    number = _number(name)
    if number is not None:
        return _numbered(body, number, count=architecture.config.get_text_config().num_hidden_layers)
    prefix = architecture.base_model_prefix
    modules: dict[str, nn.Module] = dict(architecture.named_modules())
    for candidate in (str(name), f"{prefix}.{name}"):
        if candidate and candidate in modules:
            return modules[candidate]
    likely = misspelt(str(name), [*modules, *(module.removeprefix(f"{prefix}.") for module in modules)])
    raise InputError(
        Problem(
            what=f"the model has no layer {str(name)!r}",
            expected=_EXPECTED,
            fix=f"did you mean {likely!r}?" if likely else "`model.named_modules()` of transformers lists the names",
        )
    )


def _number(name: LayerName) -> int | None:
    """The number that was meant; a command line knows texts alone."""
    if isinstance(name, int):
        return name
    return int(name) if name.removeprefix("-").isdecimal() else None


def _numbered(body: nn.Module, number: int, *, count: int) -> nn.Module:
    if not -count <= number < count:
        raise InputError(
            Problem(
                what=f"the model has no layer {number}",
                expected=f"0 to {count - 1}, or -1 to -{count} counted from the end",
            )
        )
    for module in body.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module[number]
    raise InputError(Problem(what="the layers of this architecture have no numbers", fix=f'name a module, or "{LAST}"'))
