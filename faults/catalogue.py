"""What the campaign tries: its modules, and the lines of the table in docs/reliability.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str  # as in Trial.row
    fault: str
    where: str
    promise: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One module of this package."""

    name: str  # of the module, and for --only
    rows: tuple[Row, ...]


_SAME = (
    "`--resume` goes on from the last checkpoint that was saved; the run is the undisturbed one to the bit (CPU, "
    "fp32), and no file is left over"
)
_WHOLE = (
    "what stood before is whole; one message with place and fix; exit code 1; with room again, `--resume` gives the "
    "undisturbed run"
)

_TOLD = (
    "no traceback; exit code 2; place and fix named in at most 25 plain lines, within 10 s and 1 GiB; nothing left "
    "behind"
)

_TOGETHER = (
    "every rank ends in time and says what it died of or that another one failed; no process and no lock is left; "
    "resumed by 1, 2 or 4 ranks, each step is there once, on its rows, within 1e-5 of the loss of one process"
)

_DEALT = "the file of one process; no process is left; at most the lease of a process is generated again a kill"

CATALOGUE = (
    Fault(
        name="kill",
        rows=(
            Row(name="kill-random", fault="SIGKILL", where="random moments of `brim train`", promise=_SAME),
            Row(
                name="kill-after",
                fault="SIGKILL",
                where="after each create, write, sync, rename and deletion of a run with four checkpoints",
                promise=_SAME,
            ),
            Row(name="kill-amid", fault="SIGKILL", where="half-way through each write of that run", promise=_SAME),
            Row(name="kill-again", fault="SIGKILL", where="twice: also while it is being continued", promise=_SAME),
            Row(
                name="kill-anew",
                fault="SIGKILL",
                where="after each operation of `brim train --resume` on a finished run",
                promise="`brim predict` gives the same texts at any moment; continued, nothing has changed",
            ),
            Row(
                name="kill-predict",
                fault="SIGKILL",
                where="after each operation of `brim predict`, and half-way through each write",
                promise="no predictions, or the whole file; `--resume` makes the undisturbed one; nothing is left over",
            ),
            Row(
                name="order",
                fault="loss of power",
                where="each rename of a run, in the log of its operations",
                promise="what it shows was synced before, its folder after, and nothing older is deleted before",
            ),
        ),
    ),
    Fault(
        name="ranks",
        rows=(
            Row(
                name="ranks-kill",
                fault="SIGKILL of one of 2 or 4 ranks",
                where="each pass, sum and message of a run, drawn by chance; the first rank holds the store",
                promise=_TOGETHER,
            ),
            Row(
                name="ranks-first",
                fault="SIGKILL of the first of 2 ranks",
                where="after an operation on the rows, a checkpoint, the model or another file, drawn by chance",
                promise=_TOGETHER,
            ),
            Row(
                name="ranks-stop",
                fault="SIGSTOP of one of 2 or 4 ranks",
                where="each pass, sum and message, drawn by chance",
                promise=_TOGETHER,
            ),
            Row(
                name="ranks-memory",
                fault="out of memory on one of 2 or 4 ranks",
                where="a micro-batch, once, or from then on down to single rows",
                promise=f"once: replayed, and all goes on; always: all end with a checkpoint; {_TOGETHER}",
            ),
            Row(
                name="ranks-interrupt",
                fault="SIGINT or SIGTERM to all of 2 or 4 ranks, once or twice",
                where="each pass, sum and message, drawn by chance",
                promise=f"exit code 130 (SIGTERM outside of training ends a process at once); {_TOGETHER}",
            ),
        ),
    ),
    Fault(
        name="members",
        rows=(
            Row(
                name="members-kill",
                fault="SIGKILL of one or two of 2 or 3 processes that predict together",
                where="random moments of `brim predict --gpus N`",
                promise=f"it goes on by itself; {_DEALT}",
            ),
            Row(
                name="members-coordinator",
                fault="SIGKILL of the process that deals to them",
                where="random moments of `brim predict --gpus N`",
                promise=f"all end; `--resume` with 1 to 3 processes, and either engine, goes on; {_DEALT}",
            ),
        ),
    ),
    Fault(
        name="torchrun",
        rows=(
            Row(
                name="torchrun",
                fault="SIGKILL, SIGSTOP, out of memory, SIGTERM under torchrun",
                where="the same moments of 2 or 4 ranks, each with an interpreter of its own",
                promise=_TOGETHER,
            ),
        ),
    ),
    Fault(
        name="disk",
        rows=(
            Row(
                name="disk-limit",
                fault="full disk (`RLIMIT_FSIZE`)",
                where="each size of file that a run writes, and one byte less: new, begun and finished runs",
                promise=_WHOLE,
            ),
            Row(
                name="disk-full",
                fault="full disk (a small tmpfs)",
                where="room for less and less of a run",
                promise=_WHOLE,
            ),
            Row(
                name="disk-predict",
                fault="full disk (`RLIMIT_FSIZE`)",
                where="each size of file that a prediction writes, and one byte less; in each format",
                promise="no predictions, or the whole file; one message; exit code 1; with room, `--resume` makes it",
            ),
            Row(
                name="disk-read-only",
                fault="read-only folder",
                where="run, checkpoints, model, TensorBoard, output of predictions",
                promise="one message with place and fix; nothing lost; exit code 2 where it is seen beforehand, else 1",
            ),
        ),
    ),
    Fault(
        name="damage",
        rows=(
            Row(
                name="damage-newest",
                fault="flip, truncate, delete, swap",
                where="each file of the newest checkpoint",
                promise="refused by its digest; the one before is taken, which is said; the end is the undisturbed one",
            ),
            Row(
                name="damage-both",
                fault="flip, truncate, delete",
                where="a file of every checkpoint",
                promise="one message that names each; exit code 1; nothing changed",
            ),
            Row(
                name="damage-manifest",
                fault="a manifest that lies",
                where="paths that leave the folder, other digests, missing and foreign names",
                promise="refused; nothing outside the folder is read into the run",
            ),
            Row(
                name="damage-run",
                fault="flip, truncate, delete",
                where="the other files of a run that is continued",
                promise="written anew, or refused with place and fix; what is lost of the log is said",
            ),
            Row(
                name="damage-model",
                fault="flip, truncate, delete",
                where="each file of `model/`, at `brim predict`",
                promise="refused by its digest with place and fix; exit code 1; `--resume` writes it anew",
            ),
        ),
    ),
    Fault(
        name="nonfinite",
        rows=(
            Row(
                name="nonfinite-stop",
                fault="NaN or infinity in loss or gradient",
                where="first, middle and last micro-batch; first and later steps",
                promise="stops before the update and names the step and the rows of the micro-batch; exit code 1; "
                "earlier checkpoint whole; may be continued with `skip`",
            ),
            Row(
                name="nonfinite-skip",
                fault="NaN or infinity in loss or gradient",
                where="the same, with `trainer.on_nonfinite: skip`",
                promise="weights and optimizer never hear of it; counted, with rows, in `metrics.jsonl`; a killed run "
                "continues to the same bits",
            ),
        ),
    ),
    Fault(
        name="rows",
        rows=(
            Row(
                name="bad-rows",
                fault="rows too long, of a wrong type, undecodable, empty, broken",
                where="train, evaluate, predict; csv, tsv, json, jsonl, parquet",
                promise="exit code 2 with the place and the way out; under the policy the job goes on with all "
                "other rows, and the ledger names those",
            ),
        ),
    ),
    Fault(
        name="mistakes",
        rows=(
            Row(
                name="mistakes",
                fault="mistakes of a user",
                where="every verb, as people type it",
                promise="exit code 2; one message with the decisive words, place and fix; nothing changed",
            ),
        ),
    ),
    Fault(
        name="inputs",
        rows=(
            Row(
                name="bad-configs",
                fault="generated bad configurations and overrides",
                where="check, train, evaluate, predict",
                promise=_TOLD,
            ),
            Row(
                name="bad-data",
                fault="generated bad data files and folders",
                where="check, train, evaluate, predict",
                promise=_TOLD,
            ),
            Row(
                name="bad-models",
                fault="generated bad base models and adapters",
                where="check (what it reads), train, evaluate, predict",
                promise=_TOLD,
            ),
            Row(
                name="bad-runs",
                fault="generated damage to finished runs",
                where="evaluate, predict, train --resume, export",
                promise="refused as the others, with exit code 1 or 2; what is not needed may be damaged",
            ),
        ),
    ),
    Fault(
        name="hostile",
        rows=(
            Row(
                name="hostile",
                fault="folders and files made to run code, to reach elsewhere or to go on for ever",
                where="check, train, evaluate, predict, train --resume",
                promise="refused (the inert taken without harm): no code ran, the Hub was not asked, nothing outside "
                "the project changed",
            ),
        ),
    ),
    Fault(
        name="token",
        rows=(
            Row(
                name="token",
                fault="planted tokens and passwords",
                where="every verb, with success, failure and Ctrl-C, with quiet and with loud libraries",
                promise="in no line of output and no byte of a file that brim wrote, in no encoding",
            ),
        ),
    ),
)


def row_names() -> set[str]:
    """Of all lines of the table."""
    return {row.name for fault in CATALOGUE for row in fault.rows}
