"""`brim chat`: through a pipe, and as a person types."""

import io
import shutil
import sys

import pytest

from brim import Model
from brim.workflows.prediction import Conversation

pytestmark = pytest.mark.run
QUESTIONS = ["add 1 and 2 =", "add 3 and 4 ="]


@pytest.fixture
def piped(brim, monkeypatch, finished_run):
    """piped("a line", …): what `brim chat` does with these lines."""

    def run(*lines, overrides=(), model=finished_run):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return brim("chat", model, *overrides)

    return run


class Keyboard(io.StringIO):
    """A person's: each line is typed, or a key is hit."""

    def __init__(self, *typed):
        super().__init__()
        self.typed = list(typed)

    def isatty(self):
        return True

    def read_line(self, prompt=""):
        assert prompt == "> "
        if not self.typed:
            raise EOFError
        line = self.typed.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line


@pytest.fixture
def typed(brim, monkeypatch, finished_run):
    """The same at a terminal."""

    def run(*lines):
        keyboard = Keyboard(*lines)
        monkeypatch.setattr(sys, "stdin", keyboard)
        monkeypatch.setattr("builtins.input", keyboard.read_line)
        return brim("chat", finished_run)

    return run


def test_each_line_of_a_pipe_is_answered_or_a_command(piped, finished_run):
    model = Model.load(finished_run)
    expected = [model.generate(question, max_new_tokens=4) for question in QUESTIONS]
    done = piped(*QUESTIONS, overrides=["generation.max_new_tokens=4"])
    assert (done.code, done.out) == (0, "".join(f"{answer}\n" for answer in expected))
    assert {line.split(" ")[3] for line in done.err.splitlines()} <= {"cut", "empty:"}
    lines = ["/help", "", "/set max_new_tokens 2", QUESTIONS[0], "/reset", " /quit is not a command here", "/quit", "x"]
    done = piped(*lines)
    texts = [QUESTIONS[0], " /quit is not a command here"]
    assert done.out == "".join(f"{model.generate(text, max_new_tokens=2)}\n" for text in texts)
    assert done.code == 0
    assert done.err.splitlines()[0] == "/reset, /system TEXT, /set KEY VALUE (a key of generation), /help, /quit"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set temperatur 1", "generation.temperatur"),
        ("/set max_new_tokens", "no such command: /set max_new_tokens\n  expected: /reset"),
        ("/system be brief", "without a chat template there is no system's turn"),
        ("x" * 500, "1 prompt is too long"),
    ],
)
def test_what_is_wrong_ends_a_pipe_and_is_only_told_to_a_person(piped, typed, line, words):
    done = piped(line, QUESTIONS[0])
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    done = typed(line, QUESTIONS[0])
    assert done.code == 0
    assert words in done.err
    assert len(done.out) > 1


def test_a_person_is_told_how_to_talk_and_ctrl_c_stops_an_answer_and_at_the_prompt_leaves(typed, monkeypatch):
    def interrupted(self, text):
        yield "the first half"
        raise KeyboardInterrupt

    done = typed()
    assert (done.code, done.out) == (0, "\n")
    assert "each prompt stands alone; /reset, /system TEXT" in done.err
    monkeypatch.setattr(Conversation, "ask", interrupted)
    done = typed("one", "two", KeyboardInterrupt(), "three")
    assert (done.code, done.out) == (130, "the first half\nthe first half\n")
    assert done.err.endswith("stopped\nstopped\nbrim: interrupted\n")
    monkeypatch.setattr(Conversation, "ask", lambda self, text: (piece for piece in ()))
    done = typed("one")
    assert (done.out, done.err.splitlines()[-1]) == ("\n\n", "the answer is empty: the model ended it at once")


def test_a_terminal_is_not_steered_by_an_answer(piped, monkeypatch):
    class Screen(io.StringIO):
        def isatty(self):
            return True

    family = "你好\N{IDEOGRAPHIC SPACE}👩\N{ZERO WIDTH JOINER}👧"
    pieces = ["two\nlines\tand a tab", "\x1b[2Jgone\r\x07", family]
    monkeypatch.setattr(Conversation, "ask", lambda self, text: (piece for piece in pieces))
    assert piped("one").out == "".join(pieces) + "\n"
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    piped("one")
    assert screen.getvalue() == f"two\nlines\tand a tab\\x1b[2Jgone\\r\\x07{family}\n"


@pytest.mark.parametrize("template", [None, "{% for turn in messages %}{{ turn.content }} {% endfor %}"])
def test_a_base_models_folder_can_be_talked_to(piped, tiny_base, tmp_path, template):
    """With its template as a conversation, which remembers; else each line by itself."""
    folder = shutil.copytree(tiny_base, tmp_path / "base")
    config = {"base_model": str(folder), "trainer": {"type": "none"}, "generation": {"do_sample": False}}
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
        config["chat"] = {}
    conversation = Model(config, overrides=["generation.max_new_tokens=4"]).chat()
    expected = ["".join(conversation.ask(question)) for question in QUESTIONS]
    done = piped(*QUESTIONS, model=folder, overrides=["generation.max_new_tokens=4", "generation.do_sample=false"])
    assert (done.code, done.out) == (0, "".join(f"{answer}\n" for answer in expected))


def test_other_verbs_take_a_base_models_folder_too(brim, tiny_base, tmp_path):
    rows, few = tmp_path / "rows.jsonl", "generation.max_new_tokens=2"
    rows.write_text('{"prompt": "add 1 and 2 =", "completion": "3"}\n')
    data = ("--dataset", rows)
    assert brim("predict", tiny_base, few, *data, "--output", tmp_path / "out.jsonl").code == 0
    assert "completion_response" in (tmp_path / "out.jsonl").read_text()
    assert "perplexity" in brim("evaluate", tiny_base, *data).out
    assert brim("embed", tiny_base, *data, "--output", tmp_path / "out.parquet").code == 0
    memory = brim("memory", tiny_base, few, "--phase", "generate", "--device", "t4", "--sequence-length", 16)
    assert "outside PyTorch" in memory.out
