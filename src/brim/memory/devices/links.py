"""Describe what joins the devices of several processes, and how fast it carries gradients and weights.

All processes are taken to be in one machine: what joins machines is not in any card's data sheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from brim.errors import InputError
from brim.memory.devices.device import Device, find_device

# GB/s in one direction, of all links of a card: half of what NVIDIA's data sheets give for both (V100 SXM2, A100, H100,
# H200, DGX B200). Each card is joined with all others by as much, through switches; the bridges between pairs of other
# cards are sold apart and join no more than two, so they do not count.
_NVLINK: Mapping[str, float] = {
    "v100-16gb": 150,
    "v100-32gb": 150,
    "a100-40gb": 300,
    "a100-80gb": 300,
    "h100-80gb": 450,
    "h200": 450,
    "b200": 900,
}


# 370 of 450 GB/s: NCCL's own overhead is about 20% (its author in NVIDIA/nccl-tests issue 212).
_NVLINK_SHARE = 0.8


# Generation of PCI Express by the architecture, and GB/s of 16 lanes in one direction (PCI-SIG).
_PCIE: Mapping[int, tuple[str, float]] = {7: ("3.0", 16), 8: ("4.0", 32), 9: ("5.0", 64), 10: ("5.0", 64)}


_NEWEST_PCIE = ("5.0", 64.0)


_EIGHT_LANES = {"rtx-4060ti-16gb", "rtx-5060ti-16gb"}


# 20 of 32 GB/s where A100s of two pairs meet over PCI Express (NVIDIA/nccl-tests issue 178).
_PCIE_SHARE = 0.6


# Sums of 64 MB by gloo between processes of one thread on two cores: 0.4 GB/s for two, 0.2 for four.
_GLOO_BYTES_PER_S = 0.4e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Hold what joins processes. All of them send at once, each at this speed: "bus bandwidth", as NCCL names it."""

    name: str  # "NVLink"
    bytes_per_s: float
    source: str  # for people


def link_between(device: Device) -> Link:
    """Return what joins such devices of one machine; PCI Express where it is not known to be NVLink."""
    if device.is_cpu:
        return Link(name="gloo", bytes_per_s=_GLOO_BYTES_PER_S, source="nominal")
    name = _catalogued(device)
    if name in _NVLINK:
        speed = _NVLINK_SHARE * _NVLINK[name] * 1e9
        return Link(name="NVLink", bytes_per_s=speed, source=f"{_NVLINK_SHARE:.0%} of the data sheet's")
    return link_to_host(device)


def link_to_host(device: Device) -> Link:
    """Return what joins a GPU with the host's memory: PCI Express."""
    name = _catalogued(device)
    generation, gigabytes = _PCIE.get((device.gpu_capability or (8, 0))[0], _NEWEST_PCIE)
    lanes = 8 if name in _EIGHT_LANES else 16
    return Link(
        name="PCIe",
        bytes_per_s=_PCIE_SHARE * gigabytes * lanes / 16 * 1e9,
        source=f"{_PCIE_SHARE:.0%} of {lanes} lanes of PCIe {generation}",
    )


def _catalogued(device: Device) -> str:
    """Return the device's name in the catalogue, whose cards have NVLink; "" for one that is not there."""
    if "pcie" in device.name.lower():
        return ""
    try:
        return find_device(device.name).name
    except InputError:
        return ""
