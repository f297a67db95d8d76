"""Actors: the members of another team, each on its own machine; which cluster, and what an actor takes of it."""

import os
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.infer.fake_ray import Ray, RayError
from tests.infer.test_leases import Team, worked

from brim.errors import InputError
from brim.infer import Actors, num_actors
from brim.session import say_nothing


@pytest.fixture
def begun(monkeypatch):
    """Put a cluster in Ray's place."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def of(*machines, address=None, **how):
        ray = Ray(*machines, **how)
        monkeypatch.setitem(sys.modules, "ray", ray)
        if address is not None:
            monkeypatch.setenv("RAY_ADDRESS", address)
        return ray

    return of


class Single(Team):
    """A team on an actor's machine, of which one member is started."""

    there: list = []  # noqa: RUF012

    def __init__(self, size, num_here, **how):
        super().__init__(size, **how)
        self.num_here, self.lock = num_here, threading.Lock()
        self.there.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.there.remove(self)

    def send(self, member, message):
        with self.lock:
            super().send(member, message)

    def heard(self):
        if self not in self.there:
            raise RayError("it has ended")
        time.sleep(0.001)  # as a team waits a little
        with self.lock:
            yield from list(super().heard())


def team_of(size, **how):
    return lambda num_here: Single(size, num_here, **how)


def test_actors_do_what_their_teams_do_and_one_that_ends_is_started_anew(begun):
    ray, said = begun(), []
    with Actors(team_of(3), 3, gpus=False, say=said.append) as actors:
        kept, lost = worked(actors, 60)
        assert (kept, lost) == ({unit: unit * unit for unit in range(60)}, [])
        assert len(Single.there) == 3
    assert (Single.there, len(ray.killed), ray.is_begun) == ([], 3, False)
    assert said == ["Ray: 1 machine at 127.0.0.1:6379, which this machine alone can reach"]
    with Actors(team_of(2, poison=[7]), 2, gpus=False, say=say_nothing) as actors:
        kept, lost = worked(actors, 20)
    assert (sorted(kept), lost) == ([unit for unit in range(20) if unit != 7], [7])


def test_a_cluster_that_is_begun_here_keeps_to_the_loopback_and_leaves_nothing(begun):
    ray, before = begun(), dict(os.environ)
    with Actors(team_of(1), 1, gpus=False, say=say_nothing):
        ((how, clusters),) = ray.inits
    assert (how["address"], how["_node_ip_address"], how["include_dashboard"], clusters) == (
        "local", "127.0.0.1", False, "0",
    )  # fmt: skip
    assert not Path(how["_temp_dir"]).parent.exists()
    assert dict(os.environ) == before
    begun(begun_elsewhere=True)
    with pytest.raises(InputError, match=r"would listen beyond"), Actors(team_of(1), 1, gpus=False, say=say_nothing):
        pass


def test_a_cluster_that_is_there_is_joined_and_one_of_this_program_stays(begun):
    ray = begun({"CPU": 4}, address="10.0.0.1:6379")
    with Actors(team_of(1), 1, gpus=False, say=say_nothing):
        assert ray.inits == [({"address": "10.0.0.1:6379", "log_to_driver": False, "logging_level": "error"}, None)]
    assert not ray.is_begun
    ray = begun({"CPU": 4}, is_begun=True)
    with Actors(team_of(1), 1, gpus=False, say=say_nothing) as actors:
        assert actors.about["cluster"] == "1 machine at 10.0.0.1:6379"
    assert (ray.inits, ray.is_begun) == ([], True)
    begun(address="10.0.0.1:6379", refuses="nobody is there")
    with pytest.raises(InputError, match=r"(?s)RAY_ADDRESS: .*cannot be joined: nobody is there"):
        num_actors(gpus=False)


@pytest.mark.parametrize(
    ("machines", "size", "gpus", "all_of_them", "taken", "num_here"),
    [
        ([{"CPU": 8, "GPU": 4}, {"CPU": 8, "GPU": 4}, {"CPU": 2}], 3, True, 8, {"num_gpus": 1, "num_cpus": 0}, 3),
        ([{"CPU": 8}, {"CPU": 8}, {}], 2, False, 2, {"num_cpus": 8}, 1),
        ([{"CPU": 8}, {"CPU": 5}], 4, False, 2, {"num_cpus": 2}, 4),
        ([{"CPU": 8}, {"CPU": 5}], 1, False, 2, {"num_cpus": 8}, 1),
    ],
    ids=["GPUs", "a machine each", "shared", "one"],
)
def test_an_actor_takes_a_gpu_or_its_part_of_the_cores(begun, machines, size, gpus, all_of_them, taken, num_here):
    ray = begun(*machines, is_begun=True)
    assert num_actors(gpus=gpus) == all_of_them
    with Actors(team_of(size), size, gpus=gpus, say=say_nothing) as actors:
        actors.start(0)
        assert next(iter(actors.heard()))[0] == 0
        assert Single.there[0].num_here == num_here
    options = {name: value for name, value in ray.options[0].items() if name.startswith("num_")}
    assert (options, ray.options[0]["max_restarts"]) == (taken, 0)


@pytest.mark.parametrize(
    ("machines", "gpus", "what"),
    [
        ([{"CPU": 2, "GPU": 1}], True, r"2 actors are asked for, a GPU each, and the Ray cluster has 1 GPU"),
        ([{"CPU": 1}], False, r"2 actors are asked for, a core each, and the Ray cluster has 1 core"),
        ([{"CPU": 8, "GPU": 4}], False, r"has GPUs and this process sees none"),
    ],
)
def test_a_cluster_that_is_too_small_or_of_another_kind_is_refused(begun, machines, gpus, what):
    begun(*machines, is_begun=True)
    with pytest.raises(InputError, match=what):
        Actors(team_of(2), 2, gpus=gpus, say=say_nothing)


def test_an_actor_that_dies_and_a_missing_ray_are_named(begun, monkeypatch):
    begun({"CPU": 4}, is_begun=True)

    @contextmanager
    def dies(num_here):
        raise RayError("\n  its machine is gone\n  more of it")
        yield

    with Actors(dies, 1, gpus=False, say=say_nothing) as actors:
        actors.start(0)
        ((member, error),) = actors.heard()
    assert member == 0
    assert error.problems[0].what == "actor 0 of 1 on the Ray cluster ended: its machine is gone"
    with Actors(team_of(1), 1, gpus=False, say=say_nothing) as actors:
        actors.start(0)
        actors.end(0)  # as one that is silent
        assert list(actors.heard()) == []
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"(?s)backend.type: ray needs ray.*pip install 'brim\[ray\]'"):
        Actors(dies, 1, gpus=False, say=say_nothing)
