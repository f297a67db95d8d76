"""What the process of a run tells, and what becomes of one that dies: with small programs in its place."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from brim.errors import Problem
from brim.workflows.compare import child as compare_process
from brim.workflows.compare.child import Ended, RunOrder, run_in_process, stopping

ORDER = RunOrder(config="é.yaml", overrides=("a=1", "b='x y'"), output_directory="out", resume=True)
TELL = "import json, os, signal, sys, time\ndef tell(**m): print(json.dumps(m), flush=True)\nsys.stdin.readline()\n"


class Heard:
    """An observer that keeps what it hears."""

    def __init__(self):
        self.calls = []

    def start(self, *, first_step, total_steps, total_samples):
        self.calls.append(("start", first_step, total_steps, total_samples))

    def write(self, record):
        self.calls.append(("write", record))

    def close(self):
        self.calls.append(("close",))


@pytest.fixture
def run(monkeypatch):
    """run("python code", say=…): how a run ends whose process is this program."""

    def with_program(code, *, observer=None, say=print, ready=None):
        monkeypatch.setattr(compare_process, "_CHILD", TELL + code)
        with stopping() as stop:
            if ready is not None:
                threading.Thread(target=ready, args=(stop,), daemon=True).start()
            return run_in_process(ORDER, observer=observer or Heard(), say=say, stop=stop)

    return with_program


def test_an_order_arrives_whole():
    assert RunOrder.loads(ORDER.dumps()) == ORDER
    assert "\n" not in ORDER.dumps()


def test_what_it_tells_is_passed_on(run):
    heard, said = Heard(), []
    ended = run(
        "tell(say='hello')\n"
        "tell(start={'first_step': 1, 'total_steps': None, 'total_samples': 9})\n"
        "tell(record={'step': 2, 'loss': 0.5})\n"
        "tell(close=True)\n"
        "tell(finished={'train': 'x'})\n",
        observer=heard,
        say=said.append,
    )
    assert ended == Ended(outcome="finished", rows={"train": "x"})
    assert said == ["hello"]
    assert heard.calls == [("start", 1, None, 9), ("write", {"step": 2, "loss": 0.5}), ("close",)]


def test_its_problems_are_those_of_the_run(run):
    ended = run("tell(failed={'problems': [{'what': 'w', 'fix': 'f'}], 'is_users_mistake': True})")
    assert ended == Ended(outcome="failed", rows={}, problems=(Problem(what="w", fix="f"),), is_users_mistake=True)


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("sys.exit(3)", "its process ended with 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "its process ended with -9; the system ends a process that takes too"),
        ("print('{\"say\": \"half', end='', flush=True); os._exit(1)", "its process ended with 1"),
    ],
)
def test_one_that_dies_has_failed(run, code, what):
    ended = run(code)
    assert (ended.outcome, ended.is_users_mistake) == ("failed", False)
    assert ended.problems[0].what.startswith(what)


def test_where_nobody_reads_what_it_tells_it_is_stopped(run):
    def closed(line):
        raise BrokenPipeError("what reads stderr is gone")

    with pytest.raises(BrokenPipeError, match="is gone"):
        run("tell(say='hello')\nsys.stdin.read()", say=closed)


def test_a_display_is_closed_when_the_process_dies(run):
    heard = Heard()
    run("tell(start={'first_step': 0, 'total_steps': 1, 'total_samples': 1})\nos._exit(1)", observer=heard)
    assert heard.calls[-1] == ("close",)


WAITS = """
def stop(number, frame):
    tell(say="stopping")
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
tell(say="ready")
while True:
    time.sleep(60)
"""


def test_ctrl_c_reaches_it_and_the_run_is_stopped(run):
    said = []
    ready = threading.Event()

    def say(line):
        said.append(line)
        ready.set()

    def press(stop):
        ready.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    ended = run(WAITS, say=say, ready=press)
    assert (ended.outcome, said) == ("stopped", ["ready", "stopping"])


def test_one_that_does_not_listen_is_ended(run):
    deaf = "signal.signal(signal.SIGINT, lambda *_: tell(say='no'))\ntell(say='ready')\nwhile True: time.sleep(60)"
    heard = threading.Semaphore(0)

    def press(stop):
        for _ in range(3):
            heard.acquire(timeout=60)
            os.kill(os.getpid(), signal.SIGINT)

    ended = run(deaf, say=lambda line: heard.release(), ready=press)
    assert ended.outcome == "stopped"


def test_the_signals_are_given_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stopping():
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_file_of_the_users_takes_no_module_s_place(run, tmp_path, monkeypatch):
    """As `python -m` would let it."""
    (tmp_path / "colorsys.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])
    code = "sys.path[:] = sys.argv[1:]\nimport colorsys\ntell(finished={})"
    assert run(code).outcome == "finished"


def test_a_run_does_not_outlive_the_process_that_started_it(tmp_path):
    """The watch of the child, without a run."""
    code = (
        "import signal, sys, time\n"
        "from brim.workflows.compare.child import signal_when_alone\n"
        "def stop(number, frame):\n    print('stopped', flush=True)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "signal_when_alone(signal.SIGTERM)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    started = time.monotonic()
    out, _ = process.communicate()  # closes its stdin
    assert (out, process.returncode) == ("stopped\n", 0)
    assert time.monotonic() - started < 30
