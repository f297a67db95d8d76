"""The undisturbed and the disturbed run, made one after the other and compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brim.api.resume_comparison import Made, compared, compared_logs, ran_out_of_memory, records_of
from brim.api.resume_leg import Ended, Leg, go, relocated
from brim.api.resume_plan import Disturbance, Start, choose_disturbance
from brim.api.resume_promise import Promise, promise_of
from brim.api.resume_proof import ResumeProof
from brim.api.resume_source import read_state, whole_checkpoints
from brim.api.session import Say
from brim.errors import BrimError, InputError, OutputError, Problem
from brim.files import writing
from brim.train.checkpoint import CheckpointStore
from brim.train.run_folder import RunFolder


class Trial:
    """The two runs, made one after the other."""

    def __init__(
        self,
        folder: RunFolder,
        work: Path,
        start: Start,
        *,
        overrides: tuple[str, ...],
        dataset: str | Sequence[str] | None,
        say: Say,
    ) -> None:
        self._folder, self._work, self._start, self._say = folder, work, start, say
        self._overrides, self._dataset = overrides, dataset
        self._num_legs = 0

    def proof(self) -> ResumeProof:
        """Make both, and compare."""
        start = self._start
        if start.num_leading:
            self._say(f"making step {start.step:,} of the run once more")
            self._go("start", stop_after=start.step)
        with writing("a copy of the run", self._work):
            shutil.copytree(self._work / "start", self._work / "undisturbed")
            (self._work / "start").rename(self._work / "disturbed")
        undisturbed = self._undisturbed()
        self._require_same_rows(undisturbed)
        records = records_of(undisturbed.run, after=start.step, upto=undisturbed.last_step)
        made = [record for record in records if _is_step(record)]
        sizes = _sizes(made)
        disturbance = choose_disturbance(start.step, sizes, [each.get("num_micro_batches", 0) for each in made])
        disturbed, killed = self._disturbed(disturbance, last_step=undisturbed.last_step)
        others = records_of(disturbed.run, after=start.step, upto=undisturbed.last_step)
        settings = _state_of(undisturbed)["settings"]
        device = json.loads(undisturbed.run.environment.read_text(encoding="utf-8"))["device"]
        promise = promise_of(settings, device=device, ran_out_of_memory=ran_out_of_memory([*records, *others]))
        assert killed.killed_in is not None, "as _disturbed has seen to"
        return ResumeProof(
            run=self._folder.path,
            device=device,
            precision=settings["precision"],
            checkpoint_step=start.checkpoint,
            start_step=start.step,
            num_steps=undisturbed.last_step - start.step,
            effective_batch_sizes=tuple(sizes),
            stopped_after=disturbance.stop_after,
            killed_in=killed.killed_in,
            killed_where=killed.killed_where,
            promise=promise,
            checks=tuple(compared(undisturbed, disturbed, promise, after=start.step)),
            own_log=self._own_log(records, promise, upto=undisturbed.last_step),
            seconds=0.0,
            folder=None,
        )

    def _undisturbed(self) -> Made:
        start = self._start
        last_step = start.step + start.num_steps
        steps = f"step {last_step:,}" if start.num_steps == 1 else f"steps {start.step + 1:,} to {last_step:,}"
        self._say(f"{steps} without a break")
        ended = self._go("undisturbed", stop_after=last_step)
        return _made(self._work / "undisturbed", [ended], after=start.step)

    def _disturbed(self, disturbance: Disturbance, *, last_step: int) -> tuple[Made, Ended]:
        legs, again = [], "the same"
        if disturbance.stop_after is not None:
            self._say(f"the same, stopped (Ctrl-C) after step {disturbance.stop_after:,}")
            legs.append(self._go("disturbed", stop_after=disturbance.stop_after))
            again = "continued, and"
        self._say(f"{again} killed (SIGKILL) in step {disturbance.kill_in:,}")
        killed = self._go("disturbed", stop_after=last_step, kill_in=disturbance.kill_in)
        if killed.how != "killed":
            raise BrimError(
                Problem(
                    what=f"the run could not be killed in step {disturbance.kill_in:,} or later: none was an update",
                    where=str(self._folder.path),
                    fix="try other steps with --from-step",
                )
            )
        self._say(f"continued, to step {last_step:,}")
        legs += [killed, self._go("disturbed", stop_after=last_step)]
        return _made(self._work / "disturbed", legs, after=self._start.step), killed

    def _go(self, name: str, *, stop_after: int, kill_in: int | None = None) -> Ended:
        """One process, in one of the copies. What a user did wrong is told of the run, not of the copy."""
        self._num_legs += 1
        run = self._work / name
        leg = Leg(
            config=str(self._folder.config),
            overrides=self._overrides,
            dataset=self._dataset,
            run=str(run),
            told=str(self._work / f"process-{self._num_legs}"),
            stop_after=stop_after,
            kill_in=kill_in,
        )
        try:
            return go(leg)
        except InputError as error:
            raise relocated(error, run, self._folder.path) from error

    def _require_same_rows(self, undisturbed: Made) -> None:
        """A run that was begun anew takes any rows: it must be those of the checkpoints."""
        whole = whole_checkpoints(self._folder, CheckpointStore(self._folder.checkpoints).steps())
        known = {read_state(self._folder, step)["train"]["rows_digest"] for step in whole}
        if known and _state_of(undisturbed)["train"]["rows_digest"] not in known:
            raise OutputError(
                Problem(
                    what="the training or validation rows are not those that this run was started with",
                    where=str(self._folder.path),
                    expected="the same data, template, limits and tokenizer",
                    fix="name the file that it was trained on with --dataset",
                )
            )

    def _own_log(self, records: Sequence[Mapping[str, Any]], promise: Promise, *, upto: int) -> str:
        """How the lines that the run itself wrote for these steps compare with those of the undisturbed copy."""
        own = [each for each in records_of(self._folder, after=self._start.step, upto=upto) if _is_step(each)]
        steps = {each["step"] for each in own}
        again = [each for each in records if _is_step(each) and each["step"] in steps]
        if not own:
            return "has not come to these steps"
        wrong = [check for check in compared_logs(own, again, promise) if check.difference is not None]
        if not wrong:
            return f"has the same figures for {len(own):,} of these steps"
        found = wrong[0].difference
        assert found is not None, "as it was chosen"
        return (
            f"differs in {', '.join(check.name for check in wrong)}, first at {found.where}: {found.undisturbed}, now "
            f"{found.disturbed}. Another machine, version, number of threads, cut or setting explains that; if there "
            "is none, the copy did not go on as the run did"
        )


def _made(folder: Path, legs: Sequence[Ended], *, after: int) -> Made:
    tokens: dict[int, set[str]] = {}
    for step, digest in (seen for leg in legs for seen in leg.tokens):
        tokens.setdefault(step, set()).add(digest)
    return Made(
        run=RunFolder(folder),
        tokens={step: frozenset(digests) for step, digests in tokens.items() if step > after},
        last_step=max(tokens),
    )


def _sizes(steps: Sequence[Mapping[str, Any]]) -> list[int]:
    """Rows of each step; a step that was no update has no line that tells, and is taken for one like the one before."""
    sizes: list[int] = []
    for record in steps:
        sizes.append(record.get("effective_batch_size", sizes[-1] if sizes else 0))
    return sizes


def _is_step(record: Mapping[str, Any]) -> bool:
    """The line of a step, which may have been no update."""
    return "learning_rate" in record or record.get("event") == "skipped"


def _state_of(made: Made) -> dict[str, Any]:
    return read_state(made.run, made.last_step)
