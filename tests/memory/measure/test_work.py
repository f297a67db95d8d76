"""brim's own code, run to be measured: in this process, on a tiny model."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from brim.errors import BrimError
from brim.workflows.measure.work import NoMeter, run_on, tiny

CPU = torch.device("cpu")


class Counting(NoMeter):
    """A meter that tells how often it was read."""

    def __init__(self):
        self.begun = 0

    def begin(self):
        self.begun += 1


@pytest.mark.parametrize("settings", [{}, {"adapter": "lora"}], ids=["full", "LoRA"])
def test_each_step_has_a_peak_of_its_own(asked, settings):
    meter = Counting()
    bench = run_on(asked(settings, num_steps=3), CPU, meter)
    assert [(peak.phase, peak.step) for peak in bench.peaks] == [("load", None), *(("train", n) for n in (1, 2, 3))]
    assert meter.begun == 4
    assert bench.notes == []


def test_what_only_runs_is_evaluated_and_generates_all_its_tokens(asked, monkeypatch):
    widths = []
    from transformers.models.llama.modeling_llama import LlamaModel

    forward = LlamaModel.forward

    def watched(self, input_ids=None, **others):
        widths.append(tuple(input_ids.shape))
        return forward(self, input_ids=input_ids, **others)

    monkeypatch.setattr(LlamaModel, "forward", watched)
    bench = run_on(asked(trainable=False, phases=("evaluate", "generate")), CPU, NoMeter())
    assert [peak.phase for peak in bench.peaks] == ["load", "evaluate", "generate"]
    assert widths[-4:] == [
        (2, 16),
        (2, 16),
        (2, 1),
        (2, 1),
    ]  # scored; prefill and two decoded, which make three new tokens


def test_micro_batches_and_lengths_are_those_that_were_asked_for(asked, monkeypatch):
    shapes = []
    from brim.train import gradient as micro_batch_pass

    collate = micro_batch_pass.collate

    def watched(rows, *, pad_id):
        batch = collate(rows, pad_id=pad_id)
        shapes.append(tuple(batch.input_ids.shape))
        return batch

    monkeypatch.setattr(micro_batch_pass, "collate", watched)
    run_on(asked(step_lengths=((9, 9, 5, 5), (12, 3, 3, 3))), CPU, NoMeter())
    assert shapes == [(2, 9), (2, 5), (2, 12), (2, 3)]


def test_fp16_steps_that_overflow_are_left_out_and_told(asked, monkeypatch):
    scales = iter([True, True])
    monkeypatch.setattr(
        torch.amp.GradScaler, "get_scale", lambda self: 1.0 if next(scales, False) is False else next(scales, 0.5)
    )
    bench = run_on(asked(num_steps=2), CPU, NoMeter())
    steps = [peak.step for peak in bench.peaks if peak.phase == "train"]
    assert steps == [1, 2]


def test_the_rehearsal_runs_the_same_phases_on_a_model_that_fits_anywhere(asked):
    request = asked({"adapter": {"type": "lora", "target_modules": ["q_proj"]}}, phases=("train",), records=True)
    with tiny(request) as rehearsal:
        bench = run_on(rehearsal, CPU, NoMeter())
    assert [peak.phase for peak in bench.peaks] == ["load", "train"]
    assert bench.recording is None


def test_a_recorded_step_names_its_parts_and_where_their_spikes_are(asked):
    bench = run_on(asked(records=True), CPU, NoMeter())
    assert bench.recording is not None
    found = bench.recording.timeline()
    assert [label for _, label in found.marks] == [
        f"step {step}: {part}" for step in (1, 2) for part in ("forward", "backward", "optimizer")
    ]
    # On a CPU the points are samples of the resident set: a part's highest may be the first of the part after it.
    assert {spike.place.phase for spike in found.spikes} <= {"forward", "backward", "optimizer"}
    assert len(found.spikes) == len(found.marks)
    places = bench.recording.log.places
    heads = {place.module for place in places if place.phase == "forward" and place.operator == "aten.mm"}
    assert "model.layers.1.mlp.down_proj" in heads
    assert {place.layer for place in places if place.phase == "backward"} >= {0, 1}


def test_a_step_that_keeps_tensors_is_found_with_their_shape(asked, monkeypatch, few_objects):
    from brim.train import gradient as micro_batch_pass

    kept = []
    loss_of = micro_batch_pass.next_token_loss

    def leaking(model, batch, **others):
        kept.append(torch.zeros(len(kept) + 1, 1000))
        return loss_of(model, batch, **others)

    request = asked(num_steps=5, looks_for_leaks=True)
    sound = run_on(request, CPU, NoMeter())
    assert len(set(sound.end_bytes[1:])) == 1
    monkeypatch.setattr(micro_batch_pass, "next_token_loss", leaking)
    bench = run_on(request, CPU, NoMeter())
    rises = [after - before for before, after in pairwise(bench.end_bytes)]
    assert rises == [8_000, 12_000, 16_000, 20_000]
    assert [(each.shape, each.num_bytes) for each in bench.stayed()] == [((n, 1000), n * 4000) for n in (5, 4, 3, 2)]


def test_a_list_of_losses_whose_graphs_stay_is_found(asked, monkeypatch, few_objects):
    from brim.train import gradient as micro_batch_pass

    kept = []
    loss_of = micro_batch_pass.next_token_loss

    def leaking(model, batch, **others):
        with torch.enable_grad():
            kept.append(loss_of(model, batch, **others))  # never sent backward, so that its graph keeps all it saved
        return loss_of(model, batch, **others)

    monkeypatch.setattr(micro_batch_pass, "next_token_loss", leaking)
    trainer = {"type": "finetune", "learning_rate": 0.001, "chunked_loss": False}
    bench = run_on(asked({"trainer": trainer}, num_steps=5, looks_for_leaks=True), CPU, NoMeter())
    rises = [after - before for before, after in pairwise(bench.end_bytes[1:])]
    assert len(set(rises)) == 1
    assert rises[0] > 2 * 15 * 300 * 4  # the probabilities of the vocabulary's 300 tokens, in fp32
    assert any(each.shape and each.shape[-1] == 300 for each in bench.stayed())


@pytest.mark.parametrize("phase", ["train", "evaluate", "generate"])
def test_what_does_not_fit_is_no_measurement_of_something_smaller(asked, monkeypatch, phase):
    from transformers.models.llama.modeling_llama import LlamaModel

    def scarce(self, input_ids=None, **others):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(LlamaModel, "forward", scarce)
    with pytest.raises(BrimError, match="the device ran out of memory: ") as caught:
        run_on(asked(trainable=phase == "train", phases=(phase,)), CPU, NoMeter())
    assert "--batch-size" in caught.value.problems[0].fix
