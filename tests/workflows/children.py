"""What the tests of child processes run in one: functions of an order and a way to tell."""

import os
import signal
import sys
import time

from brim.distributed import PeerError
from brim.errors import ConfigError, Problem


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
