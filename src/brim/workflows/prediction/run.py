"""Predict a data set: read its prompts, open the job, generate what is missing, assemble the output.

Responses, and their scores, are generated for the rows of a prediction that have none yet. `plan_prediction` plans how
a data set would be predicted, before anything is loaded (`brim predict --plan`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pandas as pd
import torch

from brim.config.schema import Config
from brim.data import prompts_of
from brim.data.chat import settled_day
from brim.data.read import Data, Entry, Ledger, RowFaults, Source, read
from brim.data.tokens import TokenRows, load_encoder
from brim.errors import BrimError, ConfigError, DataError, OutputError, Problem, WriteError
from brim.infer import DoneRows, HeldRecords, Records, prompt_hash, score_of
from brim.infer.engines import Finished, Response
from brim.infer.metrics import label_reader
from brim.memory import Asked, ask
from brim.models import LLM, model_note, no_library_warnings
from brim.notes import OnBatch, Say, planned, status
from brim.planning import GenerationPlan, plan_job, rows_by_hand
from brim.session import Session, say_nothing, with_labels
from brim.storage import writing
from brim.train import interruption
from brim.units import format_count
from brim.workflows.prediction.evaluation import responses_to
from brim.workflows.prediction.generation import Generation, request_as_merged, score_missing
from brim.workflows.prediction.job import Job, as_begun, fingerprint, open_job
from brim.workflows.prediction.launch import engine_by_hand, with_engine
from brim.workflows.prediction.members import Several, is_one_process
from brim.workflows.prediction.output import (
    Counts,
    Predictions,
    Wanted,
    frame_of,
    ledger_path,
    read_summary,
    require_free_names,
    summary_of,
    write_blocks,
    write_ledger,
    write_summary,
)
from brim.workflows.prediction.prompts import Keep, Keys, continuable, own_data, require_rows, row_keys, with_policies
from brim.workflows.prediction.scoring import Load
from brim.workflows.runs import PredictResult


def plan_prediction(
    config: Config,
    dataset: Data | None,
    wanted: Wanted,
    *,
    device: str | None = None,
    memory_bytes: int | None = None,
    notes: Sequence[str] = (),
    say: Say = say_nothing,
) -> GenerationPlan:
    """Plan what `brim predict` would decide for these rows: how many run together, memory, time and engine.

    Reads the tokenizer, the base model's config.json and the data; loads no weights. dataset: default: the key
    `dataset`. device: a name of the catalogue, or "cpu"; memory_bytes: of any other GPU; neither: the local device.

    Raises ConfigError, DataError, ModelError and InputError, but not for prompts that do not fit: the plan names them.
    """
    is_at_hand = device in (None, "cpu") and memory_bytes is None
    if device is None and memory_bytes is None and not torch.cuda.is_available():
        device = "cpu"
    asked = ask(config, phase="generate", device=device, memory_bytes=memory_bytes)
    if asked.device.is_cpu:  # which processes share; a GPU each has for itself
        asked = replace(asked, device=asked.device.among(wanted.num_members))
    data = dataset if dataset is not None else config.dataset
    if data is None:
        raise ConfigError(
            what="there is no data set, and a plan depends on how long its prompts are",
            expected="--dataset FILE, the key `dataset`, or dataset=… in Python",
            fix="name a csv, tsv, json, jsonl or parquet file; `brim memory --phase generate` needs none",
        )
    say(model_note(asked.config, asked.device.name, trains=False))
    session = with_policies(_session(asked), on_error=wanted.on_error, on_overlong=wanted.on_overlong)
    source = read(data)
    session = with_labels(session, source)
    if device is None and memory_bytes is None:
        session = with_engine(replace(session, device=torch.device("cuda")), is_loaded=False, say=say)
    prompts = prompts_asked(source, session, wanted, [*notes, *map(str, session.choices)], say).prompts
    if not len(prompts):
        raise DataError(what="there is no prompt to plan for", where=source.name, fix="name another data set")
    is_spent = not wanted.scores
    how: dict[str, Any] = {"num_members": wanted.num_members, "is_spent": is_spent, "is_at_hand": is_at_hand}
    request = request_as_merged(asked, session, prompts, **how, say=say)
    return plan_job(request, say=say)


def _session(asked: Asked) -> Session:
    encoder = load_encoder(asked.folder, trust_remote_code=asked.config.trust_remote_code)
    chat, _ = settled_day(asked.config.chat, encoder)
    config, device = asked.config.having("chat", chat), torch.device("cpu")
    return Session(config=config, choices=asked.choices, folder=asked.folder, encoder=encoder, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedPrompts:
    """Hold the prompts to respond to, and where they come from."""

    source: Source
    prompts: TokenRows
    ledger: Ledger
    keys: Keys
    hashes: Keys  # of the prompts


@no_library_warnings()
def predict(
    session: Session,
    dataset: Data,
    wanted: Wanted,
    *,
    weights: Load,
    is_loaded: bool,
    is_spent: bool,
    notes: Sequence[str],
    say: Say,
    on_batch: OnBatch,
) -> PredictResult:
    """Respond to each row. See Model.predict.

    weights: loads the model, once there is something to generate. is_loaded: it is there already. is_spent: nothing
    will be computed with it afterwards, so that what is changed in it need not be put back.
    """
    session = with_policies(session, on_error=wanted.on_error, on_overlong=wanted.on_overlong)
    if wanted.resume and wanted.output is not None:
        session = as_begun(session, wanted.output)
    if session.config.generation.max_time is not None:
        notes = [*notes, _BY_THE_CLOCK]
    say(status("reading the data"))
    source = read(dataset)
    session = with_labels(session, source)
    session = with_engine(session, is_loaded=is_loaded, say=say)
    asked = prompts_asked(source, session, wanted, notes, say)
    if wanted.output is None:
        work = _Work(session, wanted, asked, is_spent, responses=HeldRecords(), scores=HeldRecords())
        return work.finish(work.generate(weights, say=say, on_batch=on_batch), say=say)
    now = fingerprint(session, split=wanted.split)
    with open_job(wanted.output, now, resume=wanted.resume, key=wanted.key, say=say) as job:
        work = _Work(session, wanted, asked, is_spent, responses=job.responses, scores=job.scores, job=job)
        work.require_same_prompts()
        for line in work.what_is_done():
            say(line)
        try:
            return work.finish(work.generate(weights, say=say, on_batch=on_batch), say=say)
        except KeyboardInterrupt:
            stopped = f"stopped after {format_count(work.responses.num_done, 'row')}"
            go_on = "continue with --resume, in Python with resume=True"
            raise interruption(Problem(what=stopped, where=str(wanted.output), fix=go_on)) from None


_BY_THE_CLOCK = (
    "generation.max_time: how long a response gets depends on the clock and on the rows beside it; another run gives "
    "other responses, and --resume keeps those that were cut"
)


class _Work:
    """Hold a prediction in progress. job: None for one that is held in memory."""

    def __init__(
        self,
        session: Session,
        wanted: Wanted,
        asked: AskedPrompts,
        is_spent: bool,
        *,
        responses: Records,
        scores: Records,
        job: Job | None = None,
    ) -> None:
        self._session, self._wanted, self._asked, self._job = session, wanted, asked, job
        self._is_spent = is_spent and not wanted.scores  # which are of the weights as they were
        self._records = responses, scores
        self.responses = DoneRows(responses, keys=asked.keys, prompts=asked.hashes)
        self._scores = DoneRows(scores, keys=asked.keys, prompts=asked.hashes)
        self._sittings: list[dict[str, Any]] = []  # of this process alone, without a job
        self._num_before = self.responses.num_done

    def require_same_prompts(self) -> None:
        """Raise OutputError, naming the rows, where a row that is done has another prompt now."""
        changed = self.responses.changed
        if len(changed):
            rows = self._asked.prompts.keys[changed].tolist()
            known = "" if self._wanted.key else "; for data whose rows move, begin with --key COLUMN"
            raise OutputError(
                what=f"{format_count(len(rows), 'row is', 'rows are')} done, and the prompt has changed since",
                where=self._asked.source.places(rows),
                expected="the same data, or more of it",
                fix=f"restore the data, or write to another output{known}",
            )

    def what_is_done(self) -> list[str]:
        """Return notes on a job that is continued; none on a new one."""
        if self._job is None or not len(self._job.responses):
            return []
        num_rows, num_done = len(self._asked.keys), self.responses.num_done
        lines = [f"continuing: {num_done:,} of {num_rows:,} rows are done"]
        sittings = self._job.sittings()
        engine = self._session.config.generation.engine
        begun = next((line["about"]["engine"] for line in sittings if line["event"] == "begins"), engine)
        if "vllm" in (begun, engine) and begun != engine:
            lines.append(f"generation.engine was {begun} when it began, and is {engine} now, which may round otherwise")
        before = max((line.get("num_input_rows", 0) for line in sittings), default=0)
        if 0 < before < num_rows:
            lines.append(f"the data has grown since, from {before:,} to {format_count(num_rows, 'row')}")
        num_gone = len(self._job.responses.keys()) - self.responses.num_found
        if num_gone:
            gone = format_count(num_gone, "row that was done is", "rows that were done are")
            lines.append(f"{gone} not in the data any more, and not in the output")
        return lines

    def generate(self, weights: Load, *, say: Say, on_batch: OnBatch) -> float:
        """Respond to the rows that are not done, and score them if asked to. Return the seconds of generating."""
        wanted, seconds = self._wanted, 0.0
        if self.responses.num_done:
            on_batch(self.responses.num_done)
        with ExitStack() as stack:
            several = None
            if not is_one_process(self._session.config, wanted.num_members):
                is_spent = not wanted.scores
                several = Several(self._session, wanted.num_members, is_spent=is_spent, say=say)
                stack.enter_context(several)
            if len(self.responses.to_do()):
                seconds = self._generate(weights, several, say, on_batch)
            if not wanted.scores or not len(self._scores.to_do()):
                return seconds
            if several is None:
                score_missing(weights(), self._session, self._asked.prompts, self.responses, self._scores, say=say)
            else:
                several.score(self._asked.prompts, self.responses, self._scores)
        return seconds

    def finish(self, seconds: float, *, say: Say) -> PredictResult:
        """Put the predictions together: in memory, or, of a job, as the output with its ledger and summary.

        A file that exists with the same content stays as it is.
        """
        counts, predictions, job = Counts(), self._predictions(), self._job
        ledger, frame = None, pd.DataFrame()
        if job is None:
            frame = frame_of(predictions.table(counts))
            summary = summary_of(counts, self._asked.ledger, self._sittings, device=str(self._session.device))
        else:
            output = job.folder.output
            with writing("the output", output):
                write_blocks(predictions.schema, predictions.blocks(counts), job.folder.assembled)
            summary = summary_of(counts, self._asked.ledger, job.sittings(), device=str(self._session.device))
            ledger = ledger_path(output) if len(self._asked.ledger) else None
            if job.is_in_place() and read_summary(output) is not None:
                say(f"the output is complete: {output} stays as it is")
            else:
                write_ledger(self._asked.ledger, output)
                write_summary(summary, output)
            job.put_in_place()
        for line in counts.labels.notes(self._session.config.output_features[0]):
            say(line)
        left_out = [(entry.key, entry.event, entry.why) for entry in self._asked.ledger.left_out()]
        return PredictResult(
            output=self._wanted.output,
            ledger=ledger,
            summary=summary,
            seconds=seconds,
            num_new_rows=self.responses.num_done - self._num_before,
            left_out=pd.DataFrame(left_out, columns=["row", "reason", "why"]),
            read_predictions=(lambda: frame) if job is None else lru_cache(maxsize=1)(self._frame_of_job),
        )

    def _generate(self, weights: Load, several: Several | None, say: Say, on_batch: OnBatch) -> float:
        asked, config = self._asked, self._session.config
        is_sampled_by_key = self._wanted.key is not None and config.generation.do_sample
        prompts = asked.prompts.with_keys(asked.keys >> np.uint64(1)) if is_sampled_by_key else asked.prompts
        places = self.responses.to_do()
        to_do, lost = prompts.take(places), dict[int, Problem]()

        def keep(positions: Sequence[int], bodies: Sequence[bytes]) -> None:
            self.responses.add(places[list(positions)].tolist(), bodies)
            on_batch(len(positions))

        def keep_finished(finished: Sequence[Finished]) -> None:
            keep([each.position for each in finished], [each.response.to_bytes() for each in finished])

        def lose(position: int, error: BrimError) -> None:
            place = int(places[position])
            how = str(error).splitlines()[0]
            what = f"two processes ended while they generated its response, the last so: {how}"
            lost[place] = Problem(what=what, fix="leave it out with --on-error skip")
            self._entries(lost)  # which may refuse

        with ExitStack() as stack:
            if several is None:
                generation = stack.enter_context(
                    Generation(weights, self._session, to_do, is_spent=self._is_spent, say=say)
                )
                measures = self._job is not None
                run: Callable[[], float] = partial(generation.run, to_do, on_finished=keep_finished, measures=measures)
                about = generation.about
            else:
                several.ready(to_do, on_finished=keep, on_lost=lose)
                run, about = several.generate, several.about
            self._note("begins", about=about, num_input_rows=len(asked.keys))
            started = time.perf_counter()
            try:
                seconds = run()
            except BaseException:
                with suppress(WriteError):  # the disk may be what is full
                    self._note("ends", seconds=time.perf_counter() - started)
                raise
            self._note("ends", seconds=seconds, about=about)
        if lost:
            self._leave_out(lost, say)
        return seconds

    def _entries(self, lost: Mapping[int, Problem]) -> list[Entry]:
        """Return what the ledger says of rows that are left out, by position. Raises DataError as --on-error says."""
        asked, split = self._asked, self._wanted.split
        keys = asked.prompts.keys
        problems = {int(keys[position]): problem for position, problem in lost.items()}
        faults = RowFaults(locate=asked.source.locate, problems=problems)
        policy = self._session.config.preprocessing.on_bad_row
        return faults.settle(policy, num_rows=len(keys), name=asked.source.name, split_of=lambda key: split)

    def _leave_out(self, lost: Mapping[int, Problem], say: Say) -> None:
        asked, entries = self._asked, self._entries(lost)
        kept = np.delete(np.arange(len(asked.keys)), list(lost))
        for line in Ledger(num_rows=asked.ledger.num_rows, entries=entries).summary():
            say(line)
        self._asked = replace(
            asked,
            prompts=asked.prompts.take(kept),
            keys=asked.keys[kept],
            hashes=asked.hashes[kept],
            ledger=asked.ledger.with_more(entries),
        )
        self.responses, self._scores = (
            DoneRows(records, keys=self._asked.keys, prompts=self._asked.hashes) for records in self._records
        )

    def _note(self, event: str, **more: Any) -> None:
        if self._job is None:
            self._sittings.append({"event": event, **more})
        else:
            self._job.note(event, **more)

    def _predictions(self) -> Predictions:
        config = self._session.config
        reader = label_reader(config)
        text, label = (f"{config.answer_name}_{kind}" for kind in _COLUMNS)
        return Predictions(
            source=self._asked.source,
            prompts=self._asked.prompts,
            encoder=self._session.encoder,
            name=text,
            response=lambda position: Response.of_bytes(self.responses.body(position)),
            log_probability=(lambda position: score_of(self._scores.body(position))) if self._wanted.scores else None,
            labels=None if reader is None else (label, reader),
            typed=self._wanted.output is not None and self._wanted.output.suffix == ".parquet",
        )

    def _frame_of_job(self) -> pd.DataFrame:
        """Read the predictions again from the job's journals."""
        assert self._job is not None
        with self._job.reopened() as (responses, scores):
            held = _Work(self._session, self._wanted, self._asked, False, responses=responses, scores=scores)
            return frame_of(held._predictions().table(Counts()))


def prompts_asked(source: Source, session: Session, wanted: Wanted, notes: Sequence[str], say: Say) -> AskedPrompts:
    """Return the prompts of the rows that can be responded to; notes and the ledger say why the others cannot."""
    kinds = _COLUMNS if label_reader(session.config) else _COLUMNS[:1]
    columns = [f"{session.config.answer_name}_{kind}" for kind in kinds]
    require_free_names(source, columns, with_scores=wanted.scores)
    prompts = prompts_of(source, session.config, session.encoder, only=wanted.split)
    keep: Keep = "last" if wanted.on_overlong == "truncate_left" else "first"
    kept = continuable(prompts.rows, session, source, split=wanted.split, keep=keep)
    ledger = prompts.ledger.with_more(kept.entries)
    if wanted.is_unnamed:
        say(own_data(source, session, wanted.split, num_rows=len(kept.prompts)))
    tokens = format_count(int(kept.prompts.lengths.sum()), "token")
    told = planned("data", f"{format_count(len(kept.prompts), 'prompt')}, {tokens}")
    for line in [told, *notes, *prompts.notes, *ledger.summary()]:
        say(line)
    if wanted.split != "full":
        require_rows(kept.prompts, wanted.split, source)
    return AskedPrompts(
        source=source,
        prompts=kept.prompts,
        ledger=ledger,
        keys=row_keys(source, kept.prompts.keys, column=wanted.key),
        hashes=np.fromiter((prompt_hash(row.input_ids) for row in kept.prompts), np.uint64, count=len(kept.prompts)),
    )


_COLUMNS = ("response", "predictions")  # of an answer: its text and, of a category, its label; called as in Ludwig


_A_FEW = 8  # prompts


def answered(llm: LLM, session: Session, prompts: TokenRows, *, say: Say, on_batch: OnBatch) -> list[str]:
    """Return the model's text for each of at least one prompt; a few are answered without a plan, which takes longer.

    Where memory.budget sets a limit, they are planned, too.
    """
    engine = None
    if len(prompts) <= _A_FEW and session.config.memory.budget == "auto":
        rows = min(rows_by_hand(session.config) or _A_FEW, len(prompts))
        engine = engine_by_hand(llm, session, rows=rows, on_smaller=lambda smaller: say(str(smaller)))
    return list(responses_to(llm, session, prompts, engine=engine, say=say, on_batch=on_batch)["response"])
