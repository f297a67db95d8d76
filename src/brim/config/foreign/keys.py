"""Answer the keys and values of other tools: Axolotl, TRL, transformers, LLaMA-Factory, Composer and torchtune.

The table is `keys.json`, by topic. Each entry names brim's key (`target`) and how a value is converted, or says in
`words` why there is nothing to write. A function that converts takes a value as they write it, and returns brim's, or a
`Help`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

Lines: TypeAlias = tuple[tuple[str, Any], ...]


Convert: TypeAlias = Callable[[Any], Any]


SCHEDULER = "trainer.learning_rate_scheduler"


SHARES = "preprocessing.split.probabilities"


DATA_FILES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".pq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Help:
    """Say what to do instead: dotted keys of brim with their values, and words."""

    lines: Lines = ()
    words: str = ""
    is_idle: bool = False  # the value asks for nothing that brim does not do in any case: the key may stay


def is_off(value: Any) -> bool:
    """Return whether a value switches its key off: null, false, 0, empty; also `no`, a text in YAML 1.2."""
    if isinstance(value, dict):
        return all(map(is_off, value.values()))
    return not value or (isinstance(value, str) and value.lower() in ("no", "off", "false", "none"))


@cache
def table() -> dict[str, Any]:
    """Return what `keys.json` holds: the keys by topic, values of brim's own keys, and choices by name."""
    keys: dict[str, Any] = json.loads(Path(__file__).with_name("keys.json").read_text(encoding="utf-8"))
    return keys


def choice(name: str | Sequence[Any], also: Sequence[Any] = ()) -> Convert:
    """Return a conversion that knows brim's value for some of theirs; others stay as they are.

    name: of a table of choices, or pairs of their value and brim's: a value, or the parts of a `Help`.
    """
    pairs = table()["choices"][name] if isinstance(name, str) else name
    choices = {theirs: _help(ours) if isinstance(ours, dict) else ours for theirs, ours in (*pairs, *also)}

    def chosen(value: Any) -> Any:
        if not isinstance(value, str):
            return choices.get(value, value) if isinstance(value, bool | int | float) else value
        plain = value.lower().removeprefix("torch.optim.").removeprefix("torch.")
        return choices.get(plain, plain)

    return chosen


def _help(given: Mapping[str, Any]) -> Help:
    return Help(**{**given, "lines": tuple((key, value) for key, value in given.get("lines", ()))})


def switch(line: tuple[str, Any], *, words: str) -> Convert:
    """Return a conversion of a switch: on, the line to write; off, it asks for nothing."""
    off = Help(words="remove it: brim does nothing of the kind unasked", is_idle=True)
    return lambda value: off if is_off(value) else Help(lines=(line,), words=words)


def bfloat16(value: Any) -> Any:
    """Convert transformers' mixed precision, whose `auto` is what brim does."""
    left_out = "brim takes bfloat16 wherever the GPU has it"
    if value == "auto":
        return Help(words=f"remove it: {left_out}", is_idle=True)
    if is_off(value):
        return Help(words=f"{left_out}; set precision: fp32 or fp16-mixed where it is not to")
    return Help(lines=(("precision", "bf16-mixed"),), words=f"left out, {left_out}")


def warm_up(value: Any) -> Any:
    """Convert a number of updates, or a share of the run."""
    if _is_share(value):
        return Help(lines=((f"{SCHEDULER}.warmup_fraction", value),))
    if value == 0:
        return Help(words="remove it: there is no warm-up unasked", is_idle=True)
    return f"{value}ba" if _is_count(value) else value


def steps_between(value: Any) -> Any:
    """Convert the updates between checkpoints; Composer writes 500ba or 1ep."""
    if _is_share(value):
        return Help(words="shares of the run have no key; trainer.checkpoints_per_epoch says how often in an epoch")
    number, unit = _duration(value)
    if unit == "ep":
        return Help(words="remove it: brim evaluates and saves at the end of each epoch")
    return number if unit == "ba" else value


def run_length(value: Any) -> Any:
    """Convert Composer's max_duration."""
    number, unit = _duration(value)
    keys = {"ep": "trainer.epochs", "ba": "trainer.train_steps", "sp": "trainer.train_samples"}
    return Help(lines=((keys[unit], number),)) if unit in keys else value


def micro_batch(value: Any) -> Any:
    """Convert a micro-batch; Composer's `auto` is what brim does."""
    words = "remove it: brim partitions each effective batch (trainer.effective_batch_size) so that it fits the memory"
    return Help(words=words) if value == "auto" else value


def checkpointing(value: Any) -> Any:
    """Convert names of checkpointing methods that brim lacks (`unsloth`, `offload`) to `true`."""
    return not is_off(value) if isinstance(value, str) and value != "auto" else value


def optimizer(value: Any) -> Any:
    """Convert a name, a mapping with keys, or torchtune's component."""
    if not isinstance(value, dict):
        return choice("optimizers")(value)
    name = choice("optimizers")(value.get("_component_", value.get("type", value.get("name"))))
    keys = {key: each for key, each in value.items() if key not in ("_component_", "type", "name", "lr", "fused")}
    rate = (("trainer.learning_rate", value["lr"]),) if "lr" in value else ()
    return Help(lines=(("trainer.optimizer", {"type": name, **keys}), *rate))


def nested(value: Any) -> Any:
    """Convert optimizer keys that are one level too deep, as in older Ludwig notebooks."""
    if not isinstance(value, dict):
        return Help(words="its keys stand in trainer.optimizer itself")
    return Help(
        lines=tuple(
            ("trainer.learning_rate" if name == "lr" else f"trainer.optimizer.{name}", each)
            for name, each in value.items()
        ),
        words="one level up",
    )


def held_out(value: Any) -> Any:
    """Convert the share of the rows that is held out for validation."""
    if value == 0 and not isinstance(value, bool):
        return [1.0, 0.0, 0.0]
    if _is_share(value):
        return [round(1 - value, 9), value, 0.0]
    return Help(words=f"the key is {SHARES}: the shares of train, validation and test, such as [0.95, 0.05, 0.0]")


def data_file(value: Any) -> Any:
    """Convert data sets to their paths, if all are local files."""
    paths: list[Any] = []
    for entry in value if isinstance(value, list) else [value]:
        path = (entry.get("data_files") or entry.get("path")) if isinstance(entry, dict) else entry
        paths += path if isinstance(path, list) else [path]
    if paths and all(isinstance(path, str) and path.endswith(DATA_FILES) for path in paths):
        return paths[0] if len(paths) == 1 else paths
    return Help(
        words="save the rows to local files and name them: dataset: FILE or [FILE, FILE], or --dataset FILE; "
        "input_features, output_features and prompt (or chat) say what their columns are"
    )


def modules(value: Any) -> Any:
    """Convert LLaMA-Factory's names of layers, which commas separate."""
    if value == "all":
        return "all-linear"
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else []
    return names if len(names) > 1 else value


def ramp(value: Any) -> Any:
    """Convert Megatron's first size, increment and samples."""
    if isinstance(value, list) and len(value) == 3 and all(map(_is_count, value)):
        first, increment, samples = value
        return {"length": f"{samples}sp", "from": first, "shape": "linear", "increment": increment}
    return value


def gibibytes(value: Any) -> Any:
    """Convert a bare whole number, which means GiB."""
    return f"{value} GiB" if _is_count(value) else value


def template_file(value: Any) -> Any:
    """Convert the path of a Jinja file; names of templates are the other tool's own."""
    if isinstance(value, str) and value.endswith((".jinja", ".jinja2", ".j2")):
        return value
    return Help(
        words="set chat: {} for conversations: the tokenizer's own template writes them, or the file in chat.template"
    )


def _is_share(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < 1


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _duration(value: Any) -> tuple[int, str]:
    """Return number and unit of a duration; 500 means 500ba. What is not a duration has the unit ""."""
    text = f"{value}ba" if _is_count(value) else str(value)
    return (int(text[:-2]), text[-2:]) if text[:-2].isdecimal() else (0, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignKey:
    """Hold names that mean the same. `*` at a name's end stands for any ending; `a.b` is b in a section a."""

    names: tuple[str, ...]
    target: str = ""  # brim's key; empty where there is none
    example: Any = None  # a value that other tools' users write
    convert: Convert | None = None  # gives brim's value, or a Help where that is not simply another value
    words: str = ""
    off_counts: bool = False  # where there is no target: false, 0 and the like ask for something, too

    def answer(self, value: Any) -> Help:
        """Return what to write, or do, in place of this value."""
        if not self.target:
            return Help(words=self.words, is_idle=is_off(value) and not self.off_counts)
        made = value if self.convert is None else self.convert(value)
        return made if isinstance(made, Help) else Help(lines=((self.target, made),), words=self.words)


@cache
def foreign_keys() -> tuple[ForeignKey, ...]:
    """Return the keys that brim does not have."""
    return tuple(_entry(given) for topic in table()["keys"].values() for given in topic)


@cache
def foreign_values() -> tuple[ForeignKey, ...]:
    """Return brim's own keys, and sections, for whose values other tools have other words."""
    return tuple(map(_entry, table()["values"]))


def _entry(given: Mapping[str, Any]) -> ForeignKey:
    known = {name: value for name, value in given.items() if name != "why"}  # which is for who reads the table
    return ForeignKey(**{**known, "names": tuple(given["names"]), "convert": _convert(given.get("convert"))})


def _convert(given: Any) -> Convert | None:
    """Return the function of that name above, a choice by its table, or a switch with the line that it stands for."""
    if given is None:
        return None
    if isinstance(given, str):
        convert: Convert = globals()[given]
        return convert
    if "switch" in given:
        key, value = given["switch"]
        return switch((key, value), words=given.get("words", ""))
    return choice(given["choice"], given.get("also", ()))
