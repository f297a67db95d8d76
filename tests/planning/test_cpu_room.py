"""What bounds a process on a CPU, read from files as Linux writes them."""

import resource
import subprocess
import sys

import pytest

from brim.memory import returns_at_once
from brim.memory.budget import cpu_limits, resident_bytes

KIB, MIB = 2**10, 2**20
STATUS = "Name:\tpython\nVmSize:\t   4000 kB\nVmRSS:\t   1000 kB\nVmData:\t   2000 kB\n"


def machine(root, files):
    given = {"proc/self/status": STATUS, "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n", **files}
    for name, text in given.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def limits(root):
    return {limit.reason: limit.num_bytes for limit in cpu_limits(root)}


@pytest.fixture(autouse=True)
def no_limits_of_the_process(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_what_is_available_is_added_to_what_the_process_has(tmp_path):
    assert limits(machine(tmp_path, {})) == {"what is available on this machine": 9000 * KIB}


def test_each_control_group_above_the_process_counts(tmp_path):
    files = {
        "proc/self/cgroup": "0::/pod/job\n",
        "sys/fs/cgroup/pod/memory.max": f"{5 * MIB}\n",
        "sys/fs/cgroup/pod/memory.current": f"{3 * MIB}\n",
        "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {MIB}\n",
        "sys/fs/cgroup/pod/job/memory.max": "max\n",
        "sys/fs/cgroup/pod/job/memory.current": f"{MIB}\n",
    }
    found = limits(machine(tmp_path, files))
    assert found["the container's limit (memory.max)"] == 1000 * KIB + 3 * MIB


def test_version_1_of_control_groups_is_read(tmp_path):
    files = {
        "proc/self/cgroup": "5:cpu:/a\n4:memory:/job\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{6 * MIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{2 * MIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
    }
    found = limits(machine(tmp_path, files))
    assert found["the container's limit (memory.limit_in_bytes)"] == 1000 * KIB + 4 * MIB


@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_limits_of_the_process_leave_what_it_has_not_used(tmp_path, monkeypatch, name):
    root = machine(tmp_path, {"proc/self/status": STATUS.replace("000 kB", "024 kB")})
    number = getattr(resource, name)
    no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1000 * MIB, -1) if which == number else no_limit)
    kib = {"RLIMIT_AS": 4024, "RLIMIT_DATA": 2024}[name]
    threads = {"RLIMIT_AS": 144 * MIB, "RLIMIT_DATA": 0}[name]
    assert limits(root)[name] == 1024 * KIB + 1000 * MIB - kib * KIB - threads


def test_a_process_over_its_limit_has_no_more_than_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1, 1))
    assert min(cpu_limits(machine(tmp_path, {})), key=lambda limit: limit.num_bytes).num_bytes == 1000 * KIB


def test_a_system_that_does_not_tell_bounds_nothing(tmp_path):
    assert cpu_limits(tmp_path) == []
    assert resident_bytes(tmp_path) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_real_limit_on_the_address_space_is_seen():
    code = (
        "import resource; from brim.memory.budget import cpu_limits; from brim.memory.budget import resident_bytes;"
        "resource.setrlimit(resource.RLIMIT_AS, (2**30, -1));"
        "print(min((each.num_bytes, each.reason) for each in cpu_limits())[1], resident_bytes() > 0)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["RLIMIT_AS", "True"]


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
@pytest.mark.parametrize(("value", "pinned"), [("65536", True), ("131072", True), ("33554432", False), ("", False)])
def test_glibc_is_told_to_keep_nothing(value, pinned):
    assert returns_at_once({"MALLOC_MMAP_THRESHOLD_": value}) is pinned
