"""What a person sees while a run goes on."""

import io
import re

import pytest

from brim.report import progress
from brim.report.progress import LiveLine, RowProgress, TrainProgress


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


def step(number, *, loss, num_tokens, seconds=0.5):
    return {
        "step": number,
        "split": "train",
        "loss": loss,
        "learning_rate": 0.1,
        "effective_batch_size": 8,
        "num_samples": 8 * number,
        "num_tokens": num_tokens,
        "seconds": seconds,
        "peak_bytes": 3 * 2**30,
    }


EVALUATION = {"step": 2, "split": "validation", "loss": 1.25, "perplexity": 3.4903, "token_accuracy": 0.5}


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def lines():
    """A stream, with the lines that were written to it."""

    class Lines(io.StringIO):
        def read_lines(self):
            return self.getvalue().splitlines()

    return Lines()


def test_without_a_terminal_there_is_a_line_now_and_then(lines, clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = TrainProgress(LiveLine(lines))
    shown.start(first_step=0, total_steps=1000, total_samples=8000)
    shown.write(step(1, loss=4.0, num_tokens=1000))
    assert lines.getvalue() == ""
    clock[0] += 11  # two steps in 11 s: 998 are left, 5.5 s each
    shown.write(step(2, loss=2.0, num_tokens=3000))
    assert lines.read_lines() == ["step 2/1,000  loss 3.8000  4,000 tokens/s  3.0 GiB  1 h 31 min left"]
    shown.write(EVALUATION)
    shown.write({"step": 2, "event": "checkpoint"})
    shown.write({"step": 2, "event": "early_stop"})
    shown.close()
    assert lines.read_lines()[1:] == [
        "step 2  validation: loss 1.2500, perplexity 3.490, token accuracy 0.5000",
        "step 2  early_stop",
    ]


def test_the_remaining_time_counts_the_steps_of_this_session(lines, clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = TrainProgress(LiveLine(lines))
    shown.start(first_step=90, total_steps=100, total_samples=800)
    clock[0] += 11
    shown.write(step(91, loss=4.0, num_tokens=91000))
    # The tokens of earlier sessions say nothing about this one's speed.
    assert lines.read_lines() == ["step 91/100  loss 4.0000  3.0 GiB  1 min 39 s left"]


def test_on_a_terminal_there_is_a_bar(monkeypatch):
    for name, value in {"COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    shown = TrainProgress(LiveLine(stream))
    shown.start(first_step=0, total_steps=4, total_samples=32)
    shown.write(step(1, loss=4.0, num_tokens=1000))
    shown.write(step(2, loss=2.0, num_tokens=3000))
    shown.write(EVALUATION)
    shown.close()
    text = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", stream.getvalue()).replace("\r", "\n")
    bar = [line for line in text.splitlines() if "2/4" in line][-1]
    assert re.fullmatch(r"step 2/4 .* loss 3\.8000  4,000 tokens/s  3\.0 GiB (0:00:0\d|-:--:--) left\s*", bar)
    assert "step 2  validation: loss 1.2500, perplexity 3.490, token accuracy 0.5000" in text


def test_rows_are_counted_on_a_terminal_alone(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
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
