"""Compute as one of several members, in a process of its own that holds the model.

A member opens the session of the process that started it, loads the model, and carries out one job after the other: it
prepares, says so, and answers leases until another job comes or it is ended. What it says and hears is JSON; tokens and
results of many bytes are texts in it.
"""

from __future__ import annotations

import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.config import Choice, load_config
from brim.data.tokens import TokenRows
from brim.errors import ConfigError
from brim.infer import VectorStore, first_vectors, named_layers
from brim.infer.engines import Finished
from brim.infer.metrics import BATCH_TOKENS
from brim.memory.devices import limit_lifted
from brim.models import load_llm, model_note, no_library_warnings
from brim.notes import Say, is_told, kind_of, short_of, topic_of
from brim.session import Session, open_session, with_choices
from brim.workflows.prediction.generation import Generation
from brim.workflows.prediction.job import differences, fingerprint
from brim.workflows.prediction.scoring import Load, batches_for, collected, scored
from brim.workflows.runs import Tell

_VLLM_ROWS = 256  # that fill it

_LEAST_ROWS = 64  # that are scored as a first lease

_SEND_S = 0.5  # between two messages with responses

_PART_BYTES = 8 << 20  # of vectors in a message

_KEY = "generation.merge_adapter"


@no_library_warnings()
@limit_lifted()
def serve(order: Mapping[str, Any], tell: Tell) -> None:
    """Carry out jobs as one of several members, in a process of its own, until it is ended."""
    session = _session_of(order)
    weights: Load = cache(lambda: load_llm(session.config, session.folder, session.device, trainable=False))
    if session.config.generation.engine != "vllm":  # which loads them itself
        weights()

    def say(line: str) -> None:
        if is_told(line):
            tell(note=str(line), kind=kind_of(line), topic=topic_of(line), short=short_of(line))

    tell(asks=True)
    message = tell.hear()
    while True:
        job = message["job"]
        with ExitStack() as stack:
            if job["does"] == "generate":
                work = _generating(job, order, session, weights, stack, tell, say)
            elif job["does"] == "score":
                work = _scoring(job, session, weights, tell, say)
            elif job["does"] == "embed":
                work = _embedding(job, order, session, weights, tell, say)
            else:
                work = _evaluating(job, order, session, weights, tell, say)
            while "lease" in (message := tell.hear()):
                started = time.perf_counter()
                work(message["lease"])
                tell(finished=time.perf_counter() - started)


def _session_of(order: Mapping[str, Any]) -> Session:
    """Open the coordinator's session here. Raises ConfigError, naming what differs, for one of other responses."""
    session = open_session(load_config(order["config"]).config, is_one_of_several=True)
    changed = differences(order["fingerprint"], fingerprint(session, split="full"))
    if changed:
        raise ConfigError(
            what="this process would give other responses than the one that started it: " + "; ".join(changed),
            where=f"process {order['member']}",
            fix="give all of them the same files and versions",
        )
    # GPUs are not shared.
    return replace(session, num_processes=order["num_here"] if session.device.type == "cpu" else 1)


def _generating(
    job: Mapping[str, Any],
    order: Mapping[str, Any],
    session: Session,
    weights: Load,
    stack: ExitStack,
    tell: Tell,
    say: Say,
) -> Callable[[Mapping[str, Any]], None]:
    """Prepare to respond, and say so; return what responds to the rows of a lease."""
    if job["merge_adapter"] is not None:
        choice = Choice(key=_KEY, value=job["merge_adapter"], reason="as the first process has it")
        session = with_choices(session, [choice])
    generation = stack.enter_context(
        Generation(
            weights,
            session,
            TokenRows.of_lengths(array_of(job["lengths"], "<i4")),
            is_spent=job["is_spent"],
            compared=unpacked(job["compared"]),
            num_members=order["members"],
            say=say,
        )
    )
    plan = generation.about.get("plan", {})
    least_units = generation.about["rows_at_once"] or _VLLM_ROWS
    tell(ready=generation.about, least_units=least_units, predicted_s=plan.get("seconds"))

    def respond(lease: Mapping[str, Any]) -> None:
        units: list[int] = []
        bodies: list[bytes] = []
        sent_s = time.monotonic()

        def send() -> None:
            nonlocal sent_s
            if units:
                sizes, text = list(map(len, bodies)), b64encode(b"".join(bodies)).decode()
                tell(units=units, values={"sizes": sizes, "bodies": text})
            units.clear()
            bodies.clear()
            sent_s = time.monotonic()

        def keep(finished: Sequence[Finished]) -> None:
            units.extend(each.position for each in finished)
            bodies.extend(each.response.to_bytes() for each in finished)
            if time.monotonic() - sent_s >= _SEND_S:
                send()

        generation.run(unpacked(lease["rows"]), on_finished=keep, measures=False)
        send()

    return respond


def _scoring(
    job: Mapping[str, Any], session: Session, weights: Load, tell: Tell, say: Say
) -> Callable[[Mapping[str, Any]], None]:
    """Prepare to score responses, and say so; return what scores the batches of a lease."""
    llm = weights()
    how: dict[str, Any] = {"whole_tokens": BATCH_TOKENS, "doing": "scoring"}
    at_once = batches_for(session, [unpacked(job["shape"])], llm=llm, say=say, **how)
    tell(ready={}, least_units=1, predicted_s=None)

    def score(lease: Mapping[str, Any]) -> None:
        rows, first = unpacked(lease["rows"]), 0
        for unit, num_rows in enumerate(lease["batches"]):
            found = scored(llm, session, rows.take(np.arange(first, first + num_rows)), at_once)
            tell(units=[unit], values=[found.loss.tolist()])
            first += num_rows

    return score


def _evaluating(
    job: Mapping[str, Any], order: Mapping[str, Any], session: Session, weights: Load, tell: Tell, say: Say
) -> Callable[[Mapping[str, Any]], None]:
    """Prepare to score rows with answers, and say so; return what scores those of a lease."""
    llm = weights()
    say(model_note(session.config, llm, trains=False))
    batches = batches_for(session, [unpacked(job["shape"])], llm=llm, say=say, lengths=_share(job, order))
    tell(ready={}, least_units=_LEAST_ROWS, predicted_s=None)

    def evaluate(lease: Mapping[str, Any]) -> None:
        found = scored(llm, session, unpacked(lease["rows"]), batches)
        columns = (found.loss, found.num_correct, found.num_supervised)
        tell(units=list(range(len(found.keys))), values=np.stack(columns, axis=1).tolist())

    return evaluate


def _embedding(
    job: Mapping[str, Any], order: Mapping[str, Any], session: Session, weights: Load, tell: Tell, say: Say
) -> Callable[[Mapping[str, Any]], None]:
    """Prepare to collect the outputs of layers, and say so; return what does it for the batches of a lease.

    Of each batch the vectors of its rows are told, by layer: all of them, or one part after the other.
    """
    llm = weights()
    say(model_note(session.config, llm, trains=False))
    layers = named_layers(llm.model, job["layers"])
    lengths = _share(job, order)
    how: dict[str, Any] = {"whole_tokens": job["whole_tokens"], "lengths": lengths, "doing": "embedding of a batch"}
    at_once = batches_for(session, [unpacked(job["shape"])], llm=llm, say=say, **how)
    tell(ready={}, least_units=1, predicted_s=None)

    def embed(lease: Mapping[str, Any]) -> None:
        rows, first_row = unpacked(lease["rows"]), 0
        for place, (unit, num_rows) in enumerate(zip(lease["units"], lease["batches"], strict=True)):
            batch = rows.take(np.arange(first_row, first_row + num_rows))
            num_vectors = int(first_vectors(batch, job["how"]["pooling"])[-1])
            stores = {name: VectorStore(num_vectors, folder=None) for name in layers}
            collected(llm, session, batch, layers, into=stores, batches=at_once, **job["how"])
            most = max(1, _PART_BYTES // (4 * sum(store.width for store in stores.values())))
            for first in range(0, num_vectors, most):
                end = min(first + most, num_vectors)
                found = {name: text_of(store.read(first, end), "<f4") for name, store in stores.items()}
                part = {"unit": unit, "first": first, "end": end, "vectors": found}
                tell(units=[place] if end == num_vectors else [], values=part)
            first_row += num_rows

    return embed


def _share(job: Mapping[str, Any], order: Mapping[str, Any]) -> NDArray[np.int64]:
    """Return the lengths of a member's part of the rows, the longest among them."""
    lengths: NDArray[np.int64] = np.sort(array_of(job["lengths"], "<i4").astype(np.int64))[:: -order["members"]]
    return lengths


def text_of(values: ArrayLike, dtype: str) -> str:
    return b64encode(np.asarray(values).astype(dtype).tobytes()).decode()


def array_of(text: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(b64decode(text), dtype=dtype)


def packed(rows: TokenRows) -> str:
    return b64encode(rows.to_bytes()).decode()


def unpacked(rows: str) -> TokenRows:
    return TokenRows.of_bytes(b64decode(rows))
