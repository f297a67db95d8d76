"""docs/batch-schedules.md: its configurations load, its function does what it says, its figures are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from brim.batching import NUM_GROUPS, NoiseMeasurement, NoiseScale, doubling, equal_steps, linear
from brim.cli.app import app
from brim.config import WAYS, DeviceFacts, load_config, parse_batch_steps, resolve
from brim.config.schema import FinetuneTrainer
from brim.train.increase_function import expand, load_increase_function
from brim.train.job import MEASURED_EVERY
from brim.units import parse_duration

PAGE = (Path(__file__).parents[2] / "docs" / "batch-schedules.md").read_text(encoding="utf-8")
SAMPLES = re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
PROSE = " ".join(PAGE.split())
SHAPES = {"doubling": doubling, "equal_steps": equal_steps, "linear": linear}


def trainer_of(sample):
    loaded = load_config({"base_model": "base", **YAML(typ="safe").load(sample)})
    assert [note for note in loaded.notes if "epochs is not set" not in note] == []
    config = resolve(loaded.config, DeviceFacts(kind="cpu", bf16=False)).config
    assert isinstance(config.trainer, FinetuneTrainer)
    return config.trainer


@pytest.mark.parametrize("sample", SAMPLES)
def test_the_configurations_load_without_a_note(sample):
    assert trainer_of(sample).type == "finetune"


def test_each_way_of_moving_the_batch_is_named_and_shown():
    (table,) = re.findall(r"^\| you write \|.*?\n\n", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE) == list(WAYS)
    shown = [trainer_of(sample) for sample in SAMPLES]
    assert all(any(getattr(trainer, way) is not None for trainer in shown) for way in WAYS)


def test_a_ramp_begins_with_a_quarter():
    from brim.train.schedule import first_size

    final, first = map(int, re.findall(r"effective_batch_size: (\d+) .*\n.*from a quarter of it, (\d+)", PAGE)[0])
    assert first_size(final) == first


def test_the_durations_can_be_read():
    table = PAGE.split("## Lengths")[1].split("\n\n")[2]
    units = {parse_duration(text).unit for text in re.findall(r"`([\d.e]+[a-z]+)`", table)}
    assert units == {"dur", "ep", "sp", "tok", "ba"}


def test_the_shapes_are_those_of_the_ramps():
    rows = re.findall(r"^\| `(\w+)`(?:, `increment: (\d+)`)? \| (\d[\d, a-z]+) \|", PAGE, flags=re.MULTILINE)
    assert [shape for shape, *_ in rows] == list(SHAPES)
    for shape, increment, said in rows:
        options = {"increment": int(increment)} if increment else {}
        phases = SHAPES[shape](initial=6, final=20, length_samples=1200, **options).phases
        assert ", ".join(f"{phase.size} from {phase.first_sample:,}" for phase in phases) == said


def test_megatrons_table_reads_as_it_says():
    (ours,) = re.findall(r"`\"(0tok.*?)\"` here", PROSE)
    (theirs,) = re.findall(r"step-batch-size-schedule \"(.*?)\"`", PROSE)
    assert [(int(start.amount), size) for start, size in parse_batch_steps(ours)] == [
        (int(start.replace("B", "000000000")), int(size)) for start, size in (p.split(":") for p in theirs.split())
    ]


def test_the_function_grows_the_batch_after_the_second_and_the_fourth_epoch():
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    names = {}
    exec(compile(code, "batch-schedules.md", "exec"), names)  # noqa: S102
    increase = load_increase_function(names["increase"])
    trainer = next(trainer_of(sample) for sample in SAMPLES if "batch_increase_function" in sample)
    schedule = expand(increase, first_size=16, num_rows=100, num_samples=100 * trainer.epochs).schedule
    assert [(phase.first_sample, phase.size) for phase in schedule.phases] == [(0, 16), (200, 32), (400, 64)]


def test_the_figures_of_the_noise_scale():
    assert f"up to {['seven', 'eight', 'nine'][NUM_GROUPS - 7]} groups" in PROSE
    noise, measured = NoiseScale(), 0
    while noise.rows is None:
        noise, measured = noise.after(NoiseMeasurement(squared_gradient=1.0, gradient_variance=4.0)), measured + 1
    assert f"null until {['four', 'five', 'six'][measured - 4]} steps" in PROSE
    assert f"every {['ninth', 'tenth'][MEASURED_EVERY - 9]} update" in PROSE


def test_the_figures_of_the_rates():
    from brim.train.optimizer import batch_factor

    assert batch_factor("sqrt", size=16, final_size=64) == 0.5
    assert f"0.999 at 64 rows is {0.999 ** (16 / 64):.5f} at 16" in PROSE


def test_the_commands_exist_with_these_options():
    runner = CliRunner()
    for verb in set(re.findall(r"^brim ([a-z-]+)", PAGE, flags=re.MULTILINE)):
        assert runner.invoke(app, [verb, "--help"]).exit_code == 0, verb
    assert "--seeds" in runner.invoke(app, ["compare", "--help"]).output
    assert "--resume" in runner.invoke(app, ["train", "--help"]).output


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (Path(__file__).parents[2] / "docs" / target).exists(), target
    cited = set(map(int, re.findall(r"\[(\d)\]", PAGE)))
    listed = [int(number) for number in re.findall(r"^(\d)\. ", PAGE.split("## Sources")[1], flags=re.MULTILINE)]
    assert sorted(cited) == listed == list(range(1, len(listed) + 1))
