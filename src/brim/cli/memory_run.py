"""`brim memory` at work: predict, compare or measure, then show it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from brim.cli.memory_request import MemoryRequest
from brim.cli.say import say
from brim.config import Config, LoadedConfig
from brim.models.folder import locate
from brim.models.needs import require_trainable
from brim.models.quantization import with_stored_quantization

if TYPE_CHECKING:
    from brim.memory.napkin import Napkin
    from brim.memory.prediction import MemoryPrediction


def run(request: MemoryRequest, loaded: LoadedConfig) -> None:
    """Do what was asked for and print it. Results go to stdout, notes to stderr."""
    config = loaded.config
    for note in loaded.notes:
        say(note)
    # Before torch is imported: what is wrong with the base model's folder is told at once.
    folder = locate(
        config.base_model, initialize=config.initialize, trust_remote_code=config.trust_remote_code, config_only=True
    )
    if request.compare:
        _compare(request, config)
        return
    require_trainable(with_stored_quantization(config, folder), folder)
    if request.measure:
        _measure(request, config)
    else:
        _predict(request, config)


def _predict(request: MemoryRequest, config: Config) -> None:
    from brim.api.memory import predict_memory
    from brim.report.memory_table import memory_table

    prediction = predict_memory(
        config,
        batch_size=request.batch_size,
        sequence_length=request.sequence_length,
        phase=request.phase,
        device=request.device,
        memory_bytes=request.memory_bytes,
        world_size=request.world_size,
        offload=request.offload,
    )
    napkin = _napkin(request, config, prediction)
    if request.as_json:
        print(json.dumps({**prediction.as_dict(), **_explained(napkin)}))
    else:
        console = _console()
        console.print(memory_table(prediction, title=_title(config)))
        _print_napkin(console, napkin, prediction)
    if request.plot is not None:
        from brim.report.memory_plot import memory_plot
        from brim.report.memory_tables import prediction_tables

        _save(request.plot, memory_plot(prediction, title=_title(config)), config, prediction_tables(prediction))


def _compare(request: MemoryRequest, config: Config) -> None:
    from brim.api.memory_compare import Compared, Failed, compare_memory

    found: list[Compared] = []
    failed: list[Failed] = []
    for each in compare_memory(
        config,
        batch_size=request.batch_size,
        sequence_length=request.sequence_length,
        device=request.device,
        memory_bytes=request.memory_bytes,
        world_size=request.world_size,
        offload=request.offload,
    ):
        if isinstance(each, Compared):
            say(f"{each.variant.name}: {each.prediction.reason}")
            found.append(each)
        else:
            say(f"{each.variant.name}: cannot be")
            failed.append(each)
    if request.as_json:
        print(json.dumps([*(each.as_dict() for each in found), *(each.as_dict() for each in failed)]))
    else:
        from brim.cli.memory_compared import print_compared

        print_compared(_console(), found, failed, title=_title(config))
    if request.plot is not None:
        from brim.cli.memory_compared import compared_picture, compared_tables

        _save(request.plot, compared_picture(found, title=_title(config)), config, compared_tables(found))


def _measure(request: MemoryRequest, config: Config) -> None:
    from brim.api.memory_measure import measure_memory
    from brim.cli.memory_measured import measured_picture, measured_tables, print_measured

    snapshot = (request.plot or Path("memory")).with_suffix(".pickle")
    beside = measure_memory(
        config,
        batch_size=request.batch_size,
        sequence_length=request.sequence_length,
        phase=request.phase,
        steps=request.steps,
        layers=request.layers,
        snapshot=snapshot,
    )
    napkin = _napkin(request, config, beside.main)
    if request.as_json:
        print(json.dumps({**beside.as_dict(), **_explained(napkin)}))
    else:
        console = _console()
        print_measured(console, beside, title=_title(config))
        _print_napkin(console, napkin, beside.main)
    if request.plot is not None:
        _save(request.plot, measured_picture(beside, title=_title(config)), config, measured_tables(beside))


def _napkin(request: MemoryRequest, config: Config, prediction: MemoryPrediction) -> Napkin | None:
    if not request.explain:
        return None
    from brim.api.memory_explain import explain_memory

    return explain_memory(config, prediction)


def _explained(napkin: Napkin | None) -> dict[str, Any]:
    return {} if napkin is None else {"napkin": napkin.as_dict()}


def _print_napkin(console: Console, napkin: Napkin | None, prediction: MemoryPrediction) -> None:
    if napkin is not None:
        from brim.report.napkin_table import napkin_table

        console.print()
        console.print(napkin_table(napkin, prediction))


def _save(path: Path, figure: Any, config: Config, tables: Any) -> None:
    from brim.report.picture import save_picture

    save_picture(figure, path, title=f"{_title(config)}: memory", tables=tables)
    say(f"picture: {path}")


def _title(config: Config) -> str:
    return Path(config.base_model).name


def _console() -> Console:
    return Console(highlight=False, width=None)
