"""Count how often a greedy text depends on its batch: in bf16, where two tokens can tie, and in fp32, where none may.

    python -m benchmarks.flip_rate [--rows 100] [--new-tokens 64]

The prompts are the example's (docstring and signature), at their real lengths; the model is the example's base. A row
flips where its tokens are not those that are written for it alone, with the same weights in the same precision.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.report import print_table, write_report
from benchmarks.subject import configuration, make_rows
from brim.config import load_config
from brim.data import prompts_of
from brim.data.read import read
from brim.data.tokens import TokenRows
from brim.infer.engines import FixedRoom, Response, respond_to
from brim.models import LLM, load_llm
from brim.session import Session, open_session
from brim.workflows.prediction.launch import engine_for

BASE = Path(__file__).parents[1] / "examples" / "stdlib_code" / "base-model"
ROWS_AT_ONCE = 16
_PASS_TOKENS = 1024
_MOST_CHARACTERS = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Hold one engine in one precision, against rows alone."""

    precision: str
    engine: str
    num_rows: int
    num_flipped: int
    mean_place: float | None  # of the first token that differs; None where none does

    @property
    def rate(self) -> float:
        return self.num_flipped / self.num_rows


def main() -> None:
    arguments = _arguments()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = make_rows(Path(folder) / "rows.jsonl", num_rows=arguments.rows, max_characters=_MOST_CHARACTERS)
        figures = [
            figure
            for precision in ("bf16-true", "fp32")
            for figure in _of_precision(precision, rows, new_tokens=arguments.new_tokens)
        ]
    columns = ["precision, engine", "rows", "flipped", "share", "first difference at"]
    print_table("greedy texts beside others, against alone", columns, [_row(figure) for figure in figures])
    write_report(
        "flip_rate",
        figures={
            "rows_at_once": ROWS_AT_ONCE,
            "new_tokens": arguments.new_tokens,
            "engines": [{**asdict(figure), "rate": figure.rate} for figure in figures],
        },
        num_threads=torch.get_num_threads(),
    )


def _of_precision(precision: str, rows: Path, *, new_tokens: int) -> list[Figure]:
    settings = {
        **configuration(BASE, adapter=None, trainer={}),
        "trainer": {"type": "none"},
        "precision": precision,
        "generation": {"max_new_tokens": new_tokens, "do_sample": False},
    }
    session = open_session(load_config(settings).config)
    llm = load_llm(session.config, session.folder, session.device, trainable=False)
    prompts = prompts_of(read(rows), session.config, session.encoder, only="full").rows
    alone = _written(llm, session, prompts, "slots", rows=1)
    return [
        _figure(precision, engine, _written(llm, session, prompts, engine, rows=ROWS_AT_ONCE), alone)
        for engine in ("slots", "static")
    ]


def _written(llm: LLM, session: Session, prompts: TokenRows, engine: str, *, rows: int) -> list[Response]:
    room = FixedRoom(rows, prefill_tokens=_PASS_TOKENS)
    return respond_to(engine_for(llm, session, room=room, on_smaller=print, kind=engine), prompts)


def _figure(precision: str, engine: str, found: Sequence[Response], alone: Sequence[Response]) -> Figure:
    pairs = [(each.token_ids, other.token_ids) for each, other in zip(found, alone, strict=True) if each != other]
    places = [_first_difference(*pair) for pair in pairs]
    return Figure(
        precision=precision,
        engine=engine,
        num_rows=len(alone),
        num_flipped=len(pairs),
        mean_place=sum(places) / len(places) if places else None,
    )


def _first_difference(these: Sequence[int], those: Sequence[int]) -> int:
    both = zip(these, those, strict=False)
    return next((place for place, (one, other) in enumerate(both) if one != other), min(len(these), len(those)))


def _row(figure: Figure) -> list[str]:
    place = "" if figure.mean_place is None else f"{figure.mean_place:.0f}"
    name = f"{figure.precision}, {figure.engine}"
    return [name, str(figure.num_rows), str(figure.num_flipped), f"{figure.rate:.1%}", place]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    main()
