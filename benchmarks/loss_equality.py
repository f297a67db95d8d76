"""Does a loss depend on how a batch is cut, and is it the loss that other trainers find?

    python -m benchmarks.loss_equality

One epoch at effective batch 32 in fp32, the same first weights, rows, order and settings for all. First brim alone with
micro-batches of 1, 4 and 32 rows; then brim against transformers' Trainer and TRL's SFTTrainer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.peers import Peer, PeerSettings, Steps, train_with
from benchmarks.report import print_table, write_report
from benchmarks.subject import EFFECTIVE_BATCH_SIZE, Shape, configuration, lora, make_base, make_rows, rows_in_order

SHAPE = Shape(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
PRETRAINING_STEPS = 60
CUTS = (1, 4, 32)  # rows of a micro-batch
GOAL = {"lora": 1e-5, "full": 1e-4}  # CONTRACT.md, "What equals what"
PEER_GOAL = 1e-3
PEERS: tuple[Peer, ...] = ("transformers", "trl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Hold settings that brim and its peers share."""

    method: Literal["lora", "full"]
    optimizer: dict[str, Any]
    decay: Literal["constant", "cosine"]
    warmup_steps: int = 0
    learning_rate: float = 0.01
    num_rows: int

    def __str__(self) -> str:
        warmup = f", {self.warmup_steps} steps of warm-up" if self.warmup_steps else ""
        return f"{self.method}, {self.optimizer['type']}, {self.decay}{warmup}"

    def brim(self, base: Path, *, micro_batch_rows: int, adapter: Path | None) -> dict[str, Any]:
        """Return the scenario as brim's configuration."""
        pretrained = {"pretrained_adapter_weights": str(adapter)} if adapter else {}
        return configuration(
            base,
            adapter=lora(**pretrained) if self.method == "lora" else None,
            trainer={
                "batch_size": micro_batch_rows,
                "learning_rate": self.learning_rate,
                "optimizer": self.optimizer,
                "learning_rate_scheduler": {
                    "decay": self.decay,
                    "warmup_fraction": self.warmup_steps * EFFECTIVE_BATCH_SIZE / self.num_rows,
                },
            },
        )

    def peers(self) -> PeerSettings:
        """Return the scenario as the peers' arguments; their AdamW without weight decay is Adam."""
        return PeerSettings(
            learning_rate=self.learning_rate,
            schedule=self.decay,
            warmup_steps=self.warmup_steps,
            weight_decay=self.optimizer.get("weight_decay", 0.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Hold two sequences of losses that should be the same."""

    scenario: str
    contender: str
    against: str
    largest_relative_difference: float
    at_step: int
    goal: float | None  # None: known to differ, for the reason in the note
    note: str = ""
    losses: list[float]
    reference: list[float]
    learning_rates_differ_at_steps: list[int]

    @property
    def verdict(self) -> str:
        if self.goal is None:
            return "differs, see note"
        return "equal" if self.largest_relative_difference <= self.goal else "NOT EQUAL"


def compare(
    scenario: Scenario,
    contender: str,
    steps: Steps,
    against: str,
    reference: Steps,
    *,
    goal: float | None,
    note: str = "",
) -> Comparison:
    """Return the largest relative difference, and where it is. Both must have run the same number of steps."""
    assert len(steps.losses) == len(reference.losses), "the contenders ran different numbers of steps"
    differences = [abs(a - b) / b for a, b in zip(steps.losses, reference.losses, strict=True)]
    rates = zip(steps.learning_rates, reference.learning_rates, strict=True)
    return Comparison(
        scenario=str(scenario),
        contender=contender,
        against=against,
        largest_relative_difference=max(differences),
        at_step=differences.index(max(differences)) + 1,
        goal=goal,
        note=note,
        losses=steps.losses,
        reference=reference.losses,
        learning_rates_differ_at_steps=[n for n, (a, b) in enumerate(rates, 1) if abs(a - b) > 1e-9 * max(a, b)],
    )


class Bench:
    """Run scenarios from one base model and one initial adapter."""

    def __init__(
        self,
        folder: Path,
        *,
        base: Path | None,
        num_rows: int,
        max_characters: int,
        pretraining_steps: int = PRETRAINING_STEPS,
    ) -> None:
        self._folder = folder
        self._pool = make_rows(folder / "pool.jsonl", num_rows=num_rows, max_characters=max_characters)
        self.base = base or self._pretrained(pretraining_steps, num_rows)
        self.adapter = self._initial_adapter(Scenario(
            method="lora", optimizer={"type": "adam"}, decay="constant", num_rows=num_rows
        ))  # fmt: skip

    def brim(self, scenario: Scenario, *, micro_batch_rows: int) -> Steps:
        """Return what brim logs in metrics.jsonl."""
        import brim

        settings = scenario.brim(self.base, micro_batch_rows=micro_batch_rows, adapter=self._adapter_of(scenario))
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            brim.Model(settings).train(self._rows_file(scenario), output_directory=Path(folder) / "run")
            lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [record for record in map(json.loads, lines) if record.get("split") == "train"]
        return Steps(
            losses=[record["loss"] for record in records],
            learning_rates=[record["learning_rate"] for record in records],
        )

    def peer(
        self, peer: Peer, scenario: Scenario, *, micro_batch_rows: int, settings: PeerSettings | None = None
    ) -> Steps:
        """Return what a peer logs, given brim's rows in brim's order."""
        brim_settings = scenario.brim(self.base, micro_batch_rows=micro_batch_rows, adapter=None)
        return train_with(
            peer,
            rows_in_order(brim_settings, self._rows_file(scenario)),
            base=self.base,
            adapter=self._adapter_of(scenario),
            settings=settings or scenario.peers(),
            micro_batch_rows=micro_batch_rows,
        )

    def _adapter_of(self, scenario: Scenario) -> Path | None:
        return self.adapter if scenario.method == "lora" else None

    def _rows_file(self, scenario: Scenario) -> Path:
        path = self._folder / f"rows-{scenario.num_rows}.jsonl"
        lines = self._pool.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(lines[: scenario.num_rows]), encoding="utf-8")
        return path

    def _pretrained(self, num_steps: int, num_rows: int) -> Path:
        """Train a small Llama for some steps, all weights of it.

        With random weights every row has the same loss, nearly; then a mean of means is the mean over all tokens, and
        the comparison would miss what it is for.
        """
        import brim

        base = make_base(self._folder / "random", SHAPE, self._pool)
        scenario = Scenario(method="full", optimizer={"type": "adam"}, decay="cosine", num_rows=num_rows)
        settings = scenario.brim(base, micro_batch_rows=4, adapter=None)
        settings["trainer"]["train_steps"] = num_steps
        brim.Model(settings).train(self._pool, output_directory=self._folder / "pretrained")
        return self._folder / "pretrained" / "model"

    def _initial_adapter(self, scenario: Scenario) -> Path:
        """Return the adapter that every contender starts from."""
        from brim.config import load_config
        from brim.models import load_llm
        from brim.session import open_session

        session = open_session(load_config(scenario.brim(self.base, micro_batch_rows=1, adapter=None)).config)
        llm = load_llm(session.config, session.folder, session.device, trainable=True)
        llm.model.save_pretrained(str(self._folder / "adapter"))
        return self._folder / "adapter"


def cuts_of_brim(bench: Bench, num_rows: int) -> Iterator[Comparison]:
    """Compare brim with itself: other micro-batches, the same effective batch."""
    adam = {"type": "adam"}
    for method in ("lora", "full"):
        scenario = Scenario(
            method=method, optimizer=adam, decay="cosine", warmup_steps=2, num_rows=num_rows,
            learning_rate=0.01 if method == "lora" else 0.001,
        )  # fmt: skip
        reference = bench.brim(scenario, micro_batch_rows=CUTS[0])
        for rows in CUTS[1:]:
            yield compare(
                scenario,
                f"brim, micro-batch {rows}",
                bench.brim(scenario, micro_batch_rows=rows),
                f"brim, micro-batch {CUTS[0]}",
                reference,
                goal=GOAL[method],
            )


def brim_against_peers(bench: Bench, num_rows: int) -> Iterator[Comparison]:
    """Compare brim with each peer at micro-batch 4, and a constant rate at each cut; the last batch is not full."""
    full_batches = num_rows // EFFECTIVE_BATCH_SIZE * EFFECTIVE_BATCH_SIZE
    adamw = {"type": "adamw", "weight_decay": 0.01}
    constant = Scenario(method="lora", optimizer=adamw, decay="constant", num_rows=num_rows)
    for scenario, cuts in (
        (constant, CUTS),
        (replace(constant, decay="cosine", num_rows=full_batches), (4,)),
        (
            Scenario(
                method="full", optimizer={"type": "adam"}, decay="cosine", num_rows=full_batches, learning_rate=0.001
            ),
            (4,),
        ),
    ):
        reference = bench.brim(scenario, micro_batch_rows=4)
        for peer in PEERS:
            for rows in cuts:
                steps = bench.peer(peer, scenario, micro_batch_rows=rows)
                yield compare(
                    scenario, f"{peer}, micro-batch {rows}", steps, "brim, micro-batch 4", reference, goal=PEER_GOAL
                )
    yield from _warmup(bench, replace(constant, decay="cosine", warmup_steps=3, num_rows=full_batches))
    yield from _contrasts(bench, constant)


def _warmup(bench: Bench, scenario: Scenario) -> Iterator[Comparison]:
    reference = bench.brim(scenario, micro_batch_rows=4)
    given = replace(scenario.peers(), learning_rates=tuple(reference.learning_rates))
    for peer in PEERS:
        own = bench.peer(peer, scenario, micro_batch_rows=4)
        yield compare(
            scenario, f"{peer}, its own schedule", own, "brim", reference, goal=None,
            note="the peers' first warm-up step has learning rate 0; brim's has its share of the peak",
        )  # fmt: skip
        same = bench.peer(peer, scenario, micro_batch_rows=4, settings=given)
        yield compare(scenario, f"{peer}, brim's rates", same, "brim", reference, goal=PEER_GOAL)


def _contrasts(bench: Bench, scenario: Scenario) -> Iterator[Comparison]:
    """Compare what must differ, or the comparison could not tell: another loss, and no learning at all."""
    reference = bench.brim(scenario, micro_batch_rows=4)
    settings = replace(scenario.peers(), averages_micro_batches=True)
    steps = bench.peer("transformers", scenario, micro_batch_rows=4, settings=settings)
    yield compare(
        scenario, "transformers, mean of means", steps, "brim", reference, goal=None,
        note="with its count of the step's tokens switched off, as models that take no loss arguments still have it",
    )  # fmt: skip
    unlearned = bench.brim(replace(scenario, learning_rate=0.0), micro_batch_rows=4)
    yield compare(
        scenario, "brim, learning rate 0", unlearned, "brim", reference, goal=None,
        note="how far training moves these losses: what the differences above are to be compared with",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Is the loss the same for every cut, and the same as the peers'?")
    parser.add_argument("--rows", type=int, default=394, help="training rows; the last batch should not be full")
    parser.add_argument("--max-characters", type=int, default=1500, help="of a row; longer ones are left out")
    parser.add_argument("--base-model", type=Path, help="a model folder; default: a small Llama, briefly trained")
    parser.add_argument("--without-peers", action="store_true", help="only brim against itself")
    parser.add_argument("--threads", type=int, default=1, help="torch's")
    options = parser.parse_args()
    with _quiet(options.threads), tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            Path(folder), base=options.base_model, num_rows=options.rows, max_characters=options.max_characters
        )
        comparisons = list(cuts_of_brim(bench, options.rows))
        if not options.without_peers:
            comparisons += brim_against_peers(bench, options.rows)
    _show(comparisons)
    figures = {
        "effective_batch_size": EFFECTIVE_BATCH_SIZE,
        "num_rows": options.rows,
        "comparisons": _as_dicts(comparisons),
    }
    write_report("loss_equality", figures=figures, num_threads=options.threads)


def _as_dicts(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    return [{**asdict(comparison), "verdict": comparison.verdict} for comparison in comparisons]


def _show(comparisons: Sequence[Comparison]) -> None:
    print_table(
        "loss sequences over one epoch",
        ("scenario", "contender", "against", "largest difference", "at step", "goal", ""),
        [
            (c.scenario, c.contender, c.against, f"{c.largest_relative_difference:.1e}", f"{c.at_step}/{len(c.losses)}",
             "–" if c.goal is None else f"{c.goal:.0e}", c.verdict)
            for c in comparisons
        ],
    )  # fmt: skip


@contextmanager
def _quiet(num_threads: int) -> Iterator[None]:
    """Set one number of threads for all, and no progress bars of the libraries."""
    import warnings

    import torch
    import transformers

    torch.set_num_threads(num_threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


if __name__ == "__main__":
    main()
