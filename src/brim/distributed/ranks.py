"""Join the processes of one run: tell them what was decided, exchange what each has found, and end together.

Each process ("rank") runs the same code. What depends on a machine, such as free memory and timings, the first rank
measures and tells the others; what follows from that, each computes itself. Decisions travel through the launcher's
small store and not through collectives: a collective times out, and reading data or writing a checkpoint may take an
hour. Whoever waits there for another rank sees its pulse, so that one that was stopped is not waited for for ever.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from brim.distributed.launch import Place
from brim.errors import BrimError, InputError
from brim.units import format_count, format_seconds

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

_PULSE_S = 2.0
_POLL_S = 0.005  # at first; it grows to a quarter of a second
_SLOWEST_POLL_S = 0.25
_LEAST_TIMEOUT_S = 60.0
_STEPS_IN_TIMEOUT = 10  # a step that takes ten times as long as predicted hangs
_FAREWELL_S = 3.0  # for the others to hear that this rank has failed
_BEHIND_S = 1.0  # for the rank that has failed to end before those that miss it
_OVER = "over"
_TIMEOUT = "BRIM_PEER_TIMEOUT_S"  # of the environment


class PeerError(BrimError):
    """Tell that another rank has failed or does not answer. What it died of, it says itself."""


class Ranks:
    """Stand for all processes of a run, as one of them sees them. `ALONE` is the only process of its run."""

    def __init__(self, place: Place, store: Store | None = None, *, timeout_s: float | None = None) -> None:
        self.place = place
        self.timeout_s = timeout_s or _LEAST_TIMEOUT_S
        self._is_timeout_set = timeout_s is not None
        self._store = store
        self._counts: dict[str, int] = {}  # of the times that a name was used
        self._is_answering = True  # the store
        self._given_up: set[int] = set()  # ranks that did not answer in time: nobody waits for them again
        self._pulse: threading.Event | None = None

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.world_size

    @property
    def are_several(self) -> bool:
        return self.size > 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def told(self, name: str, make: Callable[[], T]) -> T:
        """Return what the first rank makes, which is plain JSON; the others wait for it.

        Raises PeerError where the first one ends, or does not answer any more.
        """
        if not self.are_several:
            return make()
        if self.is_first:
            value = make()
            self._set(self._key(name), value)
            return value
        heard: T = self._heard(self._key(name), of=0)
        return heard

    def heard(self, name: str) -> Any:
        """Return what the first rank tells, in another one."""
        return self._heard(self._key(name), of=0)

    def first_does(self, name: str, action: Callable[[], object]) -> None:
        """Have the first rank do something, while the others wait outside any collective."""

        def done() -> bool:
            action()
            return True

        self.told(name, done)

    def local_first_does(self, name: str, make: Callable[[], T]) -> T:
        """Return what the first rank of this machine makes, plain JSON; the others of the machine wait for it."""
        place, local_first = self.place, self.rank - self.place.local_rank
        key = self._key(f"{name}-{local_first}")
        if place.local_rank == 0:
            value = make()
            if self.are_several:
                self._set(key, value)
            return value
        heard: T = self._heard(key, of=local_first)
        return heard

    def exchanged(self, name: str, make: Callable[[], T]) -> list[T]:
        """Return what each rank makes, plain JSON, in their order.

        A BrimError of one is raised there once all have heard of it; the others raise PeerError.
        """
        if not self.are_several:
            return [make()]
        number = self._counts.get(name, 0)
        key = self._key(name)
        if number >= 2:  # who reads this exchange has read the last but one
            store = self._several()
            self._asked(lambda: store.delete_key(f"{name}-{number - 2}/{self.rank}"))
        failure = None
        try:
            said: Any = {"value": make()}
        except BrimError as error:
            failure, said = error, {"failed": True}
        self._set(f"{key}/{self.rank}", said)
        heard = [said if rank == self.rank else self._heard(f"{key}/{rank}", of=rank) for rank in range(self.size)]
        if failure is not None:
            raise failure
        failed = [rank for rank, each in enumerate(heard) if "failed" in each]
        if failed:
            raise self.peer_failed(failed)
        return [each["value"] for each in heard]

    def counter(self, name: str) -> Callable[[], int]:
        """Return what draws the next number, from 0 on, of a new count that all ranks share.

        All ranks begin one of a name equally often, and have met in between.
        """
        number, key, store = self._counts.get(name, 0), self._key(name), self._several()
        if self.is_first and number >= 2:  # none draws from it any more
            self._asked(lambda: store.delete_key(f"{name}-{number - 2}"))
        return lambda: int(self._asked(lambda: store.add(key, 1))) - 1

    def agree(self, digests: Mapping[str, str]) -> None:
        """Compare what every rank must have alike. Raises InputError that names what differs."""
        others = self.exchanged("digests", lambda: dict(digests))
        for name in dict.fromkeys(name for each in others for name in each):
            found = [each.get(name, "nothing")[:60] for each in others]
            strange = [rank for rank, each in enumerate(others) if each.get(name) != others[0].get(name)]
            if strange:
                raise InputError(
                    what=f"{name} differs between the processes: {_ranks(strange)} and rank 0 do not have the same",
                    expected=f"the same on every machine (rank 0: {found[0]}, rank {strange[0]}: {found[strange[0]]})",
                    fix="give every machine the same files, packages and configuration",
                )

    def add(self, tensor: Tensor) -> None:
        """Add a tensor up over all ranks, in place. Raises PeerError where one has ended, or does not answer."""
        if not self.are_several:
            return
        import torch.distributed as dist

        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:  # DistBackendError is one
            raise self._lost(error) from error

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Raise PeerError where a collective in the block fails, which another library made: a rank has ended."""
        try:
            yield
        except RuntimeError as error:
            if type(error).__name__ != "DistBackendError" and "/gloo/" not in str(error):
                raise
            raise self._lost(error) from error

    def copy_from_first(self, tensor: Tensor) -> None:
        """Fill a tensor with the first rank's. Raises PeerError as `add` does."""
        import torch.distributed as dist

        try:
            dist.broadcast(tensor, src=0)
        except RuntimeError as error:
            raise self._lost(error) from error

    def expect_steps_of(self, seconds: float | None) -> None:
        """Set the time after which a rank that does not answer is given up; by the predicted time of a step.

        seconds: None where it is not known; then a step may take ten minutes. BRIM_PEER_TIMEOUT_S counts instead.
        """
        if not self._is_timeout_set:
            step_s = _LEAST_TIMEOUT_S if seconds is None else seconds
            self.timeout_s = max(_LEAST_TIMEOUT_S, _STEPS_IN_TIMEOUT * step_s)
        if self.are_several:
            from torch.distributed.distributed_c10d import _set_pg_timeout

            _set_pg_timeout(timedelta(seconds=math.ceil(self.timeout_s)))

    def peer_failed(self, ranks: Sequence[int]) -> PeerError:
        """Return the error that ends this rank since others have failed."""
        return PeerError(what=f"{_ranks(ranks)} failed, so this process ends, too", fix="see what was said there")

    def _lost(self, error: RuntimeError) -> PeerError:
        first_line = str(error).splitlines()[0][:200]
        return PeerError(
            what=f"another process of the run ended, or did not answer within {format_seconds(self.timeout_s)}: "
            f"{first_line}",
            fix="see what the others said; then continue with --resume",
        )

    def _key(self, name: str) -> str:
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        return f"{name}-{number}"

    def _set(self, key: str, value: object) -> None:
        store = self._several()
        self._asked(lambda: store.set(key, json.dumps(value)))

    def _heard(self, key: str, *, of: int) -> Any:
        """Wait for what a rank says, as long as it lives."""
        wait_s, pulse, seen_at_s = _POLL_S, None, time.monotonic()
        while True:
            said, over, beats = self._asked(lambda: self._look(key, _OVER, f"pulse/{of}"))
            if said is not None:
                return json.loads(said)
            if over is not None:
                raise self.peer_failed([int(over)])
            now_s = time.monotonic()
            if beats != pulse:
                pulse, seen_at_s = beats, now_s
            if of in self._given_up or now_s - seen_at_s > self.timeout_s:
                self._given_up.add(of)
                raise PeerError(
                    what=f"rank {of} has not shown a sign of life for {format_seconds(self.timeout_s)}",
                    fix="see what it said; then continue with --resume",
                )
            time.sleep(wait_s)
            wait_s = min(1.5 * wait_s, _SLOWEST_POLL_S)

    def _look(self, *keys: str) -> list[bytes | None]:
        """Return what stands under each key in the store."""
        store = self._several()
        return [store.get(key) if store.check([key]) else None for key in keys]

    def _several(self) -> Store:
        assert self._store is not None, "there are several"
        return self._store

    def _asked(self, question: Callable[[], T], *, within_s: float | None = None) -> T:
        """Return what the store answers. Raises PeerError where it is gone, or does not answer.

        It is asked in a thread: where the process that holds it was stopped, PyTorch waits for it for ever.
        """
        if not self._is_answering:
            raise self._lost(RuntimeError("the process that holds the store does not answer"))
        answers: SimpleQueue[T | RuntimeError] = SimpleQueue()

        def ask() -> None:
            try:
                answers.put(question())
            except RuntimeError as error:  # the store is gone: the launcher has ended
                answers.put(error)

        threading.Thread(target=ask, name="store", daemon=True).start()
        try:
            answer = answers.get(timeout=self.timeout_s if within_s is None else within_s)
        except Empty:
            self._is_answering = False
            raise self._lost(RuntimeError("the process that holds the store does not answer")) from None
        if isinstance(answer, RuntimeError):
            raise self._lost(answer) from answer
        return answer

    def _live(self) -> threading.Event:
        """Show a pulse from now on, in a thread, until the event is set."""
        over, store, key = threading.Event(), self._store, f"pulse/{self.rank}"
        assert store is not None, "there are several"

        def beat() -> None:
            number = 0
            with suppress(RuntimeError):
                while not over.is_set():
                    store.set(key, str(number := number + 1))
                    over.wait(_PULSE_S)

        threading.Thread(target=beat, name="pulse", daemon=True).start()
        return over

    def _end(self) -> None:
        """Let the others know that this rank ends before its time."""
        store = self._several()
        with suppress(PeerError):
            if self._asked(lambda: self._look(_OVER), within_s=_FAREWELL_S) == [None]:
                self._asked(lambda: store.set(_OVER, str(self.rank)), within_s=_FAREWELL_S)

    def _leave(self, *, within_s: float) -> None:
        """Say that this rank has heard all. The first, which may hold the store, waits for the others to say so."""
        store, until_s = self._several(), time.monotonic() + within_s
        others = [f"left/{rank}" for rank in range(1, self.size)] if self.is_first else []
        with suppress(PeerError):
            self._asked(lambda: store.set(f"left/{self.rank}", ""), within_s=within_s)
            while others and time.monotonic() < until_s:
                if self._asked(lambda: store.check(others), within_s=within_s):
                    break
                time.sleep(_POLL_S)


ALONE = Ranks(Place())


_OF_BOTH = "cpu:gloo,cuda:nccl"  # backends of a GPU's tensors, and of those that are offloaded to the host


@contextmanager
def joined(place: Place, *, offloads: bool = False) -> Iterator[Ranks]:
    """Join the processes of a run for the time of a block. A GPU each, or the CPU through gloo where there are none.

    offloads: weights lie on the host, and are added up and gathered there, too.
    """
    if place.world_size == 1:
        yield ALONE
        return
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.distributed_c10d import _abort_process_group
    from torch.distributed.rendezvous import rendezvous

    if torch.cuda.is_available():
        if place.local_rank >= (there := torch.cuda.device_count()):
            raise InputError(
                what=f"LOCAL_RANK is {place.local_rank}, but this process sees {format_count(there, 'GPU')}",
                where="environment",
                expected="a GPU for each process of a machine, all of which each process sees",
                fix="start fewer processes a machine, or have its processes see all of its GPUs (CUDA_VISIBLE_DEVICES)",
            )
        torch.cuda.set_device(place.local_rank)
    timeout_s = timeout_of_environment()
    start = timedelta(seconds=_STEPS_IN_TIMEOUT * _LEAST_TIMEOUT_S)
    with _ending_by_ctrl_c():
        store, _, _ = next(rendezvous("env://", timeout=start))
        dist.init_process_group(
            "gloo" if not torch.cuda.is_available() else _OF_BOTH if offloads else "nccl",
            store=PrefixStore("collectives", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=start,
        )
    ranks = Ranks(place, PrefixStore("brim", store), timeout_s=timeout_s)
    pulse, leave_group = ranks._live(), dist.destroy_process_group
    try:
        yield ranks
    except BaseException as error:
        if "nccl" in dist.get_backend_config():  # to destroy it waits for what was begun, which nobody may end
            leave_group = _abort_process_group
        ranks._end()
        ranks._leave(within_s=_FAREWELL_S)
        if isinstance(error, PeerError):  # a launcher ends all with the first that ends, which should say why
            time.sleep(_BEHIND_S)
        raise
    else:
        ranks._leave(within_s=ranks.timeout_s)
    finally:
        pulse.set()
        leave_group()


@contextmanager
def group_of_one(ranks: Ranks, *, is_cuda: bool) -> Iterator[None]:
    """Make a process group of the only process of a run, for the time of a block: FSDP wants one. Others have theirs.

    No launcher and no port is needed. A group that the caller of brim has made before is taken.
    """
    import torch.distributed as dist

    if ranks.are_several or dist.is_initialized():
        yield
        return
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(_OF_BOTH if is_cuda else "gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _ending_by_ctrl_c() -> Iterator[None]:
    """Have Ctrl-C end this process at once while PyTorch waits for the others, in which it would hear no handler.

    Another rank may have been interrupted before it came here; nothing has been done that could be saved.
    """
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def timeout_of_environment() -> float | None:
    """Return what stands in BRIM_PEER_TIMEOUT_S: seconds; None where there is nothing. Raises InputError."""
    text = os.environ.get(_TIMEOUT)
    if not text:
        return None
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise InputError(what=f"{_TIMEOUT} is {text!r}", where="environment", expected="seconds, a number above 0")


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:4])) + (" …" if len(ranks) > 4 else "")
    return f"rank {named}" if len(ranks) == 1 else f"{format_count(len(ranks), 'rank')} ({named})"
