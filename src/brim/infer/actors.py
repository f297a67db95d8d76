"""Have members on a Ray cluster: a team of actors, each with a team of one on its own machine, which it passes on.

Ray finds the machines and carries the messages; what a member is, and how it starts and ends, the team says that an
actor has. A cluster that RAY_ADDRESS names is joined. Else one is started for as long as it is needed, on this machine
alone: nothing of it listens beyond the loopback.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeAlias

import torch

from brim.errors import BrimError, InputError, require_extra
from brim.infer.leases import Message, Team
from brim.notes import Note, Say
from brim.units import format_count

MakeTeam: TypeAlias = Callable[[int], AbstractContextManager[Team]]

_ADDRESS, _LOCAL = "RAY_ADDRESS", "local"

_LOOPBACK = "127.0.0.1"

# Ray makes its node's address of a loopback one of the network, and listens there. Told that clusters are not enabled,
# as it is by default on macOS and Windows, it keeps to the loopback on Linux, too. Read when ray is imported.
_ALONE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
}

_STORE_BYTES = 256 << 20  # of shared memory for messages: a lease has a few MB

_WAIT_S = 0.2

_END_S = 5.0  # in which actors remove their temporary files


def num_actors(gpus: bool) -> int:
    """Return how many actors a cluster has room for: one a GPU; on CPUs, one a machine, which has all its cores.

    gpus: that this machine has some, and so each actor needs one. Raises InputError as Actors does.
    """
    if _address() == _LOCAL and not ("ray" in sys.modules and sys.modules["ray"].is_initialized()):
        return max(1, torch.cuda.device_count()) if gpus else 1
    with _cluster(1) as ray:
        return max(1, int(ray.cluster_resources().get("GPU", 0)) if gpus else len(_cores(ray)))


def cores_each(cores: Sequence[int], number: int) -> int:
    """Return the most cores that so many actors can have each; 0 where there are too few. cores: of each machine."""
    most = range(max(cores, default=0), 0, -1)
    return next((each for each in most if sum(there // each for there in cores) >= number), 0)


class Actors(AbstractContextManager["Actors"]):
    """Start members as actors, and talk with them: a Team. None outlives the context.

    team: makes, on an actor's machine, a team that has its member. It is given how many actors a machine may have.
    `about`: facts on the cluster.
    Raises InputError where ray is missing, the cluster cannot be reached, or is too small.
    """

    def __init__(self, team: MakeTeam, size: int, *, gpus: bool, say: Say) -> None:
        self.size = size
        self._actors: dict[int, Any] = {}
        self._asked: dict[Any, int] = {}  # the calls that wait for what a member says
        with ExitStack() as stack:
            self._ray = stack.enter_context(_cluster(size))
            self.about = _about(self._ray)
            needs, num_on_machine = _needs(self._ray, size, gpus=gpus)
            # One call waits for what the member says, another one sends. Members starts anew what has died.
            how = {"max_concurrency": 2, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
            self._remote = self._ray.remote(_Actor).options(**how, **needs)
            self._made_of = (team, num_on_machine)
            stack.callback(lambda: self._end(list(self._actors)))
            self._stack = stack.pop_all()
        say(Note(f"Ray: {self.about['cluster']}"))
        free = int(self._ray.available_resources().get("GPU", 0))
        if gpus and free < size:
            say(Note(f"Ray: {free} of the {size} GPUs are free; the other actors begin once theirs is"))

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def start(self, member: int) -> None:
        """Start a member, as Team.start does."""
        self._end({member} & self._actors.keys())
        self._actors[member] = self._remote.remote(*self._made_of, member)
        self._listen(member)

    def send(self, member: int, message: Message) -> None:
        """Send a message, as Team.send does."""
        self._actors[member].send.remote(message)

    def end(self, member: int) -> None:
        """End a member, as Team.end does."""
        self._asked = {call: asked for call, asked in self._asked.items() if asked != member}
        self._end([member])

    def heard(self) -> Iterator[tuple[int, Message | BrimError]]:
        """Return what members have said, as Team.heard does."""
        asked = list(self._asked)
        if asked and self._ray.wait(asked, timeout=_WAIT_S)[0]:
            for call in self._ray.wait(asked, num_returns=len(asked), timeout=0)[0]:
                member = self._asked.pop(call)
                try:
                    messages = self._ray.get(call)
                except self._ray.exceptions.RayError as error:
                    messages = [self._error(member, error)]
                if not isinstance(messages[-1], BrimError):
                    self._listen(member)
                yield from ((member, message) for message in messages)

    def _listen(self, member: int) -> None:
        self._asked[self._actors[member].heard.remote()] = member

    def _error(self, member: int, error: Exception) -> BrimError:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        what = f"actor {member} of {self.size} on the Ray cluster ended: {lines[0] if lines else type(error).__name__}"
        return BrimError(what=what, fix="the same command with --resume goes on with what is left")

    def _end(self, members: Iterable[int]) -> None:
        actors = [self._actors.pop(member) for member in members]
        if actors:
            self._ray.wait([actor.end.remote() for actor in actors], num_returns=len(actors), timeout=_END_S)
        for actor in actors:
            self._ray.kill(actor)


class _Actor:
    """Have a team of one member, in a worker of the cluster, and pass messages on."""

    def __init__(self, team: MakeTeam, num_on_machine: int, member: int) -> None:
        self._stack, self._member = ExitStack(), member
        self._team = self._stack.enter_context(team(num_on_machine))
        self._team.start(member)

    def send(self, message: Message) -> None:
        self._team.send(self._member, message)

    def heard(self) -> list[Message | BrimError]:
        """Wait until the member says something, or has ended, which is the last."""
        messages: list[Message | BrimError] = []
        while not messages:
            messages = [message for _, message in self._team.heard()]
        return messages

    def end(self) -> None:
        self._stack.close()


@contextmanager
def _cluster(size: int) -> Iterator[Any]:
    """Yield ray, connected as this process has it, or for now: with RAY_ADDRESS, or a cluster for so many actors."""
    with ExitStack() as stack, _environment(_ALONE if _address() == _LOCAL else {}):
        require_extra("ray", "ray", what="backend.type: ray", otherwise="set backend.type: local")
        import ray

        if not ray.is_initialized():
            _init(ray, stack, size)
        context = stack.pop_all()
    with context:
        yield ray


def _init(ray: Any, stack: ExitStack, size: int) -> None:
    address, how = _address(), {"log_to_driver": False, "logging_level": "error"}
    if is_local := address == _LOCAL:
        how |= _alone(ray, stack, size)
    stack.callback(ray.shutdown)
    is_main, before = threading.current_thread() is threading.main_thread(), signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, **how)
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        told = str(error).strip().splitlines() or [type(error).__name__]
        if is_local:
            fix = "see whether /tmp and /dev/shm have room, or set backend.type: local"
            raise InputError(what=f"no Ray cluster could be begun here: {told[0]}", fix=fix) from error
        fix = "name the cluster's head as HOST:PORT, and use the versions of ray and Python that it has"
        raise InputError(what=f"the Ray cluster cannot be joined: {told[0]}", where=_ADDRESS, fix=fix) from error
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)  # ray's own would end the process at once


def _alone(ray: Any, stack: ExitStack, size: int) -> dict[str, Any]:
    """Return how a cluster is begun that this machine alone can reach."""
    if ray.util.get_node_ip_address() != _LOOPBACK:
        fix = "set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 in the environment; or call ray.init(), whose cluster is used"
        raise InputError(what="ray was imported before: a cluster that is begun now would listen beyond here", fix=fix)
    # In a folder of this user's alone, since Ray lets all users write to its own; and not below a long TMPDIR, since a
    # socket's path has 107 characters at most.
    folder = tempfile.TemporaryDirectory(prefix="brim-ray-", dir="/tmp", ignore_cleanup_errors=True)
    return {
        "_temp_dir": f"{stack.enter_context(folder)}/ray",
        "_node_ip_address": _LOOPBACK,
        "include_dashboard": False,
        "num_cpus": max(size, os.cpu_count() or 1),
        "object_store_memory": _STORE_BYTES,
    }


def _address() -> str:
    return os.environ.get(_ADDRESS) or _LOCAL


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _about(ray: Any) -> dict[str, Any]:
    address = ray.get_runtime_context().gcs_address
    machines = [node for node in ray.nodes() if node["Alive"]]
    reach = ", which this machine alone can reach" if address.startswith(f"{_LOOPBACK}:") else ""
    return {"ray": ray.__version__, "cluster": f"{format_count(len(machines), 'machine')} at {address}{reach}"}


def _cores(ray: Any) -> list[int]:
    """Return the cores of each machine that has some for actors."""
    there = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    return [cores for cores in there if cores]


def _needs(ray: Any, size: int, *, gpus: bool) -> tuple[dict[str, int], int]:
    """Return what an actor takes, and how many a machine may have. Raises InputError where there is too little."""
    num_gpus, cores = int(ray.cluster_resources().get("GPU", 0)), _cores(ray)
    if num_gpus and not gpus:
        raise InputError(
            what="the Ray cluster has GPUs and this process sees none, so that it would choose precision and engine "
            "as for a CPU",
            fix="start it on a machine with a GPU, without CUDA_VISIBLE_DEVICES",
        )
    each = cores_each(cores, size)
    if (gpus and num_gpus < size) or not (gpus or each):
        there = format_count(num_gpus, "GPU") if gpus else format_count(sum(cores), "core")
        asked = format_count(size, "actor")
        raise InputError(
            what=f"{asked} are asked for, a {'GPU' if gpus else 'core'} each, and the Ray cluster has {there}",
            where="--gpus, or backend.trainer.num_workers",
            fix="ask for fewer, or leave both out for all",
        )
    if gpus:
        return {"num_gpus": 1, "num_cpus": 0}, size
    return {"num_cpus": each}, min(size, max(cores) // each)
