"""Choose the engine that writes a job's responses, as the configuration and the plan say.

Where it costs little, engines are timed on a sample of the job's prompts; brim's own is taken unless another was
notably faster. vLLM gets folders, since it loads the weights itself; brim's own model is not loaded for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brim.data.chat import chat_template, end_ids_of_turns
from brim.data.tokens import TokenRows, label_tokens
from brim.errors import BrimError, ConfigError, InputError, Problem
from brim.infer.engines import (
    USUAL_PASS_TOKENS,
    Constraint,
    Engine,
    Finished,
    FixedRoom,
    LabelConstraint,
    PagedEngine,
    Response,
    Room,
    RowsAtOnce,
    SlotsEngine,
    Smaller,
    StaticEngine,
    VllmEngine,
    VllmModel,
    base_model,
    end_ids,
    end_ids_of,
    generation_settings,
    rows_at_once,
    why_not_slots,
)
from brim.memory import budget_of, device_at_hand
from brim.models import LLM, AdapterFolder, open_adapter, precision
from brim.session import Session
from brim.units import format_count, format_seconds


@dataclass(slots=True, kw_only=True)
class Timed:
    """Seconds of each engine that wrote the sample to its end, and why the others did not."""

    seconds: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)


class _TooLong(Exception):
    """The time is up."""


def time_engines(
    kinds: Sequence[str],
    make: Callable[[str], Engine],
    prompts: TokenRows,
    clock: Callable[[], float],
    *,
    allowed_s: float,
    must_agree: bool,
) -> Timed:
    """The first engine is the one that others are compared with, and it may take its time.

    make: a new engine of that kind, with a room of its own. must_agree: an engine whose responses differ from the
    first one's is dropped. allowed_s: for all together, after which the others end; none goes on once it is slower.
    """
    timed, expected = Timed(), dict[int, Response]()
    for number, kind in enumerate(kinds):
        left_s = allowed_s - sum(timed.seconds.values()) if number else float("inf")
        limit_s = min(left_s, *timed.seconds.values()) if timed.seconds else left_s
        try:
            engine = make(kind)
            _write(engine, prompts.take([0]), clock, limit_s=float("inf"))  # kernels and buffers come with it
            seconds, responses = _write(engine, prompts, clock, limit_s=limit_s)
        except _TooLong:
            timed.dropped[kind] = "slower, and stopped on the way"
            continue
        except BrimError as error:
            if not number:
                raise
            timed.dropped[kind] = error.problems[0].what
            continue
        if not number:
            expected = responses
        elif must_agree and responses != expected:
            timed.dropped[kind] = "its responses differ, and in fp32 they must not"
            continue
        timed.seconds[kind] = seconds
    return timed


def _write(
    engine: Engine, prompts: TokenRows, clock: Callable[[], float], *, limit_s: float
) -> tuple[float, dict[int, Response]]:
    responses: dict[int, Response] = {}
    started = clock()

    def keep(finished: Sequence[Finished]) -> None:
        responses.update((each.position, each.response) for each in finished)
        if len(responses) < len(prompts) and clock() - started > limit_s:
            raise _TooLong

    engine.run(prompts, on_finished=keep)
    return clock() - started, responses


def vllm_engine(session: Session, *, rows: int | None) -> VllmEngine:
    """What responds to the session's prompts. rows: at once, where somebody says so.

    Raises InputError where vLLM is not installed, or cannot do what the configuration asks.
    """
    config = session.config
    adapter = _adapter(session)
    _require_plain_weights(session, adapter)
    model = VllmModel(
        folder=str(session.folder.path),
        precision=precision(config.precision),  # type: ignore[arg-type]  # resolved: no `auto`
        device=session.device,
        memory_share=_memory_share(session),
        adapter=None if adapter is None else adapter.path,
        adapter_rank=0 if adapter is None else adapter.settings.r,
        trust_remote_code=config.trust_remote_code,
        rows=rows,
    )
    settings = settings_with(session, end_ids_of(_stored_generation(session), session.encoder.eos_id))
    return VllmEngine(model, settings=settings, seed=config.random_seed, constraint=constraint_of(session, settings))


def _memory_share(session: Session) -> float:
    """Of the GPU's memory: what the run may take, the margin aside, which vLLM's own start-up measures."""
    device = device_at_hand(session.device)
    if device.is_cpu:
        return 1.0  # it will be refused
    budget = budget_of(session.config.memory, device, is_at_hand=True)
    return min((budget.limit_bytes - budget.margin_bytes) / device.memory_bytes, 1.0)


def _adapter(session: Session) -> AdapterFolder | None:
    adapter = session.config.adapter
    if adapter is None or adapter.pretrained_adapter_weights is None:
        return None
    return open_adapter(adapter.pretrained_adapter_weights)


def _require_plain_weights(session: Session, adapter: AdapterFolder | None) -> None:
    config = session.config
    if config.initialize == "random":
        raise _refused("initialize is random, and it loads weights from files")
    if config.quantization is not None:
        raise _refused("the base is quantised as it is loaded, which vLLM does in another way")
    if adapter is not None and adapter.settings.use_dora:
        raise _refused("the adapter is a DoRA, which it does not know")
    if adapter is not None and adapter.settings.bias_type != "none":
        raise _refused("the adapter has biases, which it does not know")


def _stored_generation(session: Session) -> Any:
    """What the model's files say of generation, as the loaded model would."""
    from transformers import AutoConfig, GenerationConfig

    path = session.folder.path
    if (path / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(path)
    return GenerationConfig.from_model_config(
        AutoConfig.from_pretrained(path, trust_remote_code=session.config.trust_remote_code)
    )


def _refused(reason: str) -> InputError:
    return InputError(
        Problem(
            what=f"vLLM cannot be used: {reason}",
            where="generation.engine: vllm",
            fix="set generation.engine: auto, or `brim export RUN --merge` first and predict with that model",
        )
    )


def engine_by_hand(llm: LLM, session: Session, *, batch_rows: int | RowsAtOnce) -> Engine:
    """What responds to the session's prompts, so many at a time."""
    at_once = rows_at_once(batch_rows)
    room = FixedRoom(at_once.num_rows, prefill_tokens=USUAL_PASS_TOKENS)
    return engine_for(llm, session, room=room, on_smaller=at_once.on_smaller)


def engine_for(
    llm: LLM,
    session: Session,
    *,
    room: Room,
    on_smaller: Callable[[Smaller], None] = lambda smaller: None,
    kind: str | None = None,
) -> Engine:
    """What responds to the session's prompts.

    on_smaller: told each time that fewer rows go on together. kind: where it was chosen already; default: as
    `generation.engine` says; vLLM, which loads the weights itself, is made elsewhere. Raises ConfigError for an engine
    that cannot do what the configuration asks.
    """
    settings = settings_of(llm, session)
    how: dict[str, Any] = {
        "settings": settings,
        "room": room,
        "seed": session.config.random_seed,
        "device": llm.device,
        "precision": llm.precision,
        "constraint": constraint_of(session, settings),
        "on_smaller": on_smaller,
    }
    asked = kind or session.config.generation.engine
    base = base_model(llm.model)
    against = why_not_slots(type(base), base.config, settings)
    if asked == PAGED:
        return PagedEngine(llm.model, **how)
    if asked == SLOTS and against:
        raise ConfigError(cannot(asked, against))
    if asked == STATIC or against:
        return StaticEngine(llm.model, **how)
    return SlotsEngine(llm.model, refill=asked != UNREFILLED, **how)


def cannot(engine: str, why: str) -> Problem:
    """An engine that was asked for does not do what the other keys ask."""
    return Problem(
        what=f"generation.engine is {engine}, and {why}", where="generation.engine", fix="set generation.engine: auto"
    )


def constraint_of(session: Session, settings: Mapping[str, Any]) -> Constraint | None:
    """To the labels of a category that asks for it. settings: what `settings_of` gives."""
    feature = session.config.output_features[0]
    decoder = feature.categories
    if decoder is None or not decoder.constrain_to_vocabulary:
        return None
    if not feature.labels:
        raise ConfigError(
            Problem(
                what=f"the labels of `{feature.name}` are not known, to which decoder.constrain_to_vocabulary holds it",
                where="output_features.0.decoder.match",
                fix="name the labels in output_features.0.preprocessing.vocab, or take the folder of a run",
            )
        )
    return LabelConstraint(label_tokens(feature.labels, session.encoder), end_ids=settings["eos_token_id"])


def settings_of(llm: LLM, session: Session) -> dict[str, Any]:
    """How the model generates, for transformers' GenerationConfig."""
    return settings_with(session, end_ids(llm.model, session.encoder.eos_id))


def settings_with(session: Session, own_ends: Sequence[int]) -> dict[str, Any]:
    """As `settings_of`. own_ends: tokens at which the model stops by itself."""
    encoder, chat = session.encoder, session.config.chat
    ends = [] if chat is None else end_ids_of_turns(chat_template(chat, encoder), encoder)
    return generation_settings(
        session.config.generation,
        pad_id=encoder.pad_id,
        end_ids=list(dict.fromkeys([*ends, *own_ends])),
    )


MOST_S = 30.0


_SHARE_OF_RUN = 0.02


_SETS_OF_ROWS = 2  # with fewer rows than twice those that run together, none takes the place of another


_LEAST_GAIN = 1.05  # for less, jobs would change their engine with what else the machine does


SLOTS, STATIC, PAGED = "slots", "static", "paged"


UNREFILLED = "slots without refilling"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """What writes the responses, and why."""

    kind: str
    reason: str
    rows_per_s: Mapping[str, float] | None = None  # of each that was measured

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"kind": self.kind, "reason": self.reason, "rows_per_s": dict(self.rows_per_s or {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What to measure with. Without positions, `reason` says why nothing is measured."""

    positions: tuple[int, ...]  # of prompts
    allowed_s: float  # for all engines together
    reason: str


def sample_of(lengths: ArrayLike, *, rows: int, num_engines: int, run_s: float | None) -> Sample:
    """Prompts of about the median length, enough for rows to take the place of others.

    lengths: tokens of the job's prompts. rows: that run together. run_s: the job's estimated seconds, of which a small
    share may go into measuring; None: not known.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    wanted = _SETS_OF_ROWS * rows
    if num_engines < 2:
        return _none("no other engine can write these responses")
    if run_s is None:
        return _none("it is not known how long the job takes")
    if wanted > len(tokens):
        return _none(
            f"{format_count(len(tokens), 'row is', 'rows are')} fewer than two sets of the {rows:,} that run together"
        )
    allowed_s = min(_SHARE_OF_RUN * run_s, MOST_S)
    positions = _middle(tokens, wanted)
    needed_s = num_engines * run_s * float(tokens[positions].sum() / tokens.sum())
    if needed_s > allowed_s:
        return _none(
            f"measuring {num_engines} engines takes about {format_seconds(needed_s)}, more than "
            f"{format_seconds(allowed_s)}: {_SHARE_OF_RUN:.0%} of the job, {format_seconds(MOST_S)} at most"
        )
    return Sample(positions=tuple(positions.tolist()), allowed_s=allowed_s, reason="")


def fastest(seconds: Mapping[str, float], *, num_rows: int, dropped: Mapping[str, str]) -> EngineChoice:
    """brim's own engine, unless another was notably faster on the sample.

    seconds: of each engine that wrote it, brim's own among them. dropped: why others did not.
    """
    speeds = {kind: num_rows / taken_s for kind, taken_s in seconds.items()}
    best = max(speeds, key=speeds.__getitem__)
    kind = best if speeds[best] > _LEAST_GAIN * speeds[SLOTS] else SLOTS
    listed = ", ".join(f"{name} {speed:,.3g}" for name, speed in sorted(speeds.items(), key=lambda each: -each[1]))
    beside = "".join(f"; {name}: {reason}" for name, reason in dropped.items())
    return EngineChoice(
        kind=kind, reason=f"rows/s over {format_count(num_rows, 'row')}: {listed}{beside}", rows_per_s=speeds
    )


def unmeasured(reason: str) -> EngineChoice:
    """brim's own engine: in the benchmark it is the fastest on CPUs, and rows that end early leave it at once."""
    return EngineChoice(kind=SLOTS, reason=f"the usual choice, not measured: {reason}")


def _middle(tokens: NDArray[np.int64], count: int) -> NDArray[np.intp]:
    """Positions of so many rows about the median."""
    order = np.argsort(tokens, kind="stable")
    start = (len(tokens) - count) // 2
    return np.sort(order[start : start + count])


def _none(reason: str) -> Sample:
    return Sample(positions=(), allowed_s=0.0, reason=reason)
