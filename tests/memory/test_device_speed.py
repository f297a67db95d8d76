"""Speeds of the catalogue's devices, and of those that it does not have."""

import pytest

from brim.memory import Device, device_speed, devices, find_device
from brim.memory.device import cpu_speed, device_named, nominal_cpu

GIB = 2**30


@pytest.mark.parametrize("device", devices(), ids=lambda device: device.name)
def test_every_device_of_the_catalogue_has_a_speed(device):
    speed = device_speed(device)
    assert speed.name == device.name
    assert speed.source == f"data sheet of the {device.title}"
    peaks = speed.flops_by_dtype
    assert peaks["float16"] > peaks["float32"] > peaks["float64"]
    assert (peaks["bfloat16"] == peaks["float16"]) == (device.capability >= (8, 0))
    assert 0.2e12 < speed.bytes_per_s < 8e12


def test_an_a100_reaches_its_share_of_the_data_sheet():
    speed = device_speed(find_device("a100-80gb"))
    assert speed.flops_per_s("matrix", "bfloat16") == pytest.approx(0.869 * 312e12)
    assert speed.flops_per_s("attention", "bfloat16") == pytest.approx(0.55 * 312e12)
    assert speed.flops_per_s("matrix", "float32") == pytest.approx(0.869 * 19.5e12)
    assert speed.bytes_per_s == pytest.approx(0.867 * 2039e9)


def test_tf32_is_faster_where_there_is_some():
    assert device_speed(find_device("a100"), tf32=True).flops_per_s("matrix", "float32") == pytest.approx(
        0.869 * 156e12
    )
    t4 = find_device("t4")
    assert device_speed(t4, tf32=True) == device_speed(t4)


def test_the_drivers_name_is_known():
    found = device_named("NVIDIA A100-SXM4-80GB", memory_bytes=79 * GIB, capability=(8, 0))
    assert device_speed(found) == device_speed(find_device("a100-80gb"))


def test_an_unknown_gpu_is_taken_for_the_one_most_like_it():
    unknown = device_named("NVIDIA Z9000", memory_bytes=45 * GIB, capability=(8, 9))
    speed = device_speed(unknown)
    assert speed.name == "l40"
    assert speed.source == "data sheet of the NVIDIA L40, the most like it that is known"


def test_a_gpu_of_which_only_the_memory_is_known_has_some_speed():
    bare = Device(name="24 GiB", title="a GPU", memory_bytes=24 * GIB, capability=None, outside_bytes=0)
    assert "most like it" in device_speed(bare).source


def test_a_cpu_by_its_cores():
    cpu = find_device("cpu")
    assert device_speed(cpu, num_cores=2) == nominal_cpu(2)
    assert nominal_cpu(2).flops_per_s("matrix", "float32") == pytest.approx(2 * 64e9)
    measured = cpu_speed(1e11, 2e10, source="measured")
    assert measured.flops_per_s("matrix", "bfloat16") == 0.5e11  # the slowest that is known
    assert not measured.is_asynchronous
