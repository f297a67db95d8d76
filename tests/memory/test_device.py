"""The catalogue of GPUs, by name and by memory."""

import os

import pytest

from brim.errors import InputError
from brim.memory import devices, find_device
from brim.memory.device import budget_bytes, cublas_workspace_bytes, device_named, device_of, one_of_several

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("a100-80gb", "a100-80gb"),
        ("A100", "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("A100-PCIE-40GB", "a100-40gb"),
        ("t4", "t4"),
        ("Tesla T4", "t4"),
        ("V100", "v100-16gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("4060 Ti 16GB", "rtx-4060ti-16gb"),
        ("a6000", "rtx-a6000"),
        ("RTX 6000 Ada", "rtx-6000-ada"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("B200", "b200"),
    ],
)
def test_a_card_is_found_by_the_names_it_goes_by(name, found):
    assert find_device(name).name == found


def test_every_name_and_title_of_the_catalogue_finds_its_own_card():
    assert len({device.name for device in devices()}) == len(devices()) == 36
    for device in devices():
        assert find_device(device.name) == find_device(device.title) == device


def test_an_a100_has_less_than_its_nominal_memory_and_its_context_takes_of_that():
    device = find_device("a100-80gb")
    assert device.title == "NVIDIA A100 80GB"
    assert device.memory_bytes == 81_039 * MIB
    assert device.outside_bytes == round(0.53 * GIB)
    assert budget_bytes(device) == 81_039 * MIB - round(0.53 * GIB)
    assert device.capability == (8, 0)
    assert device.cublas_workspace_bytes == 8_519_680


@pytest.mark.parametrize("device", devices(), ids=lambda device: device.name)
def test_a_card_has_a_little_less_than_its_nominal_memory(device):
    nominal_gib = {"rtx-2080ti": 11, "rtx-3060": 12, "rtx-3070": 8, "rtx-3080": 10, "rtx-3090": 24, "rtx-4070": 12,
                   "rtx-4070ti-super": 16, "rtx-4080": 16, "rtx-4090": 24, "rtx-5080": 16, "rtx-5090": 32,
                   "rtx-a4000": 16, "rtx-a5000": 24, "rtx-a6000": 48, "rtx-6000-ada": 48, "rtx-pro-6000": 96,
                   "t4": 16, "a10": 24, "a10g": 24, "a30": 24, "a40": 48, "l4": 24, "l40": 48, "l40s": 48,
                   "h100-pcie": 80, "h100-nvl": 94, "h200": 141, "b200": 180}.get(device.name)  # fmt: skip
    nominal_gib = nominal_gib or int(device.name.split("-")[-1].removesuffix("gb"))
    assert 0.905 * nominal_gib * GIB < device.memory_bytes < nominal_gib * GIB
    assert 0.1 * GIB < device.outside_bytes < 1.4 * GIB


@pytest.mark.parametrize(
    ("name", "meant"),
    [("a100-80bg", "a100-80gb"), ("h10", "h100-80gb"), ("4900", "rtx-4090"), ("RTX 3600", "rtx-3060"), ("L40X", "l40")],
)
def test_a_typo_names_the_nearest_card(name, meant):
    with pytest.raises(InputError) as caught:
        find_device(name)
    (problem,) = caught.value.problems
    assert problem.what == f"unknown device '{name}'"
    assert problem.fix == f"write {meant}"
    assert problem.expected.startswith("cpu, or one of t4, v100-16gb, v100-32gb, a10,")


@pytest.mark.parametrize("name", ["tpu", "rtx", "", "mi300x"])
def test_a_name_that_is_like_none_asks_for_the_memory(name):
    with pytest.raises(InputError) as caught:
        find_device(name)
    assert caught.value.problems[0].fix == "give its memory instead, such as --memory 14GiB"


def test_a_card_of_which_only_the_memory_is_known():
    device = device_of(14 * GIB)
    assert (device.name, device.title, device.capability) == ("14.0 GiB", "a GPU with 14.0 GiB", None)
    assert device.cublas_workspace_bytes == 8_519_680
    assert budget_bytes(device) == 14 * GIB - round(0.65 * GIB)


def test_a_card_at_hand_keeps_what_its_driver_says():
    device = device_named("NVIDIA H100 80GB HBM3", memory_bytes=85_029_158_912, capability=(9, 0))
    assert device.memory_bytes == 85_029_158_912
    assert device.outside_bytes == find_device("h100").outside_bytes


@pytest.mark.parametrize(
    ("capability", "num_bytes"),
    [
        (None, 8_519_680),
        ((7, 5), 8_519_680),
        ((8, 9), 8_519_680),
        ((9, 0), 32 * MIB),
        ((10, 0), 32 * MIB),
        ((11, 0), 8_519_680),
        ((12, 0), 32 * MIB),
    ],
)
def test_the_workspace_of_cublas_by_compute_capability(capability, num_bytes):
    assert cublas_workspace_bytes(capability) == num_bytes


@pytest.mark.parametrize(
    ("config", "num_bytes"),
    [(":4096:8", 32 * MIB), (":4096:2:16:8", 8_519_680), (":16:8", 128 * 1024), ("nonsense", 8_519_680)],
)
def test_the_workspace_of_cublas_can_be_set(config, num_bytes):
    assert cublas_workspace_bytes((8, 0), {"CUBLAS_WORKSPACE_CONFIG": config}) == num_bytes


@pytest.mark.parametrize(("world_size", "nccl_bytes"), [(1, 0), (2, 544 * MIB), (4, 688 * MIB)])
def test_nccl_takes_memory_outside_pytorch(world_size, nccl_bytes):
    alone = find_device("a100-80gb")
    among = one_of_several(alone, world_size)
    assert among.outside_bytes - alone.outside_bytes == nccl_bytes
    assert budget_bytes(alone) - budget_bytes(among) == nccl_bytes


def test_the_cpu_at_hand_is_a_device_with_all_of_the_machines_memory():
    device = find_device("CPU")
    assert device.is_cpu
    assert device.memory_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 6_000_000 < device.outside_bytes < device.memory_bytes
