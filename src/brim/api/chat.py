"""What a session settles about conversations: the template's place, and the day that it sees."""

from __future__ import annotations

from dataclasses import replace

from brim.api.session import Session
from brim.config import Choice, Config, load_config
from brim.data.chat_template import TEMPLATE_FILE, TemplateTexts, read_template
from brim.train.run_folder import RunFolder


def template_texts(session: Session) -> TemplateTexts | None:
    """The template as it is written, to be stored with what was learned; None without `chat`."""
    chat = session.config.chat
    return None if chat is None else read_template(chat.template, session.encoder.folder)


def with_stored_template(config: Config, run: RunFolder) -> Config:
    """A run's configuration with the template that is stored in it: the base's own may have changed since."""
    if config.chat is None or not (run.model / TEMPLATE_FILE).is_file():
        return config
    chat = config.chat.model_copy(update={"template": str(run.model.resolve())})
    return config.model_copy(update={"chat": chat})


def with_day_of_run(session: Session, run: RunFolder) -> Session:
    """The session with the day that a run was begun on, so that it can be continued on another."""
    was_chosen = any(choice.key == "chat.date" for choice in session.choices)
    if not was_chosen or session.config.chat is None or not run.config.is_file():
        return session
    before = load_config(run.config).config.chat
    if before is None or before.date is None:
        return session
    chat = session.config.chat.model_copy(update={"date": before.date})
    choice = Choice(key="chat.date", value=before.date, reason="the day on which the run began")
    choices = tuple(choice if each.key == choice.key else each for each in session.choices)
    return replace(session, config=session.config.model_copy(update={"chat": chat}), choices=choices)
