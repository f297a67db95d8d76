"""A run whose weights are sharded over processes is the run in one, and its checkpoints know no ranks."""

from __future__ import annotations

import gc
import os
import signal
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch._dynamo  # which FSDP imports, in each process that has not
import torch.distributed.fsdp
from faults.several import results, together
from faults.workshop import make_base
from safetensors.torch import load_file
from tests.distributed.test_replicated import LORA, KilledAfter, Scarce, assert_alike, log, losses, train
from tests.gallery import usual
from tests.memory.test_fsdp import LiveBytes

import brim
from brim.config import load_config
from brim.data.tokens import TokenRow
from brim.distributed import Place, group_of_one, joined, local
from brim.errors import CheckpointError, ConfigError
from brim.models import load_llm
from brim.models.loss import NextToken
from brim.session import open_session
from brim.train import MicroBatchPass, build_host_optimizer, build_optimizer
from brim.train.checkpoints import CheckpointStore
from brim.workflows.training import sharding

pytestmark = [
    pytest.mark.run,
    pytest.mark.skipif(torch.cuda.is_available() or not hasattr(os, "fork"), reason="a fork, where no CUDA has begun"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Python 3.12: other threads, which do nothing here
]

FULL = {"adapter": None}
QLORA = {**LORA, "quantization": {"bits": 4}}
KINDS = {
    "lora": (LORA, {"dropout_by_row": True}),
    "packed": (LORA, {"dropout_by_row": True, "packing": True, "chunked_loss": True}),
    "sgd": (FULL, {"optimizer": {"type": "sgd", "momentum": 0.9}, "learning_rate": 0.1}),
    "adam": (FULL, {"learning_rate": 0.001, "enable_gradient_checkpointing": True}),
    "4 bits": (QLORA, {"dropout_by_row": True, "enable_gradient_checkpointing": True}),
    "8 bits": ({**LORA, "quantization": {"bits": 8}}, {"dropout_by_row": True}),
}


def sharded(rank):
    patch.object(sharding, "is_sharded_run", lambda config, num_ranks: num_ranks > 1).start()


def exported(output):
    """The exported weights, joined."""
    (file,) = (output / "model").glob("*model.safetensors")
    return torch.cat([weight.double().flatten() for _, weight in sorted(load_file(file).items())])


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_the_exported_model_are_those_of_one_process(kind, tiny_base, sums_file, tmp_path):
    changes, trainer = KINDS[kind]
    config = usual(tiny_base, dataset=str(sums_file), trainer={**trainer, "batch_size": 2}, **changes)
    alone = train(config, tmp_path / "1", ranks=1)[0]
    for ranks in (4,) if kind == "lora" else (2,):
        told = results(train(config, tmp_path / str(ranks), ranks=ranks, each=sharded))
        assert_alike(tmp_path / "1", tmp_path / str(ranks), within=1e-4 if kind == "adam" else 1e-5)
        assert all(each == told[0] for each in told)
        assert told[0]["steps"] == alone["steps"]
        assert told[0]["best"] == alone["best"]
        weights = exported(tmp_path / "1")
        off = (exported(tmp_path / str(ranks)) - weights).norm() / weights.norm()
        assert off < (1e-4 if kind == "adam" else 1e-6)


def parts(output, step):
    return sorted((output / "checkpoints" / f"step-{step:08d}").glob("*-of-*.safetensors"))


class KilledOnceSaved(KilledAfter):
    def write(self, record):
        if record.get("event") == "checkpoint":  # it is written beside training
            super().write(record)


def test_a_killed_run_goes_on_with_any_number_of_ranks_sharded_or_not(tiny_base, sums_file, tmp_path):
    trainer = {"batch_size": 2, "steps_per_checkpoint": 2, "optimizer": {"type": "sgd", "momentum": 0.9}}
    config = usual(tiny_base, dataset=str(sums_file), trainer={**trainer, "learning_rate": 0.1}, adapter=None)
    train(config, tmp_path / "1", ranks=1)
    run = tmp_path / "parts"
    ended = train(config, run, ranks=4, observer=KilledAfter(3), each=sharded)
    assert ended[0].code == -signal.SIGKILL
    assert len(parts(run, 2)) == 2 * 4  # model and optimizer
    ended = train(config, run, ranks=3, resume=True, observer=KilledAfter(5), each=sharded)
    assert ended[0].code == -signal.SIGKILL
    ended = train(config, run, ranks=2, resume=True, observer=KilledOnceSaved(6))  # replicated
    assert ended[0].code == -signal.SIGKILL
    assert not parts(run, 6)

    store = CheckpointStore(run / "checkpoints")
    for part in parts(run, 4):
        whole = part.read_bytes()
        for spoiled in (whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:], whole[:-9], None):
            part.unlink()
            if spoiled is not None:
                part.write_bytes(spoiled)
            with pytest.raises(CheckpointError, match="the checkpoint of step 4 is damaged"):
                store.load(4)
        part.write_bytes(whole)
    (run / "checkpoints" / "step-00000006" / "model.safetensors").unlink()
    checkpoint, (refused,) = store.load_newest()  # by one process: of three ranks' files
    assert (checkpoint.step, "step 6 is damaged" in refused) == (4, True)

    results(train(config, run, ranks=2, resume=True, each=sharded))
    assert_alike(tmp_path / "1", run, within=1e-5)
    assert (exported(run) - exported(tmp_path / "1")).norm() < 1e-5


def test_4_bits_of_the_same_ranks_are_the_same_bits_and_one_process_reads_their_checkpoint(
    tiny_base, sums_file, tmp_path
):
    trainer = {"batch_size": 2, "steps_per_checkpoint": 2, "dropout_by_row": True}
    config = usual(tiny_base, dataset=str(sums_file), trainer=trainer, **QLORA)
    train(config, tmp_path / "1", ranks=1)
    for again in ("2", "3"):
        ended = train(config, tmp_path / again, ranks=2, observer=KilledAfter(5), each=sharded)
        assert ended[0].code == -signal.SIGKILL
    assert len(parts(tmp_path / "2", 4)) == 2 * 2
    assert losses(tmp_path / "2")[:4] == losses(tmp_path / "3")[:4]  # the fifth may not have been written yet
    train(config, tmp_path / "2", ranks=1, resume=True)
    assert_alike(tmp_path / "1", tmp_path / "2", within=1e-5)
    assert (exported(tmp_path / "2") - exported(tmp_path / "1")).norm() < 1e-5


def test_a_rank_that_is_killed_within_a_pass_ends_the_others_by_themselves(tiny_base, sums_file, tmp_path):
    config = usual(tiny_base, dataset=str(sums_file), trainer={"batch_size": 2})

    def work(rank):
        sharded(rank)
        whole, calls = NextToken.loss, []

        def killed(objective, model, batch, **others):
            calls.append(batch)
            if rank == 1 and len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(objective, model, batch, **others)

        patch.object(NextToken, "loss", killed).start()
        brim.Model(config).train(output_directory=tmp_path / "2", say=None)

    ended = together(2, work, folder=tmp_path / "ranks", ends_all=False)
    assert (ended[0].code, ended[1].code) == (1, -signal.SIGKILL)
    assert "PeerError: another process of the run ended" in ended[0].error


def test_memory_that_runs_out_on_a_rank_ends_the_run_and_the_next_start_cuts_smaller(tiny_base, sums_file, tmp_path):
    config = usual(tiny_base, dataset=str(sums_file), trainer={"batch_size": 4, "steps_per_checkpoint": 2})
    train(config, tmp_path / "1", ranks=1)
    run = tmp_path / "2"

    def scarce(rank):
        sharded(rank)
        Scarce(1, most_rows=2)(rank)

    ended = train(config, run, ranks=2, each=scarce)
    assert ended[1].code == 1
    assert ended[0].code in (1, -signal.SIGTERM)  # it hears of it, or the launcher ends it
    for words in ("OutOfMemoryError: step 1, rows", "on rank 1", "--resume: micro-batches then get at most 2 rows"):
        assert words in ended[1].error
    results(train(config, run, ranks=2, resume=True, each=scarce))
    assert_alike(tmp_path / "1", run, within=1e-5)
    assert list(run.glob("out-of-memory*")) == []
    assert "memory ran out in step 1: micro-batches get at most 2 rows" in (run / "notes.txt").read_text()


@pytest.mark.parametrize(("cause", "then"), [("loss", "skip"), ("gradient", "skip"), ("gradient", "stop")])
def test_a_step_that_is_not_finite_on_a_rank_is_left_out_by_all(cause, then, tiny_base, sums_file, tmp_path):
    # Where a step has one row, the other rank has a dummy, which does not count.
    sizes, spoiler = ({"batch_size": 2}, 1) if then == "skip" else ({"batch_size": 1, "effective_batch_size": 1}, 0)

    def spoiled(rank):
        sharded(rank)
        whole = NextToken.loss

        def loss(objective, model, batch, **others):
            value = whole(objective, model, batch, **others)
            if rank == spoiler and int(batch.input_ids.sum()) % 3 == 0:  # the same micro-batch, when it is replayed
                if cause == "loss":
                    return value * float("nan")
                value.register_hook(lambda grad: grad * float("inf"))
            return value

        patch.object(NextToken, "loss", loss).start()

    config = usual(tiny_base, dataset=str(sums_file), trainer={**sizes, "on_nonfinite": then})
    ended = train(config, tmp_path / "2", ranks=2, each=spoiled)
    if then == "stop":
        assert ["micro-batch 1 of 1)" in each.error for each in ended] == [True, True]
        return
    results(ended)
    skipped = [record for record in log(tmp_path / "2") if record.get("event") == "skipped"]
    assert skipped
    assert {record["cause"] for record in skipped} == {cause}
    assert all(record["rows"] for record in skipped)


WIDE = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 512, "vocab_size": 2048}
WIDE |= {"tie_word_embeddings": False}
ROWS, TOKENS = 2, 64


def held(tensors):
    """Bytes of the memory that tensors have here, shared memory once."""
    here = (local(tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in here}.values())


def scales(model):
    """What 4-bit layers keep whole."""
    for layer in model.modules():
        if (state := getattr(layer, "quant_state", None)) is not None:
            yield from (state.code, state.offset, state.state2.absmax, state.state2.code)


def measured(config):
    """Bytes of weights and states after a step, and the most in a step; the least of three, as gloo frees late."""
    with joined(Place.of_environment()) as ranks, group_of_one(ranks, is_cuda=False):
        session = open_session(load_config(config).config, is_one_of_several=True)
        llm = sharding.loaded_for(ranks, session).llm
        build = build_host_optimizer if session.config.memory.offload == "optimizer" else build_optimizer
        optimizer = build(
            session.config.trainer.optimizer, [each for each in llm.model.parameters() if each.requires_grad]
        )
        work = MicroBatchPass(llm=llm, pad_id=0, scaler=torch.amp.GradScaler("cpu", enabled=False))
        row = TokenRow(key=0, input_ids=np.arange(TOKENS, dtype=np.int32), supervised=np.ones(TOKENS, dtype=bool))
        weights, peaks = [*llm.model.parameters(), *scales(llm.model)], []
        llm.model.train()
        for _ in range(4):
            states = [state for of in optimizer.state.values() for state in of.values()]
            own = [each for weight in optimizer.param_groups[0]["params"] for each in (weight, weight.grad)]
            states += [each for each in own if each is not None]  # copies, where it steps on the host
            gc.collect()
            with LiveBytes([]) as live:
                live._see([local(tensor) for tensor in (*weights, *llm.model.buffers(), *states)])
                work([row] * ROWS, ROWS * TOKENS, step=0)
                optimizer.step()
            peaks.append(max(live.peaks.values()))
            llm.model.zero_grad()
        states = [state for of in optimizer.state.values() for state in of.values() if state.ndim]
        return {"weights": held(weights), "optimizer_state": held(states), "peak": min(peaks[1:])}


OFFLOAD = {"memory": {"offload": "weights"}}  # which one rank alone can do; on a CPU in the same memory
SHARDED = {"backend": {"type": "local", "trainer": {"strategy": "fsdp"}}}
CHECKPOINTED = {"trainer": {"enable_gradient_checkpointing": True}}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "changes",
    [CHECKPOINTED, {"trainer": {"enable_gradient_checkpointing": 2}}, LORA, QLORA | CHECKPOINTED],
    ids=["full", "half of the layers", "lora", "4 bits"],
)
def test_a_rank_holds_what_is_predicted(changes, ranks, tmp_path):
    make_base(tmp_path / "base", **WIDE)
    trainer = {"enable_gradient_checkpointing": False, "chunked_loss": False, "packing": False}
    trainer |= {"batch_size": ROWS, "effective_batch_size": ROWS, **changes.get("trainer", {})}
    config = usual(tmp_path / "base", **{"adapter": None, **changes, "trainer": trainer}, precision="fp32")
    config |= OFFLOAD if ranks == 1 else SHARDED
    predicted = brim.predict_memory(config, batch_size=ROWS, sequence_length=TOKENS, device="cpu", world_size=ranks)
    found = results(together(ranks, lambda rank: measured(config), folder=tmp_path / "ranks"))
    for each in found:
        at_end = {name: int(live[-1]) for name, live in predicted.timeline.live_bytes.items()}
        buffers = at_end["weights"] - each["weights"]
        assert 0 <= buffers < 2048  # of the rotary embedding; bitsandbytes' table
        assert each["optimizer_state"] == at_end["optimizer_state"]
        assert each["peak"] == pytest.approx(predicted.allocated_bytes, rel=5e-3)


def test_a_dummy_adds_nothing_whatever_its_loss_is(tiny_base, monkeypatch):
    session = open_session(load_config(usual(tiny_base, adapter=None, precision="fp32")).config)
    llm = load_llm(session.config, session.folder, session.device, trainable=True)
    whole = NextToken.loss
    monkeypatch.setattr(NextToken, "loss", lambda *given, **others: whole(*given, **others) + float("inf"))
    row = TokenRow(key=0, input_ids=np.arange(2, dtype=np.int32), supervised=np.ones(2, dtype=bool))
    work = MicroBatchPass(llm=llm, pad_id=0, scaler=torch.amp.GradScaler("cpu", enabled=False))
    assert work([row], 1, step=0, counts=False) == 0
    assert all(weight.grad.eq(0).all() for weight in llm.model.parameters())


def test_what_cannot_be_sharded_is_refused_by_name(tiny_base):
    changes = {"precision": "fp16-mixed", "quantization": {"bits": 4}, "adapter": {"type": "lora", "use_dora": True}}
    trainer = {"optimizer": {"type": "adafactor"}, "noise_scale_every": 4}
    config = load_config(usual(tiny_base, trainer=trainer, **changes)).config
    with pytest.raises(ConfigError) as caught:
        sharding.require_shardable(config)
    keys = [problem.where for problem in caught.value.problems]
    assert keys == ["adapter.use_dora", "precision", "trainer.optimizer.type", "trainer.noise_scale_every"]
    assert all("or set backend.trainer.strategy: ddp" in problem.fix for problem in caught.value.problems)
    sharding.require_shardable(load_config(usual(tiny_base, **QLORA)).config)
