"""Planted tokens: in the environment while every verb succeeds, fails and is stopped; then looked for everywhere.

    python -m faults --only token

Looked for in every line of output and every byte of every file below the project, its temporary folder, its home and
its cache: as they are, in base64 at any offset, in hexadecimal, percent-encoded and in UTF-16, also in what parquet
and gzip have compressed.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import random
import shutil
import string
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from faults import Settings, Trial
from faults.forked import Brim, Done
from faults.hostile import CODE, hub
from faults.workshop import CONFIG, DATA, as_yaml, build

ROW = "token"
_VARIABLES = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "WANDB_API_KEY",
    "OPENAI_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "DB_PASSWORD",
)
_LOUD = {
    "TRANSFORMERS_VERBOSITY": "debug", "HF_HUB_VERBOSITY": "debug", "HF_DEBUG": "1", "DATASETS_VERBOSITY": "debug",
    "HF_HUB_DISABLE_XET": "1", "HTTPX_LOG_LEVEL": "debug",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One command. codes: with which it may end."""

    name: str
    arguments: tuple[str, ...]
    codes: tuple[int, ...] = (0,)
    prepare: Callable[[Path], None] = field(default=lambda folder: None)
    interrupt_when: str | None = None
    in_short: bool = True


def run(campaign: Settings) -> Iterator[Trial]:
    """Every attempt; with quiet libraries and with loud ones."""
    draw = random.Random(campaign.seed)
    tokens = {name: _token(name, draw) for name in _VARIABLES}
    number = 0
    with hub(echo=True) as server:
        for loud in (False,) if campaign.short else (False, True):
            outer = campaign.folder / ("loud" if loud else "quiet")
            environment = {**tokens, **_places(outer), **(_LOUD if loud else {})}
            environment |= {"HF_ENDPOINT": server.address, "HF_HUB_OFFLINE": "0"}
            mine = [attempt for attempt in attempts(tokens) if attempt.in_short or not campaign.short]
            with Brim(environment=environment) as brim:
                project = outer / "project"
                project.mkdir()
                build(project, brim)
                for attempt in mine:
                    if campaign.is_mine(number):
                        yield _trial(attempt, brim, project, tokens, "loud libraries" if loud else "quiet libraries")
                    number += 1


def _trial(attempt: Attempt, brim: Brim, project: Path, tokens: Mapping[str, str], how: str) -> Trial:
    copy = project.parent / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(project, copy)
    attempt.prepare(copy)
    given = {path for path in copy.rglob("*") if any(token in str(path) for token in tokens.values())}
    given |= {path for path in copy.rglob("*") if path.is_file() and found_in(path.read_bytes(), tokens)}
    interrupt_when = None if attempt.interrupt_when is None else copy / attempt.interrupt_when
    done = brim(*attempt.arguments, folder=copy, interrupt_when=interrupt_when)
    why = _leak(done, project.parent, given, tokens)
    if not why and done.code not in attempt.codes:
        why = f"exit code {done.code}: {done.err[-300:]}"
    return Trial(row=ROW, case=f"{attempt.name}, {how}", outcome="failed" if why else "passed", why=why)


def _leak(done: Done, outer: Path, given: set[Path], tokens: Mapping[str, str]) -> str:
    """Where a token was found; empty where none was. given: files in which we put one ourselves."""
    for stream, text in (("stdout", done.out), ("stderr", done.err)):
        for line in text.splitlines():
            if name := found_in(line.encode(), tokens):
                return f"{name} in a line of {stream}: {line[:200]}"
    for path in sorted(outer.rglob("*")):
        if path in given or any(parent in given for parent in path.parents):
            continue
        if name := found_in(str(path).encode(), tokens):
            return f"{name} in the name of {path.relative_to(outer)}"
        if path.is_file() and (name := found_in(path.read_bytes(), tokens)):
            return f"{name} in {path.relative_to(outer)}"
    return ""


def found_in(content: bytes, tokens: Mapping[str, str]) -> str:
    """The name of the first token that stands in the content, in any form; empty where none does."""
    for text in (content, *_unpacked(content)):
        for name, token in tokens.items():
            if any(form in text for form in forms(token)):
                return name
    return ""


def forms(token: str) -> list[bytes]:
    """How a token can be written down."""
    raw = token.encode()
    in_base64 = []
    for offset in range(3):
        padded = base64.b64encode(b"\0" * offset + raw)
        # The first and last characters also hold bits of the neighbours.
        in_base64.append(padded[4 if offset else 0 : len(padded) - 4])
    safe = [each.replace(b"+", b"-").replace(b"/", b"_") for each in in_base64]
    escaped = json.dumps(token)[1:-1].replace("/", "\\/").encode()
    quoted = quote(token, safe="").encode()
    return [raw, *in_base64, *safe, raw.hex().encode(), raw.hex().upper().encode(), escaped, quoted,
            token.encode("utf-16-le"), token.encode("utf-16-be"), raw[::-1]]  # fmt: skip


def _unpacked(content: bytes) -> Iterator[bytes]:
    """What parquet and gzip hold."""
    if content.startswith(b"PAR1"):
        with suppress(pa.ArrowException, OSError):
            table = pq.read_table(io.BytesIO(content))
            yield repr(table.schema.metadata).encode()
            yield json.dumps(table.to_pylist(), default=str, ensure_ascii=False).encode()
    if content.startswith(b"\x1f\x8b"):
        with suppress(OSError, EOFError, zlib.error):
            yield gzip.decompress(content)


def _token(name: str, draw: random.Random) -> str:
    letters = "".join(draw.choices(string.ascii_letters + string.digits, k=34))
    if "HUGGING" in name or name.startswith("HF_"):
        return f"hf_{letters}"
    return f"{letters[:12]}/{letters[12:24]}+{letters[24:]}" if "AWS" in name else f"plain{letters}"


def _places(outer: Path) -> dict[str, str]:
    """Home, caches and temporary files below one folder, so that they are looked through, too."""
    outer.mkdir()
    places = {
        "HOME": "home",
        "TMPDIR": "tmp",
        "HF_HOME": "cache/hf",
        "XDG_CACHE_HOME": "cache",
        "MPLCONFIGDIR": "cache/mpl",
    }
    for place in places.values():
        (outer / place).mkdir(parents=True, exist_ok=True)
    return {name: str(outer / place) for name, place in places.items()}


def attempts(tokens: Mapping[str, str]) -> list[Attempt]:
    """What is tried: success, failures of brim's and of libraries, and tokens where users put them by mistake."""
    token, password = tokens["HF_TOKEN"], tokens["DB_PASSWORD"]
    train = ("train", "config.yaml", "--dataset", DATA, "--output-directory", "new")
    login = f"https://someone:{token}@example.org/data.csv"
    return [
        Attempt(name="check", arguments=("check", "config.yaml", "--dataset", DATA)),
        Attempt(name="check --json", arguments=("check", "config.yaml", "--dataset", DATA, "--json"), in_short=False),
        Attempt(name="train", arguments=train),
        Attempt(name="train --resume", arguments=("train", "run", "--resume", "--dataset", DATA)),
        Attempt(
            name="Ctrl-C",
            arguments=(*train, "trainer.train_steps=500"),
            codes=(130,),
            interrupt_when="new/metrics.jsonl",
        ),
        Attempt(
            name="evaluate --texts",
            arguments=("evaluate", "run", "--dataset", DATA, "--texts", "--rows", "rows.parquet"),
        ),
        Attempt(name="predict", arguments=("predict", "run", "--dataset", DATA, "--output", "new.parquet")),
        Attempt(name="schema", arguments=("schema",), in_short=False),
        Attempt(name="export", arguments=("export", "run", "--output", "new"), in_short=False),
        Attempt(name="export --merge", arguments=("export", "run", "--merge", "--output", "new"), in_short=False),
        Attempt(
            name="upload, refused by a Hub that repeats the token",
            arguments=("upload", "run", "org/name"),
            codes=(1, 2),
        ),
        Attempt(
            name="a base model on a Hub that repeats the token",
            arguments=("check", "config.yaml", "base_model=org/name"),
            codes=(2,),
        ),
        Attempt(
            name="an adapter on a Hub that repeats the token",
            arguments=("check", "config.yaml", "adapter={type: lora, pretrained_adapter_weights: org/name}"),
            codes=(2,),
        ),
        Attempt(
            name="in an override",
            arguments=("check", "config.yaml", f"prompt.template={token} {{question}}"),
            codes=(2,),
        ),
        Attempt(name="as an override", arguments=("check", "config.yaml", token), codes=(2,)),
        Attempt(name="as a key of an override", arguments=("check", "config.yaml", f"{password}=1"), codes=(2,)),
        Attempt(name="as an option", arguments=("check", "config.yaml", f"--{token}"), codes=(2,)),
        Attempt(name="as a verb", arguments=(token,), codes=(2,), in_short=False),
        Attempt(name="as a configuration", arguments=("check", f"{token}.yaml"), codes=(2,), in_short=False),
        Attempt(name="in the data set's address", arguments=("check", "config.yaml", "--dataset", login), codes=(2,)),
        Attempt(
            name="in the base model's address", arguments=("train", "config.yaml", f"base_model={login}"), codes=(2,)
        ),
        Attempt(
            name="in the data set's path",
            arguments=("train", "config.yaml", "--dataset", f"{token}/{DATA}", "--output-directory", "new"),
            codes=(2,),
            prepare=lambda folder: _copy_data(folder, token),
        ),
        Attempt(
            name="in the output's path",
            arguments=("predict", "run", "--dataset", DATA, "--output", f"{password}.jsonl"),
            codes=(2,),
        ),
        Attempt(
            name="in the run folder's path",
            arguments=("train", "config.yaml", "--dataset", DATA, "--output-directory", token),
            codes=(2,),
            in_short=False,
        ),
        Attempt(
            name="in a comment of the configuration",
            arguments=train,
            prepare=lambda folder: _configure(folder, comment=f"# HF_TOKEN={token} {password}\n"),
        ),
        Attempt(
            name="in the configuration's template",
            arguments=train,
            codes=(2,),
            prepare=lambda folder: _configure(folder, prompt={"template": f"{password} {{question}}"}),
        ),
        Attempt(
            name="in the configuration's data set",
            arguments=("train", "config.yaml", "--output-directory", "new"),
            codes=(2,),
            prepare=lambda folder: _configure_with_data(folder, token),
        ),
        Attempt(
            name="in a wrong value of the configuration",
            arguments=train,
            codes=(2,),
            prepare=lambda folder: _configure(folder, precision=token, adapter=password),
        ),
        Attempt(
            name="in YAML that is none",
            arguments=train,
            codes=(2,),
            prepare=lambda folder: _configure(folder, comment=f"{token}: [{password}\n"),
        ),
        Attempt(
            name="in data that is none",
            arguments=("check", "config.yaml", "--dataset", "bad.jsonl"),
            codes=(2,),
            prepare=lambda folder: _write(folder / "bad.jsonl", f'{{"question": "{token}", "{password}'),
        ),
        Attempt(
            name="a damaged base model",
            arguments=train,
            codes=(2,),
            prepare=lambda folder: _write(folder / "base" / "model.safetensors", "x" * 100),
        ),
        Attempt(
            name="a base model that asks for code",
            arguments=train,
            codes=(2,),
            prepare=_with_code,
            in_short=False,
        ),
        Attempt(
            name="a damaged run",
            arguments=("predict", "run", "--dataset", DATA, "--output", "new.jsonl"),
            codes=(1, 2),
            prepare=lambda folder: _write(folder / "run" / "model" / "adapter_model.safetensors", "x" * 100),
        ),
    ]


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _copy_data(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    shutil.copy(folder / DATA, folder / name)


def _configure_with_data(folder: Path, name: str) -> None:
    _copy_data(folder, name)
    _configure(folder, dataset=f"{name}/{DATA}")


def _configure(folder: Path, *, comment: str = "", **changes: object) -> None:
    (folder / "config.yaml").write_text(comment + as_yaml({**CONFIG, **changes}))


def _with_code(folder: Path) -> None:
    (folder / "base" / "evil.py").write_bytes(CODE)
    file = folder / "base" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": {"AutoConfig": "evil.M"}}))
