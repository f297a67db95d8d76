"""A model of fewer layers, and from two of them to the whole one. Torch-free.

Memory is linear in depth where layers are alike: what all layers share, and so much for each. Layers that alternate
(sliding and full attention) are alike by periods, and layers at the front can differ from the rest (DeepSeek's first
ones have no experts), so what is run is the front and one, then two, periods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from brim.memory.measure.result import PhasePeak

_DEPTH_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_FRONT_KEY = "first_k_dense_replace"


@dataclass(frozen=True, slots=True)
class Depths:
    """What is run in place of the whole model."""

    fewer: int  # layers
    more: int
    whole: int


def depths(config: Mapping[str, Any], layers: int) -> Depths | None:
    """Which two depths to run; None where the whole model is no deeper, or config.json does not say its depth.

    config: config.json. layers: what the user asked for, in periods of layers that differ.
    """
    section = _section(config)
    whole = num_layers(config)
    if whole is None:
        return None
    front = section.get(_FRONT_KEY)
    front = front if isinstance(front, int) else 0
    step = max(layers, 1) * _period(section, whole, front)
    found = Depths(front + step, front + 2 * step, whole)
    return found if found.more < whole else None


def num_layers(config: Mapping[str, Any]) -> int | None:
    """Decoder layers, from config.json."""
    section = _section(config)
    return next((int(section[key]) for key in _DEPTH_KEYS if isinstance(section.get(key), int)), None)


def with_layers(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """config.json of the same model with its first layers only; lists with an entry for each layer are cut, too."""
    whole = num_layers(config)
    section = dict(_section(config))
    for key, value in section.items():
        if key in _DEPTH_KEYS:
            section[key] = count
        elif isinstance(value, list) and len(value) == whole and "layer" in key:
            section[key] = value[:count]
    nested = config.get("text_config")
    return {**config, "text_config": section} if isinstance(nested, dict) else section


def extrapolated(fewer: PhasePeak, more: PhasePeak, of: Depths) -> PhasePeak:
    """The peak at the whole depth, on the line through two measured ones."""

    assert (fewer.phase, fewer.step) == (more.phase, more.step), "the same phase at two depths"
    return PhasePeak(
        phase=more.phase,
        step=more.step,
        allocated_bytes=_or_none(fewer.allocated_bytes, more.allocated_bytes, of),
        reserved_bytes=_or_none(fewer.reserved_bytes, more.reserved_bytes, of),
        outside_bytes=_or_none(fewer.outside_bytes, more.outside_bytes, of),
        total_bytes=_on_line(fewer.total_bytes, more.total_bytes, of),
        end_bytes=_on_line(fewer.end_bytes, more.end_bytes, of),
        baseline_bytes=more.baseline_bytes,
    )


def _or_none(first: int | None, second: int | None, of: Depths) -> int | None:
    return None if first is None or second is None else _on_line(first, second, of)


def _on_line(first: int, second: int, of: Depths) -> int:
    return round(first + (second - first) * (of.whole - of.fewer) / (of.more - of.fewer))


def _section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _period(section: Mapping[str, Any], whole: int, front: int) -> int:
    """Layers after which their kinds repeat: the smallest number that does for every list of kinds."""
    kinds = [
        value[front:]
        for key, value in section.items()
        if isinstance(value, list) and len(value) == whole and "layer" in key
    ]
    least = 1
    while any(each[least:] != each[:-least] for each in kinds if least < len(each)):
        least += 1
    return least
