"""What the tests of child processes run in one: functions of an order and a way to tell."""

import os
import signal
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

from faults.several import together

from brim.distributed import PeerError
from brim.errors import ConfigError, Problem
from brim.workflows.runs.serving import messages, serve, signal_when_alone


def answers(order, tell):
    print("what libraries print is no message")
    tell(heard=order)
    return [order["name"], len(sys.path)]


def fails(order, tell):
    raise ConfigError(Problem(what="w", fix="f"))


def breaks(order, tell):
    raise RuntimeError("no luck with hf_abcdefghijklmnopqrstuvwxyz01234567")


def runs_out(order, tell):
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def fails_together(order, tell):
    """The first of two follows the second, whichever comes first."""
    if os.environ["RANK"] == "0":
        raise PeerError(what="rank 1 failed")
    fails(order, tell)


def breaks_together(order, tell):
    (sleeps if os.environ["RANK"] == "0" else breaks)(order, tell)


def dies_together(order, tell):
    (sleeps if os.environ["RANK"] == "0" else dies)(order, tell)


def leaves(order, tell):
    os._exit(0)


def dies(order, tell):
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps(order, tell):
    tell(ready=os.getpid())
    time.sleep(600)


def hears(order, tell):
    tell(ready=os.getpid())
    while True:
        tell(length=len(tell.hear()["much"]))


def listens(order, tell):
    """Stops by the first signal that stops a run."""

    def stop(number, frame):
        tell(heard=number)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])  # nothing is told in the midst of telling
    tell(ready=os.getpid())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])
    time.sleep(600)


def is_deaf(order, tell):
    signal.signal(signal.SIGINT, lambda number, frame: tell(heard=number))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    tell(ready=os.getpid())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    while True:
        time.sleep(60)


def tells_in_the_midst(order, tell):
    """A signal's handler tells, too, whatever is being told just then."""

    def interrupt(number, frame):
        tell(signal=number)
        # Only now: handlers would interrupt each other without end while nobody reads and a full pipe makes them wait.
        signal.setitimer(signal.ITIMER_REAL, 1e-4)

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1e-4)
    for number in range(order["number"]):
        tell(told=number)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)


def leaves_another(order, tell):
    """Which holds its stdout open, as an engine's own processes may."""
    if other := os.fork():
        tell(other=other)
        os._exit(3)
    time.sleep(600)


def starts_another(order, tell):
    """Until it is killed, with the child that it started left alone."""
    from brim.workflows.runs import run_child

    run_child(listens if order["listens"] else sleeps, {}, on_message=lambda message: tell(**message),
              when_alone=signal.SIGTERM if order["listens"] else signal.SIGKILL,
              num_processes=order["num_processes"])  # fmt: skip


def forked(function, log, environment, when_alone, num_processes, folder):
    """Stand for `child._process`: the process is forked from this one, which has the libraries, and what a test changed.

    It costs milliseconds to start, not the seconds of an interpreter that imports them.
    """
    (order, to_child), (from_child, told) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: other threads, which do nothing here
        child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
                signal.signal(number, handler)
            for descriptor, number in ((order, 0), (told, 1)):
                os.dup2(descriptor, number)
            os.closerange(3, 256)  # or a brother would hold its stdin open
            if log is not None:
                sys.stdout = sys.stderr = log.open("w", buffering=1)
                os.dup2(sys.stderr.fileno(), 2)
            os.environ.update(environment)
            with open(0, "rb", 0, closefd=False) as lines:
                line = lines.readline()
            heard, told = signal_when_alone(when_alone), messages()
            if num_processes == 1:
                code = serve(function, line, told, heard)
            else:
                together(num_processes, lambda rank: serve(function, line, told), folder=Path(folder))
                code = 0
        finally:
            os._exit(code)
    os.close(order)
    os.close(told)
    return Forked(child, stdin=os.fdopen(to_child, "wb", 0), stdout=os.fdopen(from_child, "rb", 0))


class Forked(SimpleNamespace):
    """Has what `Child` uses of a Popen."""

    returncode = None

    def __init__(self, pid, **pipes):
        super().__init__(pid=pid, **pipes)

    def poll(self):
        if self.returncode is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(ended[1])
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number):
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)
