"""Be one of two processes that `test_launch` starts: `python worker.py HOW FOLDER`. Rank 1 is the one that fails."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from brim.distributed import Place, leave_message, watch_parent

PLACE = Place.of_environment()
HOW, FOLDER = sys.argv[1], Path(sys.argv[2])
NUM_SIGNALS = []


def fail(message: str, code: int, *, follows: bool = False) -> None:
    assert leave_message(message, code, follows=follows)
    sys.exit(code)


def pid_of(rank: int) -> int:
    """The process of that rank, once it runs."""
    file = FOLDER / f"pid{rank}"
    while not file.exists():
        time.sleep(0.01)
    return int(file.read_text())


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZXT"
    except OSError:
        return False


def end_as_asked() -> None:
    """End rank 1 in the way that is asked for; rank 0 sees it and fails, too, as it would in a collective."""
    if PLACE.is_first:
        other = pid_of(1)
        while is_running(other):
            time.sleep(0.01)
        if HOW == "follows":
            time.sleep(0.5)  # the launcher looks several times
            fail("the cause", 2)
        fail("the other one is gone", 1)
    pid_of(0)
    if HOW == "follows":
        fail("rank 0 failed", 1, follows=True)
    if HOW == "bad input":
        from brim.cli import main

        sys.argv[1:] = ["check", "nowhere.yaml"]
        main()
    if HOW == "crash":
        sys.exit("no such library")
    os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[HOW])


def be_interrupted() -> None:
    """Both hear of the Ctrl-C that rank 0 sends to their launcher; rank 0 takes its time, and so long rank 1 is gone."""
    signal.signal(signal.SIGINT, lambda number, frame: NUM_SIGNALS.append(number))
    (FOLDER / f"ready{PLACE.rank}").touch()
    if PLACE.is_first:
        while not (FOLDER / "ready1").exists():
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGINT)
    while not NUM_SIGNALS:
        time.sleep(0.01)
    if PLACE.is_first:
        other = pid_of(1)
        while is_running(other):
            time.sleep(0.01)
        time.sleep(0.5)  # the launcher looks at both several times
    fail(f"rank {PLACE.rank} has heard {len(NUM_SIGNALS)}", 130)


def reduce() -> None:
    """Add numbers up for ever; rank 1 is killed meanwhile, and rank 0 gets PyTorch's own error."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    total = torch.ones(4)
    try:
        for step in range(10**9):
            distributed.all_reduce(total)
            if step == 10 and not PLACE.is_first:
                os.kill(os.getpid(), signal.SIGKILL)
    except RuntimeError as error:
        leave_message(str(error), 1)
        os._exit(1)  # PyTorch's threads would abort what goes on to end


(FOLDER / f"part{PLACE.rank}").write_text(str(os.getpid()))
(FOLDER / f"part{PLACE.rank}").rename(FOLDER / f"pid{PLACE.rank}")
watch_parent()
print("rank", PLACE.rank, "of", PLACE.world_size, flush=True)
if HOW == "reduce":
    reduce()
elif HOW == "interrupted":
    be_interrupted()
elif HOW == "orphaned":
    if not PLACE.is_first:
        os.kill(os.getpid(), signal.SIGSTOP)
    signal.pause()
elif HOW != "done":
    end_as_asked()
