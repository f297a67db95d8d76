"""What becomes, in one prediction, of rows that cannot be used and of prompts that are too long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, TypeAlias, cast, get_args

from brim.api.session import Session
from brim.config import Config, InputFeature
from brim.errors import InputError, Problem

OnError: TypeAlias = Literal["stop", "skip"]
OnOverlong: TypeAlias = Literal["error", "truncate_left", "skip"]

_ON_BAD_ROW: dict[OnError, str] = {"stop": "error", "skip": "drop"}
_ON_OVERLONG: dict[OnOverlong, str] = {"error": "error", "truncate_left": "truncate", "skip": "drop"}


def check_on_error(name: str | None) -> OnError | None:
    """As a person typed it. Raises InputError."""
    _require_one_of(name, get_args(OnError), "on_error")
    return cast("OnError | None", name)


def check_on_overlong(name: str | None) -> OnOverlong | None:
    """As a person typed it. Raises InputError."""
    _require_one_of(name, get_args(OnOverlong), "on_overlong")
    return cast("OnOverlong | None", name)


def with_policies(session: Session, *, on_error: OnError | None, on_overlong: OnOverlong | None) -> Session:
    """The session with other policies where they are given; else as its configuration says.

    `skip` leaves out and names in the ledger: rows that cannot be read, rows with which the prompt cannot be filled,
    empty prompts and prompts that are too long.
    """
    config = session.config
    changes: dict[str, Any] = {}
    if on_error is not None:
        changes["on_bad_row"] = _ON_BAD_ROW[on_error]
    if on_overlong is not None:
        changes["on_overlong"] = _ON_OVERLONG[on_overlong]
    elif on_error == "skip" and config.preprocessing.on_overlong in ("auto", "error"):
        changes["on_overlong"] = "drop"
    config = config.model_copy(update={"preprocessing": config.preprocessing.model_copy(update=changes)})
    return replace(session, config=_without_missing(config) if on_error == "skip" else config)


def _without_missing(config: Config) -> Config:
    """With rows left out that have no value where the prompt needs one, unless it is filled in."""
    return config.model_copy(update={"input_features": tuple(map(_dropping_missing, config.input_features))})


def _dropping_missing(feature: InputFeature) -> InputFeature:
    if feature.preprocessing.missing_value_strategy != "error":
        return feature
    preprocessing = feature.preprocessing.model_copy(update={"missing_value_strategy": "drop_row"})
    return feature.model_copy(update={"preprocessing": preprocessing})


def _require_one_of(name: str | None, known: tuple[str, ...], what: str) -> None:
    if name is not None and name not in known:
        option = what.replace("_", "-")
        raise InputError(Problem(what=f"{name!r} is not known", where=f"--{option}", expected=", ".join(known)))
