"""Kill and resume runs whose effective batch moves, again and again, and compare them with undisturbed ones.

    python -m benchmarks.schedule_kills

For each kind of schedule, a run of some twenty steps on a tiny model is killed (SIGKILL) up to five times and resumed
each time, until there were fifty kills. They come at random moments, within an accumulation, when the batch has just
switched, at the end of an epoch, after an evaluation, a point of the curve, a checkpoint. What a run leaves must be, to
the bit, what the undisturbed one leaves: the log but for its times, weights, optimizer, random states, all other files.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from faults.forked import ROOT, Brim, Done
from faults.subject import CONFIG, ROWS, difference, fingerprint, saved_step, told_wrong
from faults.workshop import as_yaml

from benchmarks.report import print_table, write_report
from benchmarks.schedule_killed import Moment

NUM_KILLS = 50
MOST_KILLS_OF_A_RUN = 5
PLACES = ("time", "accumulation", "switch", "step", "point", "epoch", "evaluation", "checkpoint")
_FUNCTION = "def increase(epoch, current_batch_size):\n    return 2 if epoch % 3 != 2 else -3\n"

# The 28 training rows of faults.subject three times over, in micro-batches of three rows: remainders everywhere.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "doubling ramp": {
        "effective_batch_size": 8,
        "batch_rampup": {"length": "0.6dur", "from": 2},
        "batch_lr_scaling": "sqrt",
    },
    "linear ramp": {
        "effective_batch_size": 9,
        "batch_rampup": {"length": "5ba", "from": 2, "shape": "linear", "increment": 2},
        "batch_lr_scaling": "linear",
    },
    "equal steps": {
        "effective_batch_size": 12,
        "batch_rampup": {"length": "2ep", "from": 3, "shape": "equal_steps"},
        "noise_scale_every": 3,
    },
    "step table": {"batch_schedule": "0tok:8 200tok:3 450tok:6", "batch_lr_scaling": "sqrt"},
    "increase function": {"effective_batch_size": 3, "batch_increase_function": "growth:increase", "epochs": 4},
    "noise scale": {
        "effective_batch_size": 2,
        "batch_adaptation": {"min": 2, "max": 8},
        "noise_scale_every": 1,
        "batch_lr_scaling": "sqrt",
    },
}


@dataclass(kw_only=True)
class Campaign:
    """Hold what came of one kind of schedule."""

    kind: str
    sizes: list[int]  # of the undisturbed run's steps
    num_runs: int = 0
    num_kills: int = 0
    num_switches: int = 0  # of the undisturbed run
    by_place: dict[str, int] = field(default_factory=dict)  # kills
    differences: list[str] = field(default_factory=list)  # of runs that did not end as the undisturbed one

    @property
    def num_equal(self) -> int:
        return self.num_runs - len(self.differences)


class Killer:
    """Run one kind of schedule in a folder of its own."""

    def __init__(self, brim: Brim, folder: Path, kind: str) -> None:
        self._brim, self._folder = brim, folder
        make_project(folder, brim, KINDS[kind])
        whole = self._train("whole", None)
        if wrong := told_wrong(whole, code=0):
            raise RuntimeError(f"the run that nobody disturbed: {wrong}")
        self._seconds = float(whole.out.splitlines()[-1])  # of the loop
        self._whole = fingerprint(folder / "whole")
        records = [json.loads(line) for line in (folder / "whole" / "metrics.jsonl").read_text("utf-8").splitlines()]
        steps = [record for record in records if record.get("split") == "train"]
        self._num_passes = sum(step["num_micro_batches"] for step in steps)
        self._num_written = Counter(place for record in records for place in Moment.places_of(record))
        self.campaign = Campaign(
            kind=kind,
            sizes=[step["effective_batch_size"] for step in steps],
            num_switches=self._num_written["switch"],
        )

    def run(self, *, num_kills: int, chance: random.Random, say: Callable[[str], None]) -> Campaign:
        """Kill runs until there were so many kills."""
        campaign = self.campaign
        while campaign.num_kills < num_kills:
            most = min(MOST_KILLS_OF_A_RUN, num_kills - campaign.num_kills)
            places = list(self._one(most, chance))
            campaign.num_runs += 1
            campaign.num_kills += len(places)
            campaign.by_place = dict(Counter(campaign.by_place) + Counter(places))
            wrong = difference(self._folder / "run", self._whole)
            if wrong:
                campaign.differences.append(f"{', '.join(places)}: {wrong}")
            shutil.rmtree(self._folder / "run")
            say(f"{campaign.kind}: {campaign.num_kills} kills, {campaign.num_equal} of {campaign.num_runs} runs equal")
        return campaign

    def _one(self, most: int, chance: random.Random) -> Iterator[str]:
        """Train a run to its end; the place of each kill on the way."""
        for _ in range(most):
            moment = self._drawn(chance, left=1 - saved_step(self._folder / "run") / len(self.campaign.sizes))
            done = self._train("run", moment)
            if done.code == 0:
                return  # its moment lay behind where this process began
            if done.code != -signal.SIGKILL:
                raise RuntimeError(told_wrong(done, code=0))
            yield moment.place
        done = self._train("run", None)
        if wrong := told_wrong(done, code=0):
            raise RuntimeError(wrong)

    def _drawn(self, chance: random.Random, *, left: float) -> Moment:
        """Half of the kills are at a random time; the others in a place that the undisturbed run has.

        left: the share of the run's steps that a process has before it.
        """
        if chance.random() < 0.5:
            return Moment(place="time", delay_s=chance.random() * left * self._seconds)
        place = chance.choice(["accumulation", *(place for place in PLACES if self._num_written[place])])
        most = self._num_passes if place == "accumulation" else self._num_written[place]
        return Moment(place=place, number=chance.randint(1, max(1, round(left * most))))

    def _train(self, run: str, moment: Moment | None) -> Done:
        return self._brim.try_call(
            "benchmarks.schedule_killed.train",
            self._folder / run,
            json.dumps(None if moment is None else asdict(moment)),
            folder=self._folder,
        )


def make_project(folder: Path, brim: Brim, trainer: Mapping[str, Any]) -> None:
    """Write base/, rows.jsonl, growth.py and config.yaml into a folder."""
    brim.call("faults.subject.make_base_at", folder / "base", folder=folder)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    (folder / "growth.py").write_text(_FUNCTION, encoding="utf-8")
    left_out = ("train_steps", "learning_rate", "effective_batch_size")
    common = {key: value for key, value in CONFIG["trainer"].items() if key not in left_out}
    schedule = {"decay": "cosine", "warmup_fraction": 0.2}
    settings = {"epochs": 3, "batch_size": 3, "learning_rate": 0.01, "learning_rate_scheduler": schedule, **trainer}
    config = {**CONFIG, "trainer": {**common, "steps_per_checkpoint": 3, **settings}}
    (folder / "config.yaml").write_text(as_yaml(config), encoding="utf-8")


def campaigns(
    kinds: Sequence[str], *, num_kills: int, seed: int, say: Callable[[str], None] = print
) -> Iterator[Campaign]:
    """Run the campaign of each kind, one after the other."""
    with tempfile.TemporaryDirectory(prefix="schedule-kills-") as scratch, Brim({"PYTHONPATH": str(ROOT)}) as brim:
        for number, kind in enumerate(kinds):
            folder = Path(scratch) / str(number)
            folder.mkdir()
            chance = random.Random(f"{seed} {kind}")
            yield Killer(brim, folder, kind).run(num_kills=num_kills, chance=chance, say=say)


def main() -> None:
    parser = argparse.ArgumentParser(description="Kills and resumes runs whose effective batch moves.")
    parser.add_argument("--kills", type=int, default=NUM_KILLS, help="of each kind")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    done = list(campaigns(options.kinds, num_kills=options.kills, seed=options.seed))
    print_table(
        "killed and resumed (goal: every run equal to the bit)",
        ("schedule", "steps", "switches", "kills", "runs", "equal"),
        [tuple(map(str, (c.kind, len(c.sizes), c.num_switches, c.num_kills, c.num_runs, c.num_equal))) for c in done],
    )
    figures = {"goal_kills": NUM_KILLS, "kinds": [{**asdict(c), "num_equal": c.num_equal} for c in done]}
    write_report("schedule_kills", figures=figures, num_threads=1)
    if any(campaign.differences for campaign in done):
        raise SystemExit("\n".join(line for campaign in done for line in campaign.differences))


if __name__ == "__main__":
    main()
