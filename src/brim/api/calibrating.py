"""What runs have measured of their memory, for the plans of later ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from brim.api.plan_request import PlanRequest
from brim.batching.costs import Costs
from brim.batching.probe import Probe
from brim.planning.cache import cache_folder
from brim.planning.calibration import Calibrations, Correction, Peak, at_once, of_run
from brim.planning.shape_cache import versions
from brim.train.peaks import Peak as StepPeak

_SECTIONS = {"precision", "adapter", "quantization", "initialize", "model_parameters"}
_TENTHS = 10  # predictions take all tokens for supervised: runs are compared where about as many are


def calibrations_of(request: PlanRequest) -> Calibrations:
    """Of this model, adapter and optimizer on this device."""
    supervised = int(request.rows.num_supervised.sum()) / max(int(request.rows.lengths.sum()), 1)
    facts = {
        "device": request.device.title,
        "base": request.folder.config,
        "settings": request.config.model_dump(mode="json", include=_SECTIONS),
        "optimizer": request.trainer.optimizer.model_dump(mode="json"),
        "supervised": round(_TENTHS * supervised),
        "versions": versions(),
    }
    return Calibrations(cache_folder(), facts)


def corrected(costs: Costs, probe: Probe, predicted_bytes: int) -> Costs:
    """The costs with what a probe has shown, where it took more than predicted."""
    if probe.peak_bytes is None:
        return costs
    peak = Peak(predicted_bytes=uncorrected(costs, predicted_bytes), measured_bytes=probe.peak_bytes)
    found = at_once(Correction(scale=costs.scale), peak, static_bytes=costs.static_bytes)
    return replace(costs, scale=found.scale)


def remember(
    request: PlanRequest,
    costs: Costs,
    steps: Iterable[StepPeak],
    probes: Sequence[tuple[int, Probe]],
    device: torch.device,
) -> None:
    """Keep what a run has measured. probes: with the bytes that were predicted of each before any correction."""
    seen = [(uncorrected(costs, step.predicted_bytes), step.measured_bytes) for step in steps]
    seen += [(predicted_bytes, probe.peak_bytes) for predicted_bytes, probe in probes]
    peaks = [
        Peak(predicted_bytes=predicted, measured_bytes=measured) for predicted, measured in seen if measured is not None
    ]
    found = of_run(peaks, static_bytes=costs.static_bytes, outside_bytes=_outside_bytes(device))
    if found is not None:
        calibrations_of(request).add(found)


def uncorrected(costs: Costs, predicted_bytes: int) -> int:
    """What these costs predicted, as it would be without their correction."""
    return costs.static_bytes + round((predicted_bytes - costs.static_bytes) / costs.scale)


def _outside_bytes(device: torch.device) -> int | None:
    """What of a GPU is neither free nor PyTorch's: the context, libraries, other processes."""
    if device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return int(total_bytes - free_bytes - torch.cuda.memory_reserved(device))
