"""What a person sees before and while a run goes on: notes, a line that is rewritten, and events."""

import io
import re
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from brim.notes import Note, kind_of, status, warning
from brim.report import Screen, listening, progress, show
from brim.report.progress import LiveLine, RowProgress, TrainProgress, event_line
from brim.report.screen import MOST_LINES, Digest, in_lines

TOPICS = ["configuration", "rows", "run", "plan", "memory", "time", ""]
TEXTS = st.integers(0, 99).map(str)
NOTES = st.one_of(
    st.builds(
        Note,
        TEXTS,
        kind=st.sampled_from(["warning", "plan"]),
        topic=st.sampled_from(TOPICS),
        short=st.sampled_from(["", "x", "y"]),
    ),
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


@given(st.lists(NOTES, max_size=40))
def test_before_the_first_step_there_are_eight_lines_at_most_and_nothing_that_matters_is_missing(notes):
    digest = Digest(hint="--verbose")
    shown = [line for note in notes for line in digest.take(note)] + digest.end()
    assert len(shown) <= MOST_LINES
    matter = [note for note in notes if kind_of(note) in ("warning", "plan")]
    others = [note for note in notes if kind_of(note) == "note"]
    num_details = sum(kind_of(note) == "detail" for note in notes)
    parts = [part for line in shown for part in line.split("; ")]
    more = re.fullmatch(r"(\d+) more notes?: --verbose", parts[-1]) if parts else None
    told = Counter(parts[:-1] if more else parts)
    told.subtract(others[: sum(told.values()) - len(matter)])
    whole = told & Counter(map(str, matter))
    shortened = told - whole
    assert sum(told.values()) == len(matter)
    assert shortened <= Counter(note.short for note in matter if note.short)
    num_others = sum((Counter(parts[:-1] if more else parts)).values()) - len(matter)
    assert int(more[1] if more else 0) == len(others) - num_others + num_details + sum(shortened.values())


def test_what_matters_about_the_rows_is_shown_before_the_plan_is_made():
    digest = Digest()
    digest.take("the test split has no rows")
    assert digest.take(warning("3 of 60 rows were dropped", topic="rows")) == []
    assert digest.take(status("planning")) == ["3 of 60 rows were dropped"]
    assert digest.end() == ["the test split has no rows"]


def test_lines_on_one_topic_are_put_together_where_there_is_no_room_for_each():
    rows = [warning(f"{number} rows", topic="rows") for number in range(3)]
    key = warning("epochs has no effect", topic="configuration")
    assert in_lines([*rows, key], room=4) == [[rows[0]], [rows[1]], [rows[2]], [key]]
    assert in_lines([*rows, key], room=3) == [rows, [key]]
    assert in_lines([*rows, key], room=1) == [[*rows, key]]


def test_notes_that_share_a_line_are_short_and_counted():
    digest = Digest(hint="--verbose")
    for number in (1, 2):
        digest.take(warning(f"{number} rows were cut: {'why ' * 40}", topic="rows", short=f"{number} rows cut"))
    digest.take(warning("epochs has no effect", topic="configuration"))
    assert digest.take(status("planning")) == ["1 rows cut; 2 rows cut", "epochs has no effect"]
    assert digest.end() == ["2 more notes: --verbose"]


def test_the_last_line_says_where_the_others_are():
    digest = Digest(hint="--verbose")
    for number in range(9):
        digest.take(Note(f"choice {number}", kind="detail"))
    digest.take(Note("results/a/notes.txt", kind="rest"))
    assert digest.end() == ["9 more notes: results/a/notes.txt or --verbose"]
    assert digest.take("kept the weights of step 4") == ["kept the weights of step 4"]
    assert digest.take(Note("choice 9", kind="detail")) == []


def test_notes_that_just_fit_are_all_shown_and_of_one_more_two_are_counted():
    just, more = Digest(), Digest(hint="--verbose")
    for number in range(MOST_LINES):
        just.take(str(number))
        more.take(str(number))
    more.take("one more")
    assert just.end() == [str(number) for number in range(MOST_LINES)]
    assert more.end() == [*(str(number) for number in range(MOST_LINES - 1)), "2 more notes: --verbose"]


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
    assert stream.getvalue() == "3 rows were dropped\n"


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
    with listening(show) as told:
        told(status("loading the model"))
        told("a note")
        told.advance(7)
    out, err = capsys.readouterr()
    assert out == (
        "\rloading the model"
        f"\r{' ' * 17}\r"  # taken away for the note
        "a note\n"
        "\rloading the model  7 rows"
        f"\r{' ' * 25}\r"
    )
    assert err == ""


def test_a_function_of_one_s_own_is_given_every_note_and_nothing_else():
    said = []
    with listening(said.append, is_short=True) as told:
        for number in range(12):
            told(Note(f"choice {number}", kind="detail"))
        told(status("planning"))
        told(Note("notes.txt", kind="rest"))
        told(warning("rows were dropped", topic="rows"))
        told.advance(3)
    assert said == [*(f"choice {number}" for number in range(12)), "rows were dropped"]


def test_none_is_silence_and_show_may_be_called_by_hand(capfd):
    with listening(None) as told:
        told("a note")
        told(status("planning"))
    assert capfd.readouterr() == ("", "")
    show("a note")
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
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_there_is_a_line_now_and_then(clock, monkeypatch):
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


def test_the_remaining_time_counts_the_steps_of_this_session(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
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


def test_rows_are_counted_on_a_terminal_alone():
    texts = []
    for stream in (Terminal(), io.StringIO()):
        line = LiveLine(stream)
        shown = RowProgress(line)
        shown.advance(1200)
        shown.advance(34)
        line.clear()
        texts.append(stream.getvalue())
    assert "1,234 rows" in texts[0]
    assert texts[1] == ""


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
