"""Let a person talk with a model: answers are streamed as they are generated.

With `chat`, a prompt holds the turns before it; without it, each prompt stands alone.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeAlias

from brim.config.prompts import prompt_columns
from brim.config.schema import Config
from brim.config.text import read_yaml
from brim.data import prompts_of
from brim.data.chat import has_template
from brim.data.read import Source, read_columns
from brim.data.tokens import TextEncoder, TokenRows
from brim.errors import DataError, InputError
from brim.infer import GrowingText, KeptCache, stream_tokens
from brim.infer.engines import FinishReason, SlotsEngine
from brim.models import LLM
from brim.models.loss import base_model
from brim.notes import Say
from brim.planning import GenerationPlan, generation_request, plan_job
from brim.session import Session, say_nothing, with_settings
from brim.workflows.prediction.evaluation import respond
from brim.workflows.prediction.launch import constraint_of, engine_by_hand, require_fits
from brim.workflows.prediction.prompts import require_continuable, require_texts
from brim.workflows.runs import settings_of

_MESSAGES = "messages"


Turn = Mapping[str, str]


class Conversation:
    """Ask a model one thing after the other. With `chat`, the template writes all turns; else each prompt stands alone.

    Without `chat`, a text is the input feature's value, around which `prompt` puts its words; where these ask for more
    columns, it is a JSON object of them. say: gets notes for the person, such as that the oldest turns were forgotten.
    """

    def __init__(self, session: Session, llm: LLM, *, say: Say = say_nothing) -> None:
        _require_no_examples(session.config)
        self._session = replace(session, config=_for_one(session.config))
        self._llm, self._say = llm, say
        self._system: str | None = None
        self._turns: list[Turn] = []
        # Of a prompt and its answer: as many as the context holds, or memory.budget.
        self._most_tokens = self._session.folder.context_length
        if self._most_tokens is not None and self.remembers:
            self._most_tokens = tokens_of_one(llm, self._session, most=self._most_tokens)
        self._kept = KeptCache(most_columns=self._most_tokens) if self.remembers else None
        self._answer: Pieces | None = None  # the last one, which may be unfinished
        require_streamable(llm, self._session)
        if not self.remembers and has_template(session.encoder.folder):
            say(
                "each prompt stands alone; the tokenizer has a chat template, which writes a conversation where the "
                "configuration has chat: {} in place of the features"
            )

    @property
    def remembers(self) -> bool:
        """Return whether earlier turns are part of the next prompt."""
        return self._session.config.chat is not None

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Return the turns that are not forgotten, each with its role, the system's first."""
        return (*self._beginning(), *self._turns)

    def ask(self, text: str) -> Pieces:
        """Yield the answer in pieces. Once the iterator is closed or dropped, what it yielded counts as the answer.

        The next question, or `reset`, closes it.
        Raises DataError for a prompt that is empty or too long even alone, or that the template refuses, and InputError
        for one that memory.budget does not hold; the conversation is then as it was.
        """
        require_texts([text])
        self._close()
        question = _turn("user", text)
        prompt = self._remembering(question) if self.remembers else self._alone(text)
        self._answer = self._answered(question, stream_text(self._llm, self._session, prompt, kept=self._kept))
        return self._answer

    def reset(self) -> None:
        """Forget all turns but the system's."""
        self._close()
        self._turns = []
        if self._kept is not None:
            self._kept.clear()

    def set_system(self, text: str | None) -> None:
        """Set the system's turn from now on; None for none.

        Raises InputError without `chat`.
        """
        if not self.remembers:
            raise InputError(
                what="without a chat template there is no system's turn",
                fix="name a configuration that has chat: {} in place of the features",
            )
        if text is not None:
            require_texts([text])
        self._system = text or None

    def set(self, key: str, value: str) -> None:
        """Set a key of `generation`, written as in YAML, from now on. Raises ConfigError, InputError."""
        read, _ = read_yaml(value, "value")
        changed = with_settings(self._session, generation={key.removeprefix("generation."): read})
        require_streamable(self._llm, changed)
        self._session = changed

    @property
    def _new_tokens(self) -> int:
        new_tokens = self._session.config.generation.max_new_tokens
        assert new_tokens is not None, "resolved before"
        return new_tokens

    def _close(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    def _beginning(self) -> list[Turn]:
        return [] if self._system is None else [_turn("system", self._system)]

    def _answered(self, question: Turn, pieces: Pieces) -> Pieces:
        said: list[str] = []
        finish_reason: FinishReason | None = None
        try:
            while True:
                said.append(next(pieces))
                yield said[-1]
        except StopIteration as ended:
            finish_reason = ended.value
        finally:
            pieces.close()
            if self.remembers and (said or finish_reason is not None):
                self._turns += [question, _turn("assistant", "".join(said))]
        if finish_reason == "length":
            self._say(f"the answer was cut at generation.max_new_tokens ({self._new_tokens:,})")
        assert finish_reason is not None, "the iterator has ended"
        return finish_reason

    def _remembering(self, question: Turn) -> TokenRows:
        """Return the prompt of the conversation, or of as much of its end as the context or memory.budget holds."""
        session, kept = self._session, list(self._turns)
        while True:
            messages = [*self._beginning(), *kept, question]
            prompt = _rows({_MESSAGES: [messages]}, session)
            if not kept or not self._is_too_long(prompt):
                break
            kept = kept[2:]  # a question and its answer: templates want them to alternate
        require_continuable(prompt, session, _place)
        is_short = self._most_tokens != session.folder.context_length
        if is_short and self._is_too_long(prompt):
            assert self._kept is not None, "it remembers"
            self._kept.clear()  # or what it holds would count twice
            require_budget(self._llm, session, prompt)
        num_forgotten = (len(self._turns) - len(kept)) // 2
        if num_forgotten:
            them = (
                "question and its answer are" if num_forgotten == 1 else f"{num_forgotten:,} questions and answers are"
            )
            full = "memory.budget is used up" if is_short else "the context is full"
            self._say(f"{full}: the oldest {them} forgotten")
            self._turns = kept
        return prompt

    def _is_too_long(self, prompt: TokenRows) -> bool:
        return self._most_tokens is not None and int(prompt.lengths[0]) > self._most_tokens - self._new_tokens

    def _alone(self, text: str) -> TokenRows:
        config = self._session.config
        columns, own = prompt_columns(config), config.input_features[0].column_name
        row = {own: text} if set(columns) <= {own} else _row(text, columns)
        prompt = _rows({name: [value] for name, value in row.items()}, self._session)
        require_continuable(prompt, self._session, _place)
        return prompt


def _turn(role: str, content: str) -> Turn:
    return {"role": role, "content": content}


def _place(row: int) -> str:
    return "the conversation"


def _for_one(config: Config) -> Config:
    """Return the configuration for a single prompt, of which nothing is dropped or cut."""
    preprocessing = config.preprocessing.model_copy(update={"on_bad_row": "error", "on_overlong": "error"})
    if config.chat is not None:
        config = config.having("chat", config.chat.model_copy(update={"messages": _MESSAGES, "tools": None}))
    return config.having("preprocessing", preprocessing)


def _rows(columns: Mapping[str, list[Any]], session: Session) -> TokenRows:
    source: Source = replace(read_columns(columns, name="the conversation"), locate=_place)
    return prompts_of(source, session.config, session.encoder).rows


def _row(text: str, columns: tuple[str, ...]) -> Mapping[str, Any]:
    """Read a text that holds the values of several columns."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or not set(columns) <= row.keys():
        listed = ", ".join(f'"{name}": …' for name in columns)
        raise DataError(
            what="the prompt's template asks for more than one column", expected=f"a JSON object {{{listed}}}"
        )
    return row


def _require_no_examples(config: Config) -> None:
    if config.chat is None and config.prompt.num_examples:
        raise InputError(
            what="prompt.retrieval looks for examples in a data set, and a conversation has none",
            where="prompt.retrieval",
            fix="set prompt.retrieval=null, with a template that needs none",
        )


_NOTCH = 0.9  # of the tokens that did not fit: those that are tried next, or fewer


Pieces: TypeAlias = Generator[str, None, FinishReason]  # none of them empty; then the reason for the end


def stream_text(llm: LLM, session: Session, prompt: TokenRows, *, kept: KeptCache | None = None) -> Pieces:
    """Yield the response to one prompt in pieces, which joined are what `respond` gives.

    An architecture that brim's own engine cannot generate with yields all of it at the end. kept: see KeptCache; a
    caller that keeps one checks memory.budget itself.
    Raises InputError, at once, for settings that only transformers' `generate` knows, and for a prompt that
    memory.budget does not hold.
    """
    settings, reason = settings_of(session, llm.model.generation_config), require_streamable(llm, session)
    if kept is None:
        require_budget(llm, session, prompt)
    if reason:
        return _in_one_piece(llm, session, prompt)
    (row,) = prompt
    tokens = stream_tokens(
        llm.model,
        row.prompt().input_ids.tolist(),
        key=row.key,
        settings=settings,
        seed=session.config.random_seed,
        device=llm.device,
        precision=llm.precision,
        constraint=constraint_of(session, settings),
        kept=kept,
    )
    return _pieces(tokens, session.encoder)


def require_streamable(llm: LLM, session: Session) -> str:
    """Raise InputError for settings with which a response cannot be streamed.

    Return why the architecture cannot be streamed from; empty where it can.
    """
    base = base_model(llm.model)
    reason = SlotsEngine.why_not(base.config, settings_of(session, llm.model.generation_config), type(base))
    if reason.startswith("generation."):
        raise InputError(
            what=f"a response cannot be streamed: {reason}",
            where="generation",
            fix="leave the key at its default, or ask for the whole response at once",
        )
    return reason


def require_budget(llm: LLM, session: Session, prompt: TokenRows) -> None:
    """Raise InputError for a prompt that is predicted not to fit into memory.budget with its response."""
    plan = plan_of_one(llm, session, prompt_tokens=int(prompt.lengths[0]))
    if plan is not None:
        require_fits(plan)


def plan_of_one(llm: LLM, session: Session, *, prompt_tokens: int) -> GenerationPlan | None:
    """Return the plan of one response to a prompt of this length; None where memory.budget is auto, and it is tried."""
    if session.config.memory.budget == "auto":
        return None
    request = generation_request(session, [prompt_tokens], llm=llm)
    return plan_job(replace(request, fixed_rows=None), say=say_nothing)


def tokens_of_one(llm: LLM, session: Session, *, most: int) -> int:
    """Return how many tokens, up to `most`, a prompt and its response may have together within memory.budget.

    Found from above in a few plans, to a tenth; fewer tokens than a response may have where no prompt fits.
    """
    new_tokens = session.config.generation.max_new_tokens
    assert new_tokens is not None, "resolved before"
    while most > new_tokens:
        plan = plan_of_one(llm, session, prompt_tokens=most - new_tokens)
        if plan is None or plan.fits or plan.costs is None:
            return most
        static_bytes = plan.costs.static_bytes
        share = (plan.cap_bytes - static_bytes) / (plan.shapes[0].peak_bytes - static_bytes)
        most = int(most * min(max(share, 0.0), _NOTCH))
    return most


def _pieces(tokens: Generator[int, None, FinishReason], encoder: TextEncoder) -> Pieces:
    text = GrowingText(encoder)
    with closing(tokens):
        try:
            while True:
                if piece := text.add(next(tokens)):
                    yield piece
        except StopIteration as ended:
            finish_reason: FinishReason = ended.value
    if piece := text.rest():
        yield piece
    return finish_reason


def _in_one_piece(llm: LLM, session: Session, prompt: TokenRows) -> Pieces:
    response = respond(engine_by_hand(llm, session, rows=1), session, prompt).iloc[0]
    if response["response"]:
        yield response["response"]
    finish_reason: FinishReason = response["finish_reason"]
    return finish_reason
