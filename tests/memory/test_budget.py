"""How many bytes a run may take, and why: by configuration, on a device at hand, on a CPU."""

import resource
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from brim import Model
from brim.config.schema import MemoryConfig
from brim.errors import ConfigError
from brim.memory.devices import Device, budget_of, cpu_device, enforce, find_device, limit_lifted
from brim.memory.devices.budget import (
    Limit,
    Margin,
    cpu_limits,
    cpu_margin,
    cuda_margin,
    decide,
    resident_bytes,
    returns_at_once,
)
from brim.session import Shortfall

KIB, MIB, GIB = 2**10, 2**20, 2**30


def decided(*, limits=((16 * GIB, "T4 has 16.0 GiB"),), outside=GIB, least_margin=7, **asked):
    return decide(
        MemoryConfig(**asked),
        Device(name="t4", title="T4", memory_bytes=16 * GIB, capability=None, outside_bytes=0),
        limits=[Limit(num_bytes=num_bytes, reason=reason) for num_bytes, reason in limits],
        outside_bytes=outside,
        margin=Margin(share=0.1, num_bytes=least_margin, reason="tests are careful"),
    )


def test_by_itself_the_least_limit_counts_with_its_reason():
    budget = decided(limits=((16 * GIB, "all"), (11 * GIB, "RLIMIT_AS"), (12 * GIB, "the container")))
    assert (budget.limit_bytes, budget.limit_reason) == (11 * GIB, "RLIMIT_AS")
    assert (budget.margin_bytes, budget.margin_reason) == (GIB + 7, "tests are careful")
    assert budget.reserved_bytes == 9 * GIB - 7


def test_what_is_asked_for_is_taken_in_bytes_or_as_a_share():
    for asked, num_bytes in (("14 GiB", 14 * GIB), (0.5, 8 * GIB), ("3000 MiB", 3000 * MIB), (1.0, 16 * GIB)):
        budget = decided(budget=asked)
        assert (budget.limit_bytes, budget.limit_reason) == (num_bytes, "memory.budget")
    for asked, num_bytes in (("1 GiB", GIB), (0.25, 4 * GIB), (0.0, 0)):  # a share of the budget
        budget = decided(margin=asked)
        assert (budget.margin_bytes, budget.margin_reason) == (num_bytes, "memory.margin")


def test_what_another_process_has_less_is_taken_from_this_one_s_budget():
    t4, asked = find_device("t4"), MemoryConfig(margin="1 GiB")
    alone = budget_of(asked, t4, is_at_hand=False)
    beside = budget_of(asked, t4, is_at_hand=False, shortfall=Shortfall(num_bytes=3 * GIB, reason="rank 1: full"))
    assert beside == replace(alone, limit_bytes=alone.limit_bytes - 3 * GIB, limit_reason="rank 1: full")
    with pytest.raises(ConfigError, match="rank 1: full"):
        budget_of(asked, t4, is_at_hand=False, shortfall=Shortfall(num_bytes=15 * GIB, reason="rank 1: full"))


def test_a_budget_above_the_device_is_refused_and_one_above_what_is_free_cut():
    with pytest.raises(ConfigError, match=r"memory.budget is 20.0 GiB, but T4 has 16.0 GiB\n.*fix: set memory.budget"):
        decided(budget="20 GiB")
    budget = decided(limits=((16 * GIB, "all"), (4 * GIB, "free memory")), budget="14 GiB")
    assert budget.limit_bytes == 4 * GIB
    assert budget.limit_reason == "free memory; memory.budget: 14.0 GiB is more than there is"


def test_a_budget_of_which_nothing_is_left_is_refused_and_a_smaller_margin_advised_only_where_it_would_help():
    for outside, asked, what, least, fix in (
        (2, {"budget": "1 GiB"}, "of 1.0 GiB (memory.budget), 2.0 GiB lie outside PyTorch:", 2, "set a larger memory.budget"),
        (
            1, {"budget": "3 GiB", "margin": "2 GiB"},
            "of 3.0 GiB (memory.budget), 1.0 GiB lie outside PyTorch and 2.0 GiB are kept free:", 3,
            "set a larger memory.budget, or a smaller memory.margin",
        ),
        (
            1, {"margin": "15 GiB"},
            "of 16.0 GiB (T4 has 16.0 GiB), 1.0 GiB lie outside PyTorch and 15.0 GiB are kept free:", 16,
            "free memory there, or raise this limit, or set a smaller memory.margin",
        ),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            decided(outside=outside * GIB, least_margin=0, **asked)
        (problem,) = caught.value.problems
        assert problem.what == f"{what} nothing is left for the model"
        assert (problem.expected, problem.fix) == (f"more than {least}.0 GiB", fix)


def test_margins_say_their_cause():
    assert cpu_margin(returns_at_once=True) == Margin(share=0.01, num_bytes=0, reason="a prediction can be off by 1%")
    assert cpu_margin(returns_at_once=False).share == 0.15
    assert (cuda_margin().num_bytes, cuda_margin().reason.endswith("by 480.0 MiB")) == (480 * MIB, True)
    for value, pinned in (("65536", True), ("131072", True), ("33554432", False), ("", False)):
        assert returns_at_once({"MALLOC_MMAP_THRESHOLD_": value}) is (pinned and sys.platform == "linux")


T4 = replace(find_device("t4"), memory_bytes=15 * GIB)


@pytest.fixture
def card(monkeypatch):
    """A card with 15 GiB, of which a context of 100 MiB and 2 GiB of PyTorch's are taken."""
    state = SimpleNamespace(total=15 * GIB, free=13 * GIB - 100 * MIB, reserved=2 * GIB, fraction=1.0)
    for name, answer in {
        "mem_get_info": lambda: (state.free, state.total),
        "memory_reserved": lambda: state.reserved,
        "current_device": lambda: 0,
        "get_device_properties": lambda _: SimpleNamespace(total_memory=state.total),
        "set_per_process_memory_fraction": lambda share: setattr(state, "fraction", share),
        "get_per_process_memory_fraction": lambda: state.fraction,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return state


def at_hand(**settings):
    return budget_of(MemoryConfig(**settings), T4, is_at_hand=True)


def test_what_libraries_will_take_and_what_others_take_is_not_there(card):
    budget = at_hand()
    assert (budget.limit_bytes, budget.outside_bytes) == (T4.memory_bytes, T4.outside_bytes)
    assert budget.margin_bytes == round(0.01 * (T4.memory_bytes - T4.outside_bytes)) + 480 * MIB
    card.free -= 4 * GIB
    assert at_hand().outside_bytes == 4 * GIB + 100 * MIB
    assert "4.1 GiB are taken by the driver and other processes" in at_hand().limit_reason
    elsewhere = budget_of(MemoryConfig(), T4, is_at_hand=False)  # of a device that is not here nothing is asked
    assert (elsewhere.limit_bytes, elsewhere.outside_bytes) == (T4.memory_bytes, T4.outside_bytes)
    assert elsewhere.limit_reason == "NVIDIA T4 has 15.0 GiB"


def test_a_budget_is_what_pytorch_may_reserve_until_the_job_ends_or_fails(card):
    card.fraction = 0.9
    with pytest.raises(ZeroDivisionError), limit_lifted():
        with limit_lifted():
            enforce(at_hand(budget="10 GiB"), T4)
        assert card.fraction == (10 * GIB - T4.outside_bytes) / (15 * GIB)
        enforce(at_hand(budget="8 GiB"), T4)
        1 / 0  # noqa: B018
    assert card.fraction == 0.9


def test_every_job_of_a_model_lifts_the_limit(card, monkeypatch):
    def limited(*arguments, **keys):
        enforce(at_hand(budget="10 GiB"), T4)
        raise ZeroDivisionError

    monkeypatch.setattr(Model, "_open", limited)
    monkeypatch.setattr(Model, "_opened", limited)  # for a training
    monkeypatch.setattr("brim.model.RunFolder.check", lambda *arguments, **keys: None)
    model = Model({"base_model": "none", "dataset": "none", "trainer": {"type": "finetune"}})
    jobs = {"train": [], "evaluate": [], "predict": [], "generate": ["a"], "collect_activations": ["last"]}
    for method, arguments in jobs.items():
        with pytest.raises(ZeroDivisionError):
            getattr(model, method)(*arguments)
        assert card.fraction == 1.0, method


def test_a_cpu_has_what_is_there_beside_the_process():
    budget = budget_of(MemoryConfig(budget=1.0), cpu_device(), is_at_hand=True)
    assert 0 < budget.reserved_bytes < budget.limit_bytes <= cpu_device().memory_bytes
    assert budget.margin_bytes == pytest.approx(0.15 * (budget.limit_bytes - budget.outside_bytes), abs=1)


STATUS = "Name:\tpython\nVmSize:\t   4000 kB\nVmRSS:\t   1000 kB\nVmData:\t   2000 kB\n"
NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


@pytest.fixture
def limits(tmp_path, monkeypatch):
    """Reasons and bytes on a machine of some files, under limits of the process."""

    def found(files=(), *, rlimits=None, otherwise=NO_LIMIT):
        given = {"proc/self/status": STATUS, "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n"}
        for name, text in {**given, **dict(files)}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(resource, "getrlimit", lambda which: (rlimits or {}).get(which, otherwise))
        return {limit.reason: limit.num_bytes for limit in cpu_limits(tmp_path)}

    return found


def test_what_is_available_and_each_control_group_above_the_process_count_beside_what_it_has(limits):
    assert limits() == {"what is available on this machine": 9000 * KIB}
    files = {
        "proc/self/cgroup": "0::/pod/job\n",
        "sys/fs/cgroup/pod/memory.max": f"{5 * MIB}\n",
        "sys/fs/cgroup/pod/memory.current": f"{3 * MIB}\n",
        "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {MIB}\n",
        "sys/fs/cgroup/pod/job/memory.max": "max\n",
        "sys/fs/cgroup/pod/job/memory.current": f"{MIB}\n",
    }
    assert limits(files)["the container's limit (memory.max)"] == 1000 * KIB + 3 * MIB
    version_1 = {
        "proc/self/cgroup": "5:cpu:/a\n4:memory:/job\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{6 * MIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{2 * MIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
    }
    assert limits(version_1)["the container's limit (memory.limit_in_bytes)"] == 1000 * KIB + 4 * MIB


def test_limits_of_the_process_leave_what_it_has_not_used_and_no_less_than_it_has(limits):
    status = {"proc/self/status": STATUS.replace("000 kB", "024 kB")}
    for name, kib, threads_bytes in (("RLIMIT_AS", 4024, 144 * MIB), ("RLIMIT_DATA", 2024, 0)):
        found = limits(status, rlimits={getattr(resource, name): (1000 * MIB, -1)})
        assert found[name] == 1024 * KIB + 1000 * MIB - kib * KIB - threads_bytes
    assert min(limits(otherwise=(1, 1)).values()) == 1000 * KIB


def test_a_system_that_does_not_tell_bounds_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: NO_LIMIT)
    assert cpu_limits(tmp_path) == []
    assert resident_bytes(tmp_path) is None


CODE = """
import numpy as np
from brim.memory.devices.budget import keep_freed, map_large_blocks, resident_bytes

def block():
    return np.ones(2**21, dtype=np.uint8)

assert {settle}()
del (first := [block()])[:]  # by glibc's own rule blocks of this size come from the heap from now on
before = resident_bytes()
blocks = [block() for _ in range(40)]
kept = blocks[1::{step}]
del blocks
print(round((resident_bytes() - before) / 2**20))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux and glibc")
@pytest.mark.process
@pytest.mark.parametrize(
    ("settle", "step", "least_mib", "most_mib"),
    [("map_large_blocks", 2, 35, 50), ("keep_freed", 64, 75, 90)],  # without the calls 80; 4
)
def test_freed_blocks_are_given_back_or_kept(settle, step, least_mib, most_mib):
    """Of 40 blocks of 2 MiB half live on, between those that are freed, or one, which lies first."""
    code = CODE.format(settle=settle, step=step)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert least_mib <= int(run.stdout) <= most_mib
