"""`brim predict --plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from brim.cli.memory_request import check_device, device_memory

if TYPE_CHECKING:
    from brim.api.model import Model
    from brim.api.predicting import Wanted


def show_plan(
    model: Model, dataset: list[str] | None, wanted: Wanted, *, device: str | None, memory: str | None, as_json: bool
) -> None:
    """As tables, or as JSON."""
    from brim.api.prediction_plan import plan_prediction
    from brim.report.screen import Screen

    memory_bytes = device_memory(memory)
    check_device(device, memory_bytes)
    with Screen() as screen:
        made = plan_prediction(
            model.config, dataset, wanted, device=device, memory_bytes=memory_bytes, notes=model.notes, say=screen
        )
    if as_json:
        print(json.dumps(made.as_dict()))
        return
    from rich.console import Console

    from brim.report.generation_table import generation_table

    Console(highlight=False).print(generation_table(made, title=Path(model.config.base_model).name))
