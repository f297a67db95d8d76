"""A measurement: of fewer layers, in processes of its own, and in this one on a tiny model."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaModel

from brim.config import load_config
from brim.data.tokens import rows_of_step
from brim.errors import BrimError
from brim.models.folders import locate
from brim.models.loss import NextToken
from brim.workflows.measure import PhasePeak, run as process
from brim.workflows.measure.messages import Report, Request, as_json, of_json, rise_per_step
from brim.workflows.measure.run import (
    Depths,
    depths,
    extrapolated,
    leak_of,
    measure,
    measured_alone,
    num_layers,
    with_layers,
)
from brim.workflows.measure.work import ResidentMeter, in_order_of_steps, load_bench, random_rows

CPU = torch.device("cpu")
linux = pytest.mark.skipif(sys.platform != "linux", reason="the resident set's peak is read from /proc")
TRAINS = {"trainer": {"type": "finetune", "learning_rate": 0.001}}
NO_TRAINING = {"trainer": {"type": "none"}}
SLIDING, FULL = "sliding_attention", "full_attention"


def peak(total_bytes, allocated_bytes=None, *, phase="train", step=1, baseline_bytes=7):
    sizes = {"allocated_bytes": allocated_bytes, "total_bytes": total_bytes, "end_bytes": total_bytes // 2}
    return PhasePeak(phase=phase, step=step, baseline_bytes=baseline_bytes, **sizes)


# Fewer layers, and from two depths to the whole model


def test_one_and_two_layers_stand_for_many_and_periods_and_layers_at_the_front_for_themselves():
    kinds = [SLIDING] * 5 + [FULL]
    for config, layers, expected in (
        ({"num_hidden_layers": 32}, 1, Depths(1, 2, 32)),
        ({"n_layer": 32}, 3, Depths(3, 6, 32)),
        ({"num_hidden_layers": 26, "layer_types": (kinds * 5)[:26]}, 1, Depths(6, 12, 26)),
        ({"num_hidden_layers": 27, "first_k_dense_replace": 1}, 1, Depths(2, 3, 27)),
        ({"num_hidden_layers": 2}, 1, None),  # nothing to gain
        ({"hidden_size": 8}, 1, None),
    ):
        assert depths(config, layers) == expected, config


def test_lists_by_layer_are_cut_and_others_are_not():
    sizes = {"num_hidden_layers": 3, "max_window_layers": 3}
    config = {**sizes, "layer_types": [SLIDING, FULL, FULL], "eos_token_id": [1, 2, 3]}
    assert with_layers(config, 2) == {**config, "num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}
    nested = {"model_type": "x", "num_hidden_layers": 9, "text_config": {"num_hidden_layers": 4}}
    assert num_layers(nested) == 4  # the decoder is meant
    assert with_layers(nested, 1) == {**nested, "text_config": {"num_hidden_layers": 1}}


def test_the_peak_lies_on_the_line_through_both():
    found = extrapolated(peak(1_000, 100), peak(1_300, 160), Depths(1, 2, 32))
    assert found.total_bytes == 1_000 + 31 * 300
    assert found.allocated_bytes == 100 + 31 * 60
    assert found.end_bytes == 500 + 31 * 150
    assert found.reserved_bytes is None
    assert (found.phase, found.step, found.baseline_bytes) == ("train", 1, 7)
    # Two periods beyond the front are one step of the line.
    assert extrapolated(peak(1_000), peak(1_600), Depths(7, 13, 27)).total_bytes == 1_000 + 100 * 20


# Random rows in the order of the loop


def test_each_step_of_the_loop_gets_its_lengths_and_rows_are_all_learned_from_or_all_prompt():
    lengths = in_order_of_steps([(5, 6), (7, 8), (9, 9)], num_rows=10, seed=42)
    seen = []
    for consumed in range(0, 10, 2):
        _, positions = rows_of_step(num_rows=10, seed=42, consumed_samples=consumed, size=2)
        seen.append(tuple(lengths[int(position)] for position in positions))
    assert seen == [(5, 6), (7, 8), (9, 9), (9, 9), (9, 9)]  # later steps get the last
    learned = random_rows([4, 9], vocabulary=7, supervised=True, seed=0)
    assert learned.lengths.tolist() == [4, 9]
    assert learned.num_supervised.tolist() == [3, 8]
    assert max(int(row.input_ids.max()) for row in learned) < 7
    assert random_rows([4, 9], vocabulary=7, supervised=False, seed=0).num_prompt_tokens.tolist() == [4, 9]


# In processes of its own


@pytest.fixture
def asked(tiny_base):
    """Makes a request. settings: brim's configuration. changes: of the request."""

    def make(settings=None, **changes):
        given = {"trainer": {"type": "finetune", "learning_rate": 0.001}, "generation": {"max_new_tokens": 3}}
        request = Request(
            config=load_config({"base_model": str(tiny_base), **given, **(settings or {})}).config,
            folder=locate(str(tiny_base)),
            batch_size=2,
            sequence_length=16,
            step_lengths=((16, 16),),
            num_steps=2,
            phases=("train",),
            device="cpu",
        )
        return replace(request, **changes)

    return make


def test_a_request_comes_back_equal_from_json_with_the_keys_that_were_set(asked):
    request = asked({"adapter": {"type": "lora", "target_modules": ["q_proj"]}}, step_lengths=((3, 4), (5, 6)))
    back = of_json(Request, json.loads(json.dumps(as_json(request))))
    assert back == request
    assert back.config.trainer.model_fields_set == request.config.trainer.model_fields_set
    assert isinstance(back.folder.path, Path)


@pytest.fixture
def parts(monkeypatch):
    """What would have been measured; each process reports 1,000 bytes a layer and 10 a phase."""
    asked = []

    def measured(request, environment=process.RETURNED_AT_ONCE):
        asked.append(request)
        total_bytes = 1000 * request.folder.config["num_hidden_layers"] + 10
        steps = [("train", n + 1) for n in range(request.num_steps)] if "train" in request.phases else []
        others = [(phase, None) for phase in request.phases if phase in ("evaluate", "generate")]
        phases = [("load", None), *steps, *others]
        peaks = [peak(total_bytes, phase=phase, step=step, baseline_bytes=5) for phase, step in phases]
        peaks = tuple(replace(each, end_bytes=(each.step or 0) * 2**21) for each in peaks)
        return Report(device="cpu", kind="cpu", baseline_bytes=5, peaks=peaks, notes=("said by each",))

    monkeypatch.setattr(process, "measured_alone", measured)
    return asked


@pytest.fixture
def measured(tiny_base):
    """Measures the tiny model. settings: brim's configuration. changes: of config.json."""

    def run(settings=TRAINS, *, changes=None, **keys):
        folder = locate(str(tiny_base))
        folder = replace(folder, config={**folder.config, **(changes or {})})
        config = load_config({"base_model": str(tiny_base), **settings}).config
        return measure(config, folder, **{"batch_size": 1, "sequence_length": 8, **keys})

    return run


def test_training_and_running_are_measured_apart_and_loading_told_once(measured, parts):
    found = measured(batch_size=2, sequence_length=16, steps=2)
    assert [(request.phases, request.trainable) for request in parts] == [
        (("load", "train"), True),
        (("evaluate", "generate"), True),
    ]
    phases = [(each.phase, each.step) for each in found.peaks]
    assert phases == [("load", None), ("train", 1), ("train", 2), ("evaluate", None), ("generate", None)]
    assert (found.notes, found.layers_run, found.peaks[2].total_bytes) == (("said by each",), (2,), 2010)
    one = measured({}, phases=("generate",), steps=1)
    assert [each.phase for each in one.peaks] == ["generate"]
    measured({"trainer": {**TRAINS["trainer"], "gradient_accumulation_steps": 8}}, batch_size=3, phases=("train",))
    assert parts[-1].step_lengths == ((8,) * 6,)  # two micro-batches where a step has more


def test_two_depths_are_run_and_the_peaks_extrapolated(measured, parts):
    found = measured(changes={"num_hidden_layers": 40}, phases=("train",), steps=1, layers=1)
    assert [request.folder.config["num_hidden_layers"] for request in parts] == [1, 2]
    assert [each.total_bytes for each in found.peaks] == [40_010]
    assert (found.layers_run, found.num_layers) == ((1, 2), 40)
    assert "extrapolated from 1 and 2 layers of random weights to 40" in found.notes


def test_when_live_bytes_count_as_rising_from_step_to_step():
    for end_bytes, tolerance_bytes, rise in (
        ([100, 900, 1000, 1100, 1350], 0, 100),  # every step after the first; the median
        ([100, 900, 900, 900, 900], 0, None),  # the first step bears what stays for good
        ([0, 10, 20, 30, 30, 40], 0, None),  # one step that does not rise is enough
        ([0, 10, 20, 30], 0, None),  # two rises are too few
        ([0, 10, 20, 30, 40], 0, 10),
        ([0, 512, 1024, 1536, 2048], 512, None),  # within the rounding
        ([0, 512, 1024, 1536, 2048], 511, 512),
        ([], 0, None),
    ):
        assert rise_per_step(end_bytes, tolerance_bytes=tolerance_bytes) == rise, end_bytes


@pytest.mark.usefixtures("parts")
def test_live_bytes_that_rise_at_each_step_are_a_leak(measured):
    found = measured(phases=("train",), steps=5)
    assert found.leak is not None
    assert str(found.leak) == "live bytes rose by 2,097,152 a step, 4 times in a row"
    assert as_json(found)["leak"] == {"bytes_per_step": 2**21, "end_bytes": [n * 2**21 for n in (1, 2, 3, 4, 5)]}
    assert measured(phases=("train",), steps=4).leak is None


@linux
@pytest.mark.process
def test_a_process_of_its_own_gives_the_peaks_without_the_weights(asked):
    request = asked(num_steps=1)
    report = measured_alone(replace(request, folder=replace(request.folder, has_weights=False)))
    [load, train] = report.peaks
    weights_bytes = 30_000 * 4
    assert report.baseline_bytes < load.total_bytes < report.baseline_bytes + 16 * 2**20
    assert report.baseline_bytes + 3 * weights_bytes < train.total_bytes < report.baseline_bytes + 32 * 2**20


# brim's own code, run to be measured: in this process, on a tiny model


class Counting:
    """A meter that tells how often it began."""

    kind, baseline_bytes = "cpu", 0

    def __init__(self):
        self.begun = 0

    def begin(self):
        self.begun += 1

    def peak(self, phase, step=None):
        return peak(0, phase=phase, step=step)


def ran(request, meter):
    """The bench, once all phases have run on it."""
    bench = load_bench(request, CPU, meter)
    bench.run()
    return bench


@pytest.fixture
def widths(monkeypatch):
    """The rows and tokens of each pass through the model."""
    found = []
    forward = LlamaModel.forward

    def watched(self, input_ids=None, **others):
        found.append(tuple(input_ids.shape))
        return forward(self, input_ids=input_ids, **others)

    monkeypatch.setattr(LlamaModel, "forward", watched)
    return found


@pytest.mark.run
def test_micro_batches_and_lengths_are_those_that_were_asked_for_and_each_step_has_a_peak_of_its_own(asked, widths):
    meter = Counting()
    bench = ran(asked({"adapter": "lora"}, step_lengths=((9, 9, 5, 5), (12, 3, 3, 3))), meter)
    assert widths == [(2, 9), (2, 5), (2, 12), (2, 3)]
    assert [(peak.phase, peak.step) for peak in bench.peaks] == [("load", None), ("train", 1), ("train", 2)]
    assert (meter.begun, bench.notes) == (3, [])


@pytest.mark.run
@pytest.mark.parametrize(
    ("packing", "passes"),
    [(False, [(2, 16), (2, 16)]), (True, [(1, 64), (1, 32)])],  # a packed pass is scored filled up
    ids=["padded", "packed"],
)
def test_what_only_runs_is_evaluated_and_generates_all_its_tokens(asked, widths, packing, passes):
    trainer = {**NO_TRAINING["trainer"], "packing": packing}
    bench = ran(asked({"trainer": trainer}, phases=("evaluate", "generate")), Counting())
    assert [peak.phase for peak in bench.peaks] == ["load", "evaluate", "generate"]
    # Scored; prefill and two decoded, which make three new tokens.
    assert widths[-4:] == [*passes, (2, 1), (2, 1)]


@pytest.mark.run
def test_fp16_steps_that_overflow_are_left_out_and_told(asked, monkeypatch):
    calls = []
    scale = torch.amp.GradScaler.scale

    def overflowing(self, outputs):
        calls.append(outputs)
        return scale(self, outputs) * (float("inf") if len(calls) == 1 else 1.0)

    monkeypatch.setattr(torch.amp.GradScaler, "scale", overflowing)
    bench = ran(asked({"precision": "fp16-mixed"}, num_steps=2), Counting())
    assert [peak.step for peak in bench.peaks if peak.phase == "train"] == [1, 2]
    (note,) = bench.notes
    assert note.startswith("1 step left out: fp16 gradients overflowed")


@linux
@pytest.mark.run
def test_steps_that_keep_tensors_are_a_leak_and_others_are_not(asked, monkeypatch):
    """By the resident set, which rises by no more than some pages where nothing stays."""
    kept = []
    loss_of = NextToken.loss

    def leaking(objective, model, batch, **others):
        kept.append(torch.ones(2**20))
        return loss_of(objective, model, batch, **others)

    def leak():
        return leak_of(ran(asked(num_steps=6), ResidentMeter()).peaks, "cpu")

    assert leak() is None
    monkeypatch.setattr(NextToken, "loss", leaking)
    found = leak()
    assert found is not None
    assert found.bytes_per_step == pytest.approx(2**22, rel=0.1)


@pytest.mark.run
@pytest.mark.parametrize("phase", ["train", "evaluate", "generate"])
def test_what_does_not_fit_is_no_measurement_of_something_smaller(asked, monkeypatch, phase):
    def scarce(self, input_ids=None, **others):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(LlamaModel, "forward", scarce)
    with pytest.raises(BrimError, match="the device ran out of memory: ") as caught:
        ran(asked({} if phase == "train" else NO_TRAINING, phases=(phase,)), Counting())
    assert "--batch-size" in caught.value.problems[0].fix
