"""Plans with the weights on the host: what lies there, what is copied, and when that is suggested or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.memory.tiny_architectures import write_folder
from tests.memory.traced import training

import brim
from brim.errors import ConfigError
from brim.planning import short_plan, training_words
from brim.workflows.training import sharding

LAYERS, WIDTH, VOCABULARY = 8, 512, 512
MATRICES, NORMS = 4 * WIDTH**2 + 3 * WIDTH * 2048, 2 * WIDTH
LAYER, ROOT = MATRICES + NORMS, 2 * VOCABULARY * WIDTH + WIDTH  # parameters, all of sizes that are powers of two
ROOM_BYTES = 900 << 20  # of which 666 MiB are outside PyTorch


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """What a GPU with little memory is planned for, without and with memory.offload."""
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "vocab_size": VOCABULARY, "intermediate_size": 2048}
    base = write_folder(tmp_path_factory.mktemp("host"), "llama", dtype="float32", num_key_value_heads=4, **sizes)
    config = training(
        base, enable_gradient_checkpointing=True, chunked_loss=False, effective_batch_size=1, batch_size=1
    )
    config |= {"precision": "fp32"}

    def plan(offload, room_bytes=ROOM_BYTES):
        memory = {"offload": offload, "margin": 0}
        given = {**config, "memory": memory}
        return brim.plan(given, num_rows=2, sequence_length=8, memory_bytes=room_bytes, say=None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("brim.planning.helping.what_helps", lambda *given, **how: [])  # traces that do not count here
        wider = ROOM_BYTES + (150 << 20)
        return plan("none"), plan("weights"), plan("none", wider), plan("optimizer", wider)


def test_what_does_not_fit_otherwise_is_suggested_and_then_fits(plans):
    none, weights, *_ = plans
    assert none.chosen is None
    (help,) = [each for each in none.helps if each.endswith("memory.offload: weights")]
    assert "MiB of the device and " in help
    assert weights.chosen is not None
    assert str(weights.chosen.way).startswith("weights on the host, ")


def test_the_host_holds_whole_states_and_each_micro_batch_copies_the_layers_twice(plans):
    _, alone, *_ = plans
    parameters = LAYERS * LAYER + ROOT
    steps_bytes = 4 * (9 * LAYERS + 3)  # Adam counts the steps of each tensor
    host = alone.chosen.host
    assert host.num_bytes == 4 * 4 * parameters + steps_bytes
    assert host.copied_bytes == 4 * (3 * LAYERS * LAYER + 2 * ROOT)
    seconds = alone.chosen.seconds_per_epoch / alone.steps_per_epoch
    assert seconds > alone.chosen.micro_batches_per_step * host.copied_bytes / host.bytes_per_s
    assert "of its memory for weights, gradients and the optimizer's states" in training_words(alone)["host"]
    (short,) = [line for line in short_plan(alone) if line.startswith("host: ")]
    assert short == f"host: {training_words(alone)['host']}"


def test_states_alone_are_suggested_and_copied_once_a_step(plans):
    *_, none, alone = plans
    assert none.chosen is None
    assert any(each.endswith("memory.offload: optimizer") for each in none.helps)
    chosen, parameters = alone.chosen, LAYERS * LAYER + ROOT
    assert str(chosen.way).startswith("optimizer on the host, ")
    assert chosen.host.num_bytes == 4 * 4 * parameters + 4 * (9 * LAYERS + 3)
    assert (chosen.host.copied_bytes, chosen.host.update_bytes) == (0, 4 * 2 * parameters)
    assert chosen.update_s > chosen.host.update_s
    assert alone.saved_bytes == 4 * 3 * parameters + 4 * (9 * LAYERS + 3)
    assert "copies of the weights, gradients and the optimizer's states" in training_words(alone)["host"]


def test_what_the_host_cannot_hold_is_refused_before_the_start(plans):
    plan = plans[1]
    sharding.require_host_room(plan, num_processes=1)
    sharding.require_host_room(plans[0], num_processes=1)  # nothing is there
    chosen = replace(plan.chosen, host=replace(plan.chosen.host, num_bytes=1 << 50))
    with pytest.raises(ConfigError, match=r"memory.offload: weights puts .* a process, of which there are 2"):
        sharding.require_host_room(replace(plan, chosen=chosen), num_processes=2)
