"""Load the tokenizer of a base model through `tokenizers` alone: no torch, no transformers.

An adapter's tokens are compared with those that the base model reads: a base of the same shapes can have others. What
is wrong with a tokenizer, or between it and the model, is reported as the folder's fault, with what to do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from brim.errors import InputError, ModelError, Problem
from brim.models.folders import ModelFolder, read_json

_CHUNK_TEXTS = 1024


_PROBE = "a"


_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class TextEncoder:
    """Encode texts as token ids and decode them.

    write: token ids of texts, with nothing put before or behind them. read: the text of ids, with or without special
    tokens. special: all special tokens, by id. begin: ids that the tokenizer puts before a text.
    special_tokens: the texts of the tokens that have a role: bos_token, eos_token and so on. bos_id: the token that
    begins a text, where the tokenizer has one. folder: where the tokenizer's files lie.
    """

    def __init__(
        self,
        write: Callable[[list[str]], list[list[int]]],
        read: Callable[[list[int], bool], str],
        *,
        eos_id: int,
        pad_id: int,
        bos_id: int | None,
        begin: list[int],
        folder: Path,
        special: Mapping[int, str],
        special_tokens: Mapping[str, str],
    ) -> None:
        self._write, self._read, self._begin = write, read, begin
        self.eos_id, self.pad_id, self.bos_id = eos_id, pad_id, bos_id
        self.folder, self.special_tokens, self.special_ids = folder, special_tokens, frozenset(special)
        longest_first = sorted((re.escape(text) for text in special.values() if text), key=len, reverse=True)
        self._special = re.compile("|".join(longest_first)) if longest_first else None

    def encode(self, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]:
        """Return token ids of each text. special_tokens: begin it as the tokenizer does, and leave its end open."""
        begin = self._begin if special_tokens else []
        starts = range(0, len(texts), _CHUNK_TEXTS)
        return [begin + ids for start in starts for ids in self._write(list(texts[start : start + _CHUNK_TEXTS]))]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of these tokens."""
        return self._read([int(token) for token in ids], skip_special_tokens)

    def count_special(self, text: str) -> int:
        """Return how often the text spells out a special token, such as </s>, which encoding turns into that token."""
        return sum(1 for _ in self._special.finditer(text)) if self._special else 0


def folder_encoder(tokenizer: Tokenizer, *, folder: Path, vocabulary: int | None, **known: Any) -> TextEncoder:
    """Return the encoder of a `tokenizers.Tokenizer`. vocabulary: tokens that the model has embeddings for."""
    file = folder / "tokenizer.json"

    def write(texts: list[str]) -> list[list[int]]:
        with tokenizer_errors(file):
            ids = [each.ids for each in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        require_within(ids, vocabulary, file)
        return ids

    def read(ids: list[int], skip_special_tokens: bool) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    added = tokenizer.get_added_tokens_decoder().items()
    special = {key: token.content for key, token in added if token.special}
    return TextEncoder(write, read, folder=folder, special=special, **known)


def load_encoder(folder: ModelFolder, *, trust_remote_code: bool = False) -> TextEncoder:
    """Load the tokenizer of a base model's folder. trust_remote_code: run the folder's own code where it needs that.

    EOS, BOS and padding come from tokenizer_config.json, special_tokens_map.json, generation_config.json or
    config.json, the first that names one; padding falls back to EOS, which is safe as masks go by position.
    Raises ModelError when the tokenizer is damaged, asks for code of its own that is not trusted, or names no EOS.
    """
    if folder.tokenizer_file is None:
        return _from_transformers(folder, trust_remote_code=trust_remote_code)
    with tokenizer_errors(folder.tokenizer_file):
        tokenizer = Tokenizer.from_file(str(folder.tokenizer_file))
        tokenizer.no_truncation()  # a tokenizer.json can carry limits of its own
        tokenizer.no_padding()
        begin = _begin(tokenizer.encode(_PROBE).ids, tokenizer.encode(_PROBE, add_special_tokens=False).ids)
    facts = _Facts(folder)
    _add_named_tokens(tokenizer, facts)
    eos_id = facts.token_id(tokenizer, "eos")
    if eos_id is None:
        raise ModelError(_no_eos(folder))
    vocabulary = vocabulary_of(folder.config)
    if vocabulary is not None and eos_id >= vocabulary:
        what = f"the end-of-sequence token is {eos_id:,}"
        raise ModelError(beyond(what, vocabulary, folder.tokenizer_file))
    bos_id = facts.token_id(tokenizer, "bos")
    pad_id = facts.token_id(tokenizer, "pad")
    return folder_encoder(
        tokenizer,
        eos_id=eos_id,
        pad_id=eos_id if pad_id is None or (vocabulary is not None and pad_id >= vocabulary) else pad_id,
        bos_id=bos_id,
        begin=begin,
        folder=folder.path,
        special_tokens=facts.named_tokens(),
        vocabulary=vocabulary,
    )


class _Facts:
    """Read what the folder's small files say about special tokens."""

    def __init__(self, folder: ModelFolder) -> None:
        files = ("tokenizer_config.json", "special_tokens_map.json")
        self._names = [_read_json(folder.path / file) for file in files]
        self._ids = [_read_json(folder.path / "generation_config.json"), folder.config]
        self._folder = folder.path

    def token(self, role: str) -> str | None:
        """Return the token's text; None where no file names it."""
        token = next((names[f"{role}_token"] for names in self._names if names.get(f"{role}_token")), None)
        text = token.get("content") if isinstance(token, dict) else token
        if token is None or isinstance(text, str):
            return text
        raise ModelError(
            what=f"{role}_token in tokenizer_config.json or special_tokens_map.json is not a token",
            where=str(self._folder),
            expected=f'"{role}_token": "…", or a mapping with the key content',
            fix="copy tokenizer_config.json from the original model again",
        )

    def named_tokens(self) -> dict[str, str]:
        """Return the text of each role's token: bos_token, eos_token and so on."""
        tokens = {f"{role}_token": self.token(role) for role in _ROLES}
        return {name: token for name, token in tokens.items() if token is not None}

    def token_id(self, tokenizer: Tokenizer, role: str) -> int | None:
        named = self.token(role)
        if named is not None:
            token_id = tokenizer.token_to_id(named)
            if token_id is not None:
                return int(token_id)
        for ids in self._ids:
            token_id = ids.get(f"{role}_token_id")
            if isinstance(token_id, list) and token_id:
                token_id = token_id[0]
            if type(token_id) is int and 0 <= token_id < 1 << 32 and tokenizer.id_to_token(token_id) is not None:
                return token_id
        return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}


def _add_named_tokens(tokenizer: Tokenizer, facts: _Facts) -> None:
    """Make the named EOS, BOS and padding tokens special, as transformers does, where tokenizer.json knows them."""
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    for role in ("bos", "eos", "pad"):
        named = facts.token(role)
        if named is not None and named not in special and tokenizer.token_to_id(named) is not None:
            tokenizer.add_special_tokens([AddedToken(named, special=True, normalized=False)])


def _begin(whole: Sequence[int], bare: Sequence[int]) -> list[int]:
    """Return the ids that a tokenizer puts before a text, seen on a probe.

    What it adds behind a text (some add EOS) is left off, since the answer comes there. As in transformers 5,
    tokenizer.json alone decides: `add_bos_token` in tokenizer_config.json has no say.
    """
    starts = [at for at in range(len(whole) - len(bare) + 1) if whole[at : at + len(bare)] == bare]
    return list(whole[: starts[0]]) if starts else []


def _no_eos(folder: ModelFolder) -> Problem:
    return Problem(
        what="the tokenizer names no end-of-sequence token, so an answer could not be taught to end",
        where=str(folder.path),
        expected="eos_token in tokenizer_config.json, as a token of tokenizer.json",
        fix='add e.g. "eos_token": "</s>" to tokenizer_config.json, or set eos_token_id in config.json',
    )


def _from_transformers(folder: ModelFolder, *, trust_remote_code: bool) -> TextEncoder:
    """Load the tokenizer of a folder without tokenizer.json, through transformers."""
    from transformers import AutoTokenizer

    try:
        # Left unset, transformers would ask at the terminal whether to run the folder's code.
        tokenizer = AutoTokenizer.from_pretrained(str(folder.path), trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever an older format's conversion needs or trips over
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ModelError(
                what="the tokenizer asks for its own code to be run",
                where=folder.name,
                fix="read that code; if you trust it, set `trust_remote_code: true`",
            ) from None
        raise ModelError(
            what=f"transformers cannot read the tokenizer: {error}",
            where=str(folder.path),
            expected="tokenizer.json",
            fix="save the tokenizer again with `tokenizer.save_pretrained(folder)`, which writes tokenizer.json",
        ) from None
    if tokenizer.eos_token_id is None:
        raise ModelError(_no_eos(folder))
    bare, eos_id = tokenizer(_PROBE, add_special_tokens=False)["input_ids"], int(tokenizer.eos_token_id)
    return TextEncoder(
        lambda texts: list(tokenizer(texts, add_special_tokens=False)["input_ids"]),
        lambda ids, skip: str(tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)),
        eos_id=eos_id,
        pad_id=eos_id if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id),
        bos_id=None if tokenizer.bos_token_id is None else int(tokenizer.bos_token_id),
        begin=_begin(tokenizer(_PROBE)["input_ids"], bare),
        folder=folder.path,
        special=dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)),
        special_tokens=dict(tokenizer.special_tokens_map),
    )


def require_same_tokens(trained: Path, base: ModelFolder) -> None:
    """Raise InputError when a token of the trained model's folder has another number in the base, or none.

    A base that has more tokens will do. Folders without tokenizer.json are not looked at.
    """
    ours, theirs = trained / "tokenizer.json", base.tokenizer_file
    if theirs is None or not ours.is_file() or ours.read_bytes() == theirs.read_bytes():
        return
    numbers = _numbers(theirs)
    for token, number in sorted(_numbers(ours).items(), key=lambda each: each[1]):
        if numbers.get(token) != number:
            there = f"is {numbers[token]:,}" if token in numbers else "is missing"
            raise InputError(
                what=f"this base model has other tokens than the run: {token!r} {there} there and {number:,} here",
                where=base.name,
                expected="the base that the run was trained on",
                fix="name that one with base_model=…",
            )


def _numbers(file: Path) -> dict[str, int]:
    with tokenizer_errors(file):
        return Tokenizer.from_file(str(file)).get_vocab()


COPY = "copy tokenizer.json from the original model again"


@contextmanager
def tokenizer_errors(file: Path) -> Iterator[None]:
    """Turn whatever `tokenizers` raises into a ModelError: it raises bare exceptions, and panics over some files."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        words = " ".join(str(error).split())
        raise ModelError(what=f"the tokenizer cannot be read: {words}", where=str(file), fix=COPY) from None


def vocabulary_of(config: dict[str, Any]) -> int | None:
    """Return the number of tokens that the model has embeddings for, from its config.json; None if it does not say."""
    nested = config.get("text_config")
    for section in (config, nested if isinstance(nested, dict) else {}):
        if isinstance(section.get("vocab_size"), int):
            return int(section["vocab_size"])
    return None


def require_within(encoded: Sequence[Sequence[int]], vocabulary: int | None, file: Path) -> None:
    """Raise ModelError for token ids that the model has no embedding for."""
    if vocabulary is None:
        return
    highest = max((max(ids) for ids in encoded if ids), default=0)
    if highest >= vocabulary:
        raise ModelError(beyond(f"the tokenizer makes the token {highest:,}", vocabulary, file))


def beyond(what: str, vocabulary: int, file: Path) -> Problem:
    """Return the problem of a token that the model does not have."""
    return Problem(
        what=f"{what}, and the base model has only tokens 0 to {vocabulary - 1:,}",
        where=str(file),
        expected="tokens below vocab_size in config.json",
        fix="use the tokenizer that came with the model, or give the model room (resize_token_embeddings)",
    )
