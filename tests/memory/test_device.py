"""The catalogue of GPUs, by name and by memory, and the speeds of its devices."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from brim.errors import InputError
from brim.memory.devices import device_at_hand, device_of, device_speed, devices, find_device, link_between
from brim.memory.devices.device import cpu_speed, cublas_workspace_bytes, nominal_cpu

MIB, GIB = 2**20, 2**30
NOMINAL_GIB = {"rtx-2080ti": 11, "rtx-3060": 12, "rtx-3070": 8, "rtx-3080": 10, "rtx-3090": 24, "rtx-4070": 12,
               "rtx-4070ti-super": 16, "rtx-4080": 16, "rtx-4090": 24, "rtx-5080": 16, "rtx-5090": 32,
               "rtx-a4000": 16, "rtx-a5000": 24, "rtx-a6000": 48, "rtx-6000-ada": 48, "rtx-pro-6000": 96,
               "t4": 16, "a10": 24, "a10g": 24, "a30": 24, "a40": 48, "l4": 24, "l40": 48, "l40s": 48,
               "h100-pcie": 80, "h100-nvl": 94, "h200": 141, "b200": 180}  # fmt: skip


def test_cards_are_joined_by_nvlink_where_all_of_a_machine_are_and_by_pcie_elsewhere():
    named = {name: link_between(find_device(name)) for name in ("a100-80gb", "h100-pcie", "t4", "rtx-4060ti-16gb")}
    assert {name: (link.name, link.bytes_per_s / 1e9) for name, link in named.items()} == {
        "a100-80gb": ("NVLink", pytest.approx(240)),
        "h100-pcie": ("PCIe", pytest.approx(38.4)),
        "t4": ("PCIe", pytest.approx(9.6)),
        "rtx-4060ti-16gb": ("PCIe", pytest.approx(9.6)),  # eight lanes
    }
    at_hand = replace(find_device("a100-80gb"), name="NVIDIA A100 80GB PCIe")
    unknown, cpu = device_of(24 * GIB), find_device("cpu")
    assert [link_between(each).name for each in (at_hand, unknown, cpu)] == ["PCIe", "PCIe", "gloo"]
    assert link_between(unknown).bytes_per_s == pytest.approx(19.2e9)
    assert all(link_between(each).bytes_per_s >= 9e9 for each in devices())


def test_a_card_is_found_by_the_names_it_goes_by():
    for names, found in (
        (["a100-80gb", "A100", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"], "a100-80gb"),
        (["A100-PCIE-40GB"], "a100-40gb"),
        (["V100"], "v100-16gb"),
        (["4090", "rtx4090", "NVIDIA GeForce RTX 4090"], "rtx-4090"),
        (["4060 Ti 16GB"], "rtx-4060ti-16gb"),
        (["RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation"], "rtx-6000-ada"),
        (["NVIDIA H100 80GB HBM3"], "h100-80gb"),
        (["NVIDIA H100 PCIe"], "h100-pcie"),
        (["NVIDIA GH200 480GB"], "gh200-96gb"),
    ):
        assert {find_device(name).name for name in names} == {found}


def test_every_card_of_the_catalogue_is_found_and_has_a_little_less_than_its_nominal_memory_and_a_speed():
    assert len({device.name for device in devices()}) == len(devices()) == 36
    for device in devices():
        assert find_device(device.name) == find_device(device.title) == device
        nominal_gib = NOMINAL_GIB.get(device.name) or int(device.name.split("-")[-1].removesuffix("gb"))
        assert 0.905 * nominal_gib * GIB < device.memory_bytes < nominal_gib * GIB, device.name
        assert 0.1 * GIB < device.outside_bytes < 1.4 * GIB, device.name
        speed = device_speed(device)
        assert (speed.name, speed.source) == (device.name, f"data sheet of the {device.title}")
        peaks = speed.flops_by_dtype
        assert peaks["float16"] > peaks["float32"] > peaks["float64"]
        assert (peaks["bfloat16"] == peaks["float16"]) == (device.capability >= (8, 0))
        assert 0.2e12 < speed.bytes_per_s < 8e12


def test_an_a100_has_less_than_its_nominal_memory_and_reaches_its_share_of_the_data_sheet():
    device = find_device("a100-80gb")
    assert (device.title, device.memory_bytes, device.capability) == ("NVIDIA A100 80GB", 81_039 * MIB, (8, 0))
    assert device.outside_bytes == round(0.53 * GIB)
    assert device.budget_bytes == 81_039 * MIB - round(0.53 * GIB)
    speed, faster = device_speed(device), device_speed(device, tf32=True)
    assert speed.flops_per_s("matrix", "bfloat16") == pytest.approx(0.869 * 312e12)
    assert speed.flops_per_s("attention", "bfloat16") == pytest.approx(0.55 * 312e12)
    assert speed.flops_per_s("matrix", "float32") == pytest.approx(0.869 * 19.5e12)
    assert faster.flops_per_s("matrix", "float32") == pytest.approx(0.869 * 156e12)
    assert speed.bytes_per_s == pytest.approx(0.867 * 2039e9)
    t4 = find_device("t4")  # which has no TF32
    assert device_speed(t4, tf32=True) == device_speed(t4)
    # A communicator of NCCL takes memory outside PyTorch.
    for world_size, nccl_bytes in ((1, 0), (2, 544 * MIB), (4, 688 * MIB)):
        among = device.among(world_size)
        assert among.outside_bytes - device.outside_bytes == device.budget_bytes - among.budget_bytes == nccl_bytes


def test_a_typo_names_the_nearest_card_and_a_name_that_is_like_none_asks_for_the_memory():
    nearest = {"a100-80bg": "write a100-80gb", "4900": "write rtx-4090", "L40X": "write l40"}
    unlike = dict.fromkeys(("tpu", "rtx", ""), "give its memory instead, such as --memory 14GiB")
    for name, fix in {**nearest, **unlike}.items():
        with pytest.raises(InputError) as caught:
            find_device(name)
        (problem,) = caught.value.problems
        assert problem.what.startswith("unknown device")
        assert (name in problem.what, problem.fix) == (True, fix)
        assert problem.expected.startswith("cpu, or one of t4, v100-16gb, v100-32gb, a10,")


def test_a_card_of_which_only_the_memory_is_known_and_one_that_is_not_in_the_catalogue():
    device = device_of(14 * GIB)
    assert (device.name, device.title, device.capability) == ("14.0 GiB", "a GPU with 14.0 GiB", None)
    assert device.budget_bytes == 14 * GIB - round(0.65 * GIB)
    assert "most like it" in device_speed(device).source
    speed = device_speed(replace(find_device("l4"), name="NVIDIA Z9000", memory_bytes=45 * GIB))
    assert speed.name == "l40"
    assert speed.source == "data sheet of the NVIDIA L40, the known GPU that is most like it"


def test_a_local_card_has_what_its_driver_says_and_what_is_not_of_cuda_counts_as_a_cpu(monkeypatch):
    given = SimpleNamespace(name="NVIDIA A100-SXM4-80GB", total_memory=85_029_158_912, major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: given)
    found, known = device_at_hand(torch.device("cuda", 0)), find_device("a100-80gb")
    assert (found.name, found.title, found.memory_bytes) == (given.name, given.name, given.total_memory)
    assert (found.capability, found.outside_bytes) == (known.capability, known.outside_bytes)
    assert device_speed(found) == device_speed(known)
    assert device_at_hand(torch.device("mps")).is_cpu


def test_the_workspace_of_cublas_by_compute_capability():
    assert {cublas_workspace_bytes(each) for each in (None, (7, 5), (8, 9), (11, 0))} == {8_519_680}
    assert {cublas_workspace_bytes(each) for each in ((9, 0), (10, 0), (12, 0))} == {32 * MIB}


def test_the_cpu_at_hand_has_all_of_the_machines_memory_and_a_speed_by_its_cores():
    device = find_device("CPU")
    assert device.is_cpu
    assert device.memory_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 6_000_000 < device.outside_bytes < device.memory_bytes
    assert device_speed(device, num_cores=2) == nominal_cpu(2)
    assert nominal_cpu(2).flops_per_s("matrix", "float32") == pytest.approx(2 * 64e9)
    measured = cpu_speed(1e11, 2e10, source="measured")
    assert measured.flops_per_s("matrix", "bfloat16") == 0.5e11  # the slowest that is known
    assert not measured.is_asynchronous
