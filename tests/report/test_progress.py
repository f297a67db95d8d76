"""What a person sees before and while a run goes on: notes, a line that is rewritten, and events."""

import io
import re
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import example, given, strategies as st

from brim.notes import MOST_LINES, Note, PlanCard, in_lines, kind_of, planned, short_of, status, warning, wrapped
from brim.report import Screen, listening, screen as module, show
from brim.report.screen import LiveLine, RowProgress, TrainProgress, event_line

TOPICS = ["configuration", "rows", "run", "machine"]
TEXTS = st.integers(0, 99).map(str)
NOTES = st.one_of(
    st.builds(
        Note, TEXTS, kind=st.just("warning"), topic=st.sampled_from(TOPICS), short=st.sampled_from(["", "x", "y"])
    ),
    st.builds(planned, st.sampled_from(["model", "data", "batch", "memory", "time"]), TEXTS),
    st.builds(Note, TEXTS, kind=st.sampled_from(["note", "detail", "status"])),
    TEXTS,
)


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _terminal(monkeypatch):
    for name, value in {"COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)


def plain(text):
    """Without what steers a terminal."""
    return re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", text)


def card_of(notes, hint="--verbose"):
    card = PlanCard(hint=hint)
    assert not any(card.take(note) for note in notes)
    return card.end()


@example([warning("0", topic="configuration"), warning("0", topic="rows")])
@given(st.lists(NOTES, max_size=40))
def test_a_card_has_eight_lines_at_most_and_nothing_that_matters_is_missing(notes):
    lines = card_of(notes)
    assert len(lines) <= MOST_LINES
    more = re.fullmatch(r"(\d+) notes?: --verbose", lines[-1][1]) if lines and lines[-1][0] == "more" else None
    parts = Counter(part for label, text in lines if label != "more" for part in text.split("; "))
    matter = Counter(short_of(note) for note in notes if kind_of(note) in ("warning", "plan"))
    assert matter <= parts
    others = Counter(str(note) for note in notes if kind_of(note) == "note")
    assert parts - matter <= others, "and notes, as far as there is room"
    num_hidden = sum(others.values()) - sum((parts - matter).values())
    num_hidden += sum(kind_of(note) == "detail" for note in notes)
    num_hidden += sum(kind_of(note) == "warning" and short_of(note) != note for note in notes)
    assert num_hidden == (int(more[1]) if more else 0)


def test_a_card_s_lines_have_their_order_and_rows_stand_with_the_data():
    notes = [
        warning("epochs has no effect", topic="configuration"),
        warning("3 of 60 rows were cut: why", topic="rows", short="3 of 60 rows cut"),
        "the test split has no rows",
        planned("memory", "1 GiB of 2 GiB (all of it)", short="1 GiB of 2 GiB"),
        planned("data", "60 rows"),
        planned("model", "tiny"),
    ]
    assert card_of(notes) == [
        ("model", "tiny"),
        ("data", "60 rows"),
        ("", "3 of 60 rows cut"),
        ("memory", "1 GiB of 2 GiB"),
        ("watch", "epochs has no effect"),
        ("note", "the test split has no rows"),
        ("more", "1 note: --verbose"),
    ]
    assert card_of(notes[1:2])[0] == ("data", "3 of 60 rows cut")
    assert wrapped("data", "w" * 200, width=40) == f"data    {'w' * 200}", "a path stays whole"
    assert str(notes[3]) == "memory: 1 GiB of 2 GiB (all of it)"


def test_lines_on_one_topic_are_put_together_where_there_is_no_room_for_each():
    runs = [warning(f"{number} runs", topic="run") for number in range(3)]
    key = warning("epochs has no effect", topic="configuration")
    assert in_lines([*runs, key], most=4) == [[runs[0]], [runs[1]], [runs[2]], [key]]
    assert in_lines([*runs, key], most=3) == [runs, [key]]
    assert in_lines([*runs, key], most=1) == [[*runs, key]]


def test_the_last_line_says_where_the_others_are_and_what_comes_later_is_shown_at_once():
    card = PlanCard(hint="--verbose")
    for number in range(9):
        card.take(Note(f"choice {number}", kind="detail"))
    card.take(Note("results/a/notes.txt", kind="rest"))
    assert card.end() == [("more", "9 notes: results/a/notes.txt or --verbose")]
    assert card.end() == []
    assert card.take("kept the weights of step 4")
    assert not card.take(Note("choice 9", kind="detail"))
    assert card.take(planned("memory", "of what is done next"))
    notes = [str(number) for number in range(MOST_LINES + 1)]
    assert [text for _, text in card_of(notes[:-1])] == notes[:-1], "they just fit"
    assert [text for _, text in card_of(notes)] == [*notes[:-2], "2 notes: --verbose"]


def test_a_pipe_gets_the_notes_alone_also_those_that_are_held_where_the_run_fails():
    stream = io.StringIO()
    long = "a note that is longer than the eighty columns which a terminal has, [red]and is not broken[/red] :smile:"
    with Screen(stream) as screen:
        screen(status("planning"))
        screen(long)
        screen.advance(3)
    assert stream.getvalue() == f"{long}\n"
    stream = io.StringIO()
    with pytest.raises(ValueError, match="no"), Screen(stream, is_short=True) as screen:
        screen(warning("3 rows were dropped", topic="rows"))
        raise ValueError("no")
    assert stream.getvalue() == "data    3 rows were dropped\n"


def test_a_terminal_shows_what_is_being_done_and_no_trace_of_it_stays():
    stream = Terminal()
    with Screen(stream) as screen:
        screen(status("planning: checkpointing"))
        screen("a note")
        screen.advance(1200)
        screen.advance(34)
    text = plain(stream.getvalue())
    assert re.search(r"[⠀-⣿] planning: checkpointing", text), "with a spinner"
    assert "a note\n" in text
    assert "1,234 rows" in text
    assert stream.getvalue().endswith("\x1b[2K"), "the line is erased"


def test_a_notebook_s_cell_has_the_notes_and_a_line_that_is_rewritten(monkeypatch, capsys):
    """On stdout: a notebook shows stderr as if something had failed."""
    kernel = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    with listening(show, is_short=True) as told:
        told("a note")
        told(status("generating", is_planned=True))
        told.advance(7)
    out, err = capsys.readouterr()
    assert out == (f"note    a note\n\rgenerating\r{' ' * 10}\r"), "7 rows came too soon to be drawn"
    assert err == ""


def test_a_function_of_one_s_own_is_given_every_note_and_nothing_else_and_none_is_silence(capfd):
    said = []
    with listening(said.append) as told:
        for number in range(12):
            told(Note(f"choice {number}", kind="detail"))
        told(status("planning"))
        told(Note("notes.txt", kind="rest"))
        told(warning("rows were dropped", topic="rows"))
        told.advance(3)
    assert said == [*(f"choice {number}" for number in range(12)), "rows were dropped"]
    with listening(None) as told:
        told("a note")
        told(status("planning"))
    assert capfd.readouterr() == ("", "")
    show("a note")  # called by hand
    show(status("planning"))
    assert capfd.readouterr() == ("", "a note\n")


def step(number, *, loss, num_tokens):
    return {
        "step": number, "split": "train", "loss": loss, "learning_rate": 0.1, "effective_batch_size": 8,
        "num_samples": 8 * number, "num_tokens": num_tokens, "seconds": 0.5, "peak_bytes": 3 * 2**30,
    }  # fmt: skip


EVALUATION = {"step": 2, "split": "validation", "loss": 1.25, "perplexity": 3.4903, "token_accuracy": 0.5}


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_there_is_a_line_now_and_then_whose_time_is_of_this_session(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    stream = io.StringIO()
    shown = TrainProgress(LiveLine(stream))
    shown.start(first_step=0, total_steps=1000, total_samples=8000)
    shown.write(step(1, loss=4.0, num_tokens=1000))
    assert stream.getvalue() == ""
    clock[0] += 11  # two steps in 11 s: 998 are left, 5.5 s each
    shown.write(step(2, loss=2.0, num_tokens=3000))
    assert stream.getvalue() == "step 2/1,000  loss 3.8000  4,000 tokens/s  3.0 GiB  1 h 31 min left\n"
    shown.write(EVALUATION)
    shown.write({"step": 2, "event": "checkpoint"})
    shown.write({"step": 2, "event": "early_stop"})
    shown.close()
    assert stream.getvalue().splitlines()[1:] == [
        "step 2  validation: loss 1.2500, perplexity 3.490, token accuracy 0.5000",
        "step 2  early_stop",
    ]
    stream = io.StringIO()
    shown = TrainProgress(LiveLine(stream))
    shown.start(first_step=90, total_steps=100, total_samples=800)
    clock[0] += 11
    shown.write(step(91, loss=4.0, num_tokens=91000))
    # The tokens of earlier sessions say nothing about this one's speed.
    assert stream.getvalue() == "step 91/100  loss 4.0000  3.0 GiB  1 min 39 s left\n"


def test_on_a_terminal_there_is_a_bar():
    stream = Terminal()
    shown = TrainProgress(LiveLine(stream))
    shown.start(first_step=0, total_steps=4, total_samples=32)
    shown.write(step(1, loss=4.0, num_tokens=1000))
    shown.write(step(2, loss=2.0, num_tokens=3000))
    shown.write(EVALUATION)
    shown.close()
    text = plain(stream.getvalue()).replace("\r", "\n")
    bar = [line for line in text.splitlines() if "2/4" in line][-1]
    assert re.fullmatch(r"step 2/4 .* loss 3\.8000  4,000 tokens/s  3\.0 GiB (0:00:0\d|-:--:--) left\s*", bar)
    assert "step 2  validation: loss 1.2500, perplexity 3.490, token accuracy 0.5000" in text


def test_what_stands_behind_the_bar_stays_where_it_is():
    """Without colours, rich draws what is done of a bar alone."""
    bar = module._Bar(lambda: module.Shown(head="step", text="loss"), total=8, console=module.Console(file=Terminal()))
    places = set()
    for done in range(9):
        bar.shown = lambda done=done: module.Shown(head="step", text="loss", done=done)
        bar.console.file = Terminal()
        bar.console.print(*bar.get_renderables())
        places.add(bar.console.file.getvalue().index("loss"))
    assert places == {len("step ") + 24 + 1}


def test_a_step_is_put_into_words_only_where_it_is_drawn(monkeypatch):
    """A step of a small model takes as long as its words did; the bar is drawn twice a second."""
    amounts = []
    monkeypatch.setattr(module, "format_bytes", lambda amount: str(amounts.append(amount)))
    for stream, most in ((Terminal(), 100), (io.StringIO(), 10)):
        amounts.clear()
        shown = TrainProgress(LiveLine(stream))
        shown.start(first_step=0, total_steps=1000, total_samples=8000)
        for number in range(1, 1001):
            shown.write(step(number, loss=4.0, num_tokens=1000 * number))
        shown.close()
        assert len(amounts) <= most
        assert ("step 1,000/1,000" in stream.getvalue()) == stream.isatty(), "the last one is drawn all the same"


def test_rows_are_counted_anew_for_what_is_done_next():
    stream = Terminal()
    line = LiveLine(stream, in_notebook=True)
    shown = RowProgress(line)
    for doing in ("evaluating", "generating"):
        shown.begin(doing)
        line.clear()  # so that the next one is shown at once
        shown.advance(3)
        line.clear()
    shows = [text.strip() for text in stream.getvalue().split("\r") if text.strip()]
    assert shows == ["evaluating", "evaluating  3 rows", "generating", "generating  3 rows"]


def test_each_event_is_a_line(golden):
    out = {"event": "oom", "where": "backward", "rows": [7, 9], "padded_length": 2048, "message": "…"}
    micro_batch = {"micro_batch": 3, "num_micro_batches": 4}
    events = [
        {**out, **micro_batch, "predicted_bytes": 3 * 2**30},
        {**out, **micro_batch, "rows": [7], "predicted_bytes": None},
        {**out, "where": "evaluation", "rows_at_once": 1},
        {**out, "where": "evaluation", "cap_bytes": 3 * 2**30},
        {"event": "oom", "where": "checkpoint", "message": "…"},
        {"event": "replay", "num_micro_batches": 5},
        {"event": "replay", "num_micro_batches": 1},
        {"event": "cap", "before": 3 * 2**30, "after": 2**30, "unit": "bytes"},
        {"event": "cap", "before": 4, "after": 2, "unit": "rows"},
        {"event": "skipped", "cause": "loss", "rows": [1]},
    ]
    golden("report/events.txt", "\n".join(event_line({"step": 1200, **event}) for event in events))
    assert event_line({"step": 1200, "event": "checkpoint"}) is None
