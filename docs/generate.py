"""Write the generated pages: all configuration keys, from the schema; figures, from the benchmarks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from docs.figures import figures_page
from pydantic_core import PydanticUndefined

from brim.config.foreign import foreign_keys
from brim.config.introspect import Key, all_keys, expected, kind_of_entries, sections_of, type_name
from brim.config.ludwig import UnsupportedKey, unsupported_keys, unsupported_values
from brim.config.schema import Config, Section
from brim.config.text import flow, line

EXAMPLE = """\
base_model: path/to/a/model        # a folder, or a Hub id
adapter: lora

input_features:
  - name: prompt                   # made by the template below
    type: text
output_features:
  - name: output                   # a column of the data
    type: text

prompt:
  template: |
    ### Instruction: {instruction}
    ### Input: {input}
    ### Response:

trainer:
  type: finetune
  epochs: 3
  learning_rate: 0.0001
  effective_batch_size: 32         # rows of one update
  batch_size: auto                 # cut by length, as the memory allows
  optimizer:
    type: adam
  learning_rate_scheduler:
    decay: cosine
    warmup_fraction: 0.03

generation:
  do_sample: false
"""


_INTRODUCTION = """\
# Configuration

<!-- Written by `make docs` from the schema; changes here are lost. -->

One YAML file says everything. Its keys are those of Ludwig's language-model configuration (0.17), with the same
meaning; keys marked **brim** are brim's own. An unknown key is an error: it says what to write for [another tool's
key](#keys-of-other-tools), and which key is meant where only a letter or two differ. Any key can be set on the command
line, too: `brim train config.yaml trainer.epochs=1 input_features.0.column=question`. In the headings below, `*` stands
for an entry of a list, or for a label.

All mistakes come at once, those of the data with those of the configuration, each with its place. With `--json`, every
verb that fails prints one object on stdout, with the exit code that it leaves with (`where` is a file with its line, an
override, or a dotted key):

```json
{"error": {"kind": "ConfigError", "exit_code": 2, "problems": [
  {"what": "unknown key num_epochs", "where": "config.yaml:7", "expected": "", "fix": "write trainer.epochs: 3"}]}}
```

A configuration that fine-tunes with LoRA at an effective batch of 32 rows:
"""


def reference_page() -> str:
    """Return Markdown with a table for every section, then what Ludwig has and brim does not support yet."""
    parts = [_INTRODUCTION, f"```yaml\n{EXAMPLE}```\n"]
    parts += _sections()
    parts.append(_unsupported_keys())
    parts.append(_unsupported_values())
    parts.append(_foreign_keys())
    return "\n".join(parts).rstrip() + "\n"


def _sections() -> Iterator[str]:
    """Yield one part a section; those of which `type` chooses one come together."""
    yield "## The root\n\nWhat is trained, on what, and where.\n\n" + _table(Config, ())
    for key in _unique_section_keys():
        path = _below(key)
        variants = sections_of(key.field)
        text = f"## `{_dotted(path)}`\n\n"
        if len(variants) == 1:
            yield f"{text}{_intro(variants[0])}\n\n{_table(variants[0], path)}"
            continue
        parts = [f"{text}{key.description} Its keys depend on `type`.\n"]
        parts += [
            f"### `{_dotted(path)}`, `type: {type_name(v)}`\n\n{_intro(v)}\n\n{_table(v, path)}" for v in variants
        ]
        yield "\n".join(parts)


def _unique_section_keys() -> Iterator[Key]:
    """Yield the keys that hold sections, each path once."""
    with_sections = [key for key in all_keys() if sections_of(key.field)]
    for _, group in groupby(with_sections, key=lambda key: key.path):
        yield next(group)


def _table(section: type[Section], path: tuple[str, ...]) -> str:
    lines = ["| Key | Values | Default | Meaning | From |", "| --- | --- | --- | --- | --- |"]
    for name, field in section.model_fields.items():
        key = Key(path=(*path, name), section=section, field=field)
        below = sections_of(field)
        meaning = key.description
        if below:
            meaning += f" See [`{_dotted(_below(key))}`](#{_slug(_dotted(_below(key)))})."
        origin = "**brim**" if key.is_brims_own else "Ludwig"
        cells = [f"`{name}`", expected(field, quote="`"), _default(key), meaning, origin]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _below(key: Key) -> tuple[str, ...]:
    return key.path if kind_of_entries(key.field) is None else (*key.path, "*")


def _default(key: Key) -> str:
    default = key.field.get_default()
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, Section):
        name = type_name(type(default))
        return f"`{name}`" if name is not None else "as below"
    if isinstance(default, tuple):
        default = [item.model_dump(exclude_defaults=True) if isinstance(item, Section) else item for item in default]
    return f"`{_as_yaml(default)}`"


def _as_yaml(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def _intro(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split())


def _unsupported_keys() -> str:
    lines = [
        "## Ludwig's keys that are not supported yet",
        "",
        "Each is an error that says so, unless its value means that it is off: then it changes nothing and is",
        "accepted, so that a configuration which spells out Ludwig's defaults can stay as it is. `null` is always off;",
        "other such values stand in parentheses.",
        "",
        "| What it is for | Keys | Instead |",
        "| --- | --- | --- |",
    ]
    for (about, instead), entries in groupby(sorted(unsupported_keys(), key=_matter), key=_matter):
        keys = ", ".join(f"`{entry.key}`{_off(entry)}" for entry in entries)
        lines.append(f"| {about} | {keys} | {instead} |")
    return "\n".join(lines) + "\n"


def _matter(entry: UnsupportedKey) -> tuple[str, str]:
    return entry.about, entry.instead


def _off(entry: UnsupportedKey) -> str:
    if entry.off_when_empty:
        return " (nulls and zeros)"
    values = [f"`{json.dumps(value)}`" for value in entry.off if value is not None]
    return f" ({', '.join(values)})" if values else ""


def _unsupported_values() -> str:
    lines = [
        "## Ludwig's values that are not supported yet",
        "",
        "The key is supported, these values of it are not yet.",
        "",
        "| Key | Values | Supported |",
        "| --- | --- | --- |",
    ]
    for entry in unsupported_values():
        key = f"{entry.key}.type" if entry.is_type else entry.key
        values = ", ".join(f"`{_as_yaml(value)}`" for value in entry.values)
        lines.append(f"| `{key}` | {values} | {entry.expected} |")
    return "\n".join(lines) + "\n"


def _foreign_keys() -> str:
    lines = [
        "## Keys of other tools",
        "",
        "What Axolotl, TRL, transformers, LLaMA-Factory, Composer and torchtune write, and what brim has for it.",
        "Wherever one stands, the error has the line to write, with its value in brim's form. Only where its value",
        "asks for nothing that brim does not do anyway (`deepspeed: null`, `torch_compile: false`) it is accepted,",
        "with a note. Flags are answered in the same way: `--num-epochs 3` with `trainer.epochs=3`.",
        "",
        "| Keys | Example | brim |",
        "| --- | --- | --- |",
    ]
    for entry in foreign_keys():
        names = ", ".join(f"`{name}`" for name in entry.names)
        helped = entry.answer(entry.example if entry.target else True)
        written = ", ".join(f"`{line(key, value)}`" for key, value in helped.lines)
        example = f"`{flow(entry.example)}`" if written else ""
        lines.append(f"| {names} | {example} | {written or helped.words} |".replace("  |", " |"))
    return "\n".join(lines) + "\n"


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(path)


def _slug(heading: str) -> str:
    """Return the anchor that Markdown renderers make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def main() -> None:
    for name, text in (("configuration", reference_page()), ("figures", figures_page())):
        (Path(__file__).parent / f"{name}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
