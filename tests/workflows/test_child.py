"""A part of brim in a process of its own: what goes in, what comes out, how it ends, and that it ends."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest
from faults.several import forked
from tests.workflows.children import (
    answers,
    breaks,
    breaks_together,
    dies,
    dies_together,
    fails,
    fails_together,
    hears,
    is_deaf,
    leaves,
    leaves_another,
    listens,
    runs_out,
    sleeps,
    tells_in_the_midst,
)

from brim.errors import BrimError, ConfigError, Problem
from brim.workflows.runs import Ended, child, run_child, stopping
from brim.workflows.runs.serving import launch

pytestmark = pytest.mark.process


def is_there(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_order_goes_in_and_messages_and_a_result_come_out(tmp_path, monkeypatch):
    """A file of the user's takes no module's place, as `python -m` would let it."""
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])
    heard, log = [], tmp_path / "log.txt"
    ended = run_child(answers, {"name": "é\n"}, on_message=heard.append, log=log)
    assert ended == Ended(code=0, is_done=True, result=["é\n", len(sys.path)])
    assert heard == [{"heard": {"name": "é\n"}}]
    assert log.read_text() == "what libraries print is no message\n"
    assert ended.require("a process", fix="none") == ["é\n", len(sys.path)]


@pytest.mark.parametrize(
    ("function", "code", "error", "told"),
    [
        (fails, 0, ConfigError, "w\n  fix: f"),
        (runs_out, 0, BrimError, "the device, or the machine, ran out of memory"),
        (breaks, 0, BrimError, "a mistake in brim or in a library: RuntimeError: no luck with ***"),
        (leaves, 0, None, "a process that trains ended by itself (exit code 0): it said nothing"),
        (dies, -9, None, "ended by itself (signal 9; the system ends a process that takes too much memory)"),
    ],
)
def test_what_it_raised_is_raised_and_how_it_broke_down_is_told(tmp_path, function, code, error, told):
    log = tmp_path / "log.txt"
    ended = run_child(function, {}, log=log)
    assert (ended.code, type(ended.error)) == (code, error or type(None))
    with pytest.raises(error or BrimError) as raised:
        ended.require("a process that trains", fix="f", log=log)
    assert told in str(raised.value)
    assert "hf_abc" not in log.read_text()


def test_a_line_of_others_or_that_a_kill_cut_off_is_none(monkeypatch):
    monkeypatch.setattr(
        child, "_CHILD", 'import os; os.write(1, b\'hi\\n{{"say": 1}}\\n[1]\\n{{"say": \'); os._exit(1)'
    )
    heard = []
    ended = run_child(answers, {}, on_message=heard.append)
    assert (ended, heard) == (Ended(code=1), [{"say": 1}])


def heard_of(each, until):
    """Return what it says until then."""
    messages = []
    while not until(messages):
        if select.select([each], [], [], 0.01)[0]:
            messages += each.heard()
    return messages


def test_what_is_sent_to_one_that_is_stopped_waits_for_nobody(monkeypatch):
    monkeypatch.setattr(child, "_process", forked)
    with closing(child.Child(hears, {})) as each:
        heard_of(each, until=bool)
        os.kill(each.process.pid, signal.SIGSTOP)
        each.send({"much": "é" * 300_000})
        assert each.sends()
        os.kill(each.process.pid, signal.SIGCONT)

        def is_heard(messages):
            each.send_on()
            return messages

        assert heard_of(each, until=is_heard) == [{"length": 300_000}]
        os.kill(each.process.pid, signal.SIGSTOP)
    assert not is_there(each.process.pid)


def test_threads_may_send_and_send_on_at_once(monkeypatch):
    """As an actor's do: one sends, and the one that listens sends on."""
    monkeypatch.setattr(child, "_process", forked)
    with closing(child.Child(hears, {})) as each, ThreadPoolExecutor(2) as pool:
        heard_of(each, until=bool)
        sent = [pool.submit(each.send, {"much": "e" * (200_000 + number)}) for number in range(30)]

        def are_heard(messages):
            each.send_on()
            return len(messages) == 30 or any(future.done() and future.exception() for future in sent)

        heard = heard_of(each, until=are_heard)
    assert sorted(message["length"] for message in heard) == list(range(200_000, 200_030))


def test_what_it_has_started_neither_hides_its_end_nor_outlives_it(monkeypatch):
    monkeypatch.setattr(child, "_process", forked)
    with closing(child.Child(leaves_another, {})) as each:
        (message,) = heard_of(each, until=lambda messages: each.has_ended())
        assert each.ended == Ended(code=3)
        assert is_there(message["other"])
    patience = time.monotonic() + 60
    while is_there(message["other"]) and time.monotonic() < patience:
        time.sleep(0.01)
    assert not is_there(message["other"])


def test_where_nobody_reads_what_it_tells_it_is_ended():
    processes = []

    def broken(message):
        processes.append(message["ready"])
        raise BrokenPipeError("what reads stderr is gone")

    with pytest.raises(BrokenPipeError, match="is gone"):
        run_child(sleeps, {}, on_message=broken)
    assert not is_there(processes[0])


@pytest.mark.parametrize(("function", "presses"), [(listens, 1), (is_deaf, 3)])
def test_ctrl_c_reaches_it_and_where_it_does_not_listen_it_is_ended(function, presses):
    heard, told = [], threading.Semaphore(0)

    def hear(message):
        heard.append(message)
        told.release()

    def press():
        for _ in range(presses):
            if not told.acquire(timeout=60):
                return  # it failed: the next test is not to be interrupted
            os.kill(os.getpid(), signal.SIGINT)

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stopping() as stop:
        assert signal.getsignal(signal.SIGINT) is not before[0]
        threading.Thread(target=press, daemon=True).start()
        ended = run_child(function, {}, on_message=hear, stop=stop)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert ended.was_stopped
    assert ended.code == (130 if function is listens else -signal.SIGKILL)
    assert heard[1] == {"heard": signal.SIGINT}


def test_a_signal_s_handler_tells_in_the_midst_of_telling():
    heard = []
    ended = run_child(tells_in_the_midst, {"number": 3000}, on_message=heard.append)
    assert ended.require("a process", fix="f") is None
    assert [each["told"] for each in heard if "told" in each] == list(range(3000))
    assert {"signal": signal.SIGALRM} in heard


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (answers, [{"heard": {"name": "é"}}]),
        (fails_together, [{"failed": {"error": "ConfigError", "problems": [asdict(Problem(what="w", fix="f"))]}}]),
        (breaks_together, ["a mistake in brim or in a library: RuntimeError: no luck with ***"]),
        (dies_together, ["the process of rank 1, of 2, was ended by SIGKILL"]),
    ],
)
def test_of_several_processes_the_first_one_tells_or_the_one_that_failed_first(function, says, capfd, tmp_path):
    assert launch(function.__module__, function.__name__, json.dumps({"name": "é"}).encode(), 2, str(tmp_path)) == 0
    out, err = capfd.readouterr()
    told = [json.loads(line) for line in out.splitlines() if "ready" not in line]
    if isinstance(says[0], str):
        what = [problem["what"] for problem in told[0]["failed"]["problems"]]
        assert (len(told), [each[: len(text)] for each, text in zip(what, says, strict=True)]) == (1, says)
    else:
        paths = [{"done": ["é", len(sys.path)]}] if function is answers else []
        assert told == [*says, *paths]
    assert ("in breaks\n" in err) == (function is breaks_together)
    assert "hf_abc" not in err


@pytest.mark.parametrize(("listening", "num_processes"), [(True, 1), (False, 1), (True, 2)])
def test_it_does_not_outlive_the_process_that_started_it(listening, num_processes):
    """That one is killed, and cannot end it."""
    program = (
        "import json, sys; sys.path[:] = sys.argv[1:]\n"
        "from tests.workflows.children import starts_another\n"
        "def tell(**message): print(json.dumps(message), flush=True)\n"
        f"starts_another({{'listens': {listening}, 'num_processes': {num_processes}}}, tell)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, *sys.path], stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline().split(":")[1].strip(" }\n"))
        process.kill()
    patience = time.monotonic() + 60
    while is_there(child) and time.monotonic() < patience:
        time.sleep(0.02)
    assert not is_there(child)
