"""Send a finished run's model, or an exported folder, to the Hub: one commit, and nothing but the package."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from brim.config.text import MASK, mask_text
from brim.errors import BrimError, ExportError, InputError
from brim.notes import Say
from brim.report import listening, show
from brim.storage import MANIFEST
from brim.train import RunFolder
from brim.workflows.export.export import CARD, FACTS, Package, package_of_export, package_of_run

if TYPE_CHECKING:
    from huggingface_hub import HfApi


TOKEN = "HF_TOKEN"


_DEFAULT_REVISION = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadResult:
    """Hold what an upload put on the Hub."""

    repo_id: str
    url: str  # of the commit
    private: bool
    files: tuple[str, ...]
    num_bytes: int

    def __repr__(self) -> str:
        seen_by = "private" if self.private else "public"
        return f"UploadResult: {len(self.files)} files, {self.num_bytes:,} bytes, {seen_by}; commit: {self.url}"


def upload(
    folder: Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    commit_message: str | None = None,
    say: Say | None = show,
) -> UploadResult:
    """Upload a run, as `export` would write it, or a folder that `export` wrote; all of it or nothing.

    repo_id: organisation/name, made if it does not exist. private: make it so, and refuse a repository that is public.
    revision: a branch, made if it does not exist.
    The token is read from HF_TOKEN and from nowhere else, and is never part of a message.
    Raises InputError for a name, token or right that is missing; ExportError when the Hub cannot be reached or fails.
    """
    _check_name(repo_id)
    token = _token()
    package = _package(folder)
    with _hub_errors(repo_id, token), _bars_for_people(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = _commit(package, repo_id, token, private, revision, commit_message or f"Upload {package.kind} by brim")
    for warning in warned:
        if issubclass(warning.category, UserWarning):
            with listening(say) as told:
                told(_clean(str(warning.message), token))
    return result


def _commit(
    package: Package, repo_id: str, token: str, private: bool, revision: str | None, message: str
) -> UploadResult:
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(token=token)
    api.create_repo(repo_id, private=private or None, exist_ok=True)
    is_private = _visibility(api, repo_id, private)
    if revision is not None and revision != _DEFAULT_REVISION:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    files = {**package.files, CARD: package.card.encode()}
    done = api.create_commit(
        repo_id,
        operations=[CommitOperationAdd(name, file) for name, file in files.items()],
        commit_message=message,
        revision=revision,
    )
    return UploadResult(
        repo_id=repo_id,
        url=str(done.commit_url),
        private=is_private,
        files=tuple(sorted(files)),
        num_bytes=package.num_bytes + len(package.card.encode()),
    )


def _visibility(api: HfApi, repo_id: str, private: bool) -> bool:
    """Return whether the repository is private. Raises InputError for a public one where a private one is wanted."""
    is_private = bool(api.repo_info(repo_id).private)
    if private and not is_private:
        raise InputError(
            what=f"{repo_id} exists and is public; nothing was uploaded",
            where="--private",
            fix="make it private on the Hub, choose another name, or leave --private out",
        )
    return is_private


def _package(folder: Path) -> Package:
    if (folder / FACTS).is_file() and (folder / MANIFEST).is_file():
        return package_of_export(folder)
    run = RunFolder(folder)
    if not (run.config.is_file() and (run.is_run or run.model.is_dir())):
        raise InputError(
            what="this is neither a run nor an export",
            where=str(folder),
            expected="the folder that `brim train` or `brim export` wrote",
            fix="name that folder" if folder.name != "model" else "name the run's folder, not the one in it",
        )
    return package_of_run(RunFolder.open(folder))


def _check_name(repo_id: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo_id)
        if repo_id.count("/") == 1:
            return
    except HFValidationError:
        pass
    raise InputError(
        what=f"{repo_id!r} is not the name of a repository on the Hub",
        expected="organisation/name (or user/name): letters, digits, `-`, `_` and `.`, at most 96",
        fix="such as my-organisation/my-model",
    )


def _token() -> str:
    """Return the token in the environment. A login that is stored on the machine is not used."""
    token = os.environ.get(TOKEN, "").strip()
    if not token:
        raise InputError(
            what=f"there is no token: {TOKEN} is not set in the environment",
            expected="a token of the Hub that may write",
            fix=f"make one at https://huggingface.co/settings/tokens, then `export {TOKEN}=…` (a stored login is "
            "not used)",
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise InputError(
            what=f"{TOKEN} is not a token: it has blanks or other characters that no token has", fix="copy it again"
        )
    return token


@contextmanager
def _bars_for_people() -> Iterator[None]:
    """Switch the Hub's progress bars off where stderr is not a terminal."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars  # type: ignore[attr-defined]

    if are_progress_bars_disabled() or sys.stderr.isatty():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _hub_errors(repo_id: str, token: str) -> Iterator[None]:
    """Raise the Hub's and the network's errors as brim's own, without the token."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError as NetworkError, OfflineModeIsEnabled  # type: ignore[attr-defined]

    try:
        yield
    except BrimError:
        raise
    except OfflineModeIsEnabled:
        raise InputError(
            what="the Hub is switched off by HF_HUB_OFFLINE", fix="unset it in the environment, then upload"
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        told = _clean(error.server_message or "", token)
        raise _refused(status, told, repo_id) from None
    except (NetworkError, OSError) as error:
        raise ExportError(
            what=f"the Hub could not be reached ({type(error).__name__}: {_clean(str(error), token)})",
            fix="check the network, then upload again: what was sent already is not sent twice",
        ) from None
    except (RuntimeError, ValueError) as error:
        cause = f" ({_clean(str(error.__cause__), token)})" if error.__cause__ is not None else ""
        raise ExportError(
            what=f"the upload failed: {_clean(str(error), token)}{cause}", where=repo_id, fix="upload again"
        ) from None


def _refused(status: int, told: str, repo_id: str) -> BrimError:
    """Return the error that an answer of the Hub means for the user."""
    said = f" (the Hub says: {told})" if told else ""
    organisation = repo_id.partition("/")[0]
    if status == 401:
        what, fix = f"the Hub does not accept the token in {TOKEN}{said}", "make a new one, and set it"
        return InputError(what=what, where=repo_id, fix=fix)
    if status == 403:
        what = f"the token in {TOKEN} may not write to {repo_id}{said}"
        fix = f"use a token with the right to write, of a member of {organisation}"
        return InputError(what=what, where=repo_id, fix=fix)
    if status == 404:
        what = f"the Hub has no user or organisation {organisation!r}, or hides it from this token{said}"
        return InputError(what=what, where=repo_id, fix="check the name, and the account of the token")
    return ExportError(
        what=f"the Hub answered {status}{said}", where=repo_id, fix="try again later; nothing was committed"
    )


def _clean(text: str, token: str) -> str:
    """Return a message in one line, with the token masked wherever it is repeated."""
    return mask_text(" ".join(text.replace(token, MASK).split()))
