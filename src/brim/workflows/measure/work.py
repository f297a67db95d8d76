"""Run what is to be measured: brim's own loading, training loop, scoring and generation.

One measurement runs in a process of its own, which `measured_alone` (run.py) starts. What can only be loaded from
disk, a quantised base model, gets random weights: another process writes them, in bf16, beside its config.json. Random
token rows of the asked lengths come in the order in which the loop will take them.

On a CPU the same work is done on a tiny model first: what is imported and set up at first use is then there before
anything counts. It would stand in the first phase that happens to need it: transformers' and PEFT's modules, the
compiler that PyTorch's optimizers import, thread pools, kernels that are generated. Together they came to 180 MB
beside a model of 120 kB. The GPU's memory has none of it.

On CUDA the figures are PyTorch's own counters; on a CPU they are the resident set, as Linux counts it.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import torch

from brim.batching import BatchSchedule, ByRows
from brim.batching.memory import ResidentPeak, free_caches
from brim.config import WAYS as WAYS_TO_MOVE, resolve
from brim.config.schema import Config, FinetuneTrainer, LearningRateScheduler
from brim.data.tokens import TokenRow, TokenRows, rows_of_step
from brim.errors import BrimError
from brim.infer.engines import (
    Engine,
    FixedRoom,
    RowsAtOnce,
    SlotsEngine,
    Smaller,
    StaticEngine,
    generation_settings,
    respond_to,
    usual_pass_tokens,
)
from brim.infer.metrics import score_rows
from brim.memory.events import Phase
from brim.models import LLM, device_facts, device_name, load_llm, pick_device
from brim.models.loss import base_model
from brim.train import Loop, Record, RunLength, build_job
from brim.train.checkpoints import CheckpointStore, TrainState
from brim.units import format_count
from brim.workflows.measure.messages import PhasePeak, Report, Request


def write_random_weights(folder: Path) -> None:
    """Write model.safetensors beside config.json. The values do not matter: only their number and sizes do."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    architecture = AutoConfig.from_pretrained(folder)
    AutoModelForCausalLM.from_config(architecture, dtype=torch.bfloat16).save_pretrained(folder)


_PAD_ID = 0  # full rows have none; prompts are of one length


_OVERFLOWS = 16  # steps that fp16's loss scale of 2^16 may leave out until it is low enough


def run(request: Request) -> Report:
    """Load the model once and run the phases. Raises BrimError where the device runs out of memory."""
    try:
        return _report(request)
    except torch.OutOfMemoryError as error:
        raise _ran_out(str(error).splitlines()[0]) from None


def _report(request: Request) -> Report:
    device = pick_device() if request.device is None else torch.device(request.device)
    if device.type == "cpu":
        with tiny(request) as rehearsal:
            load_bench(rehearsal, device, meter_of(device)).run()
    gc.freeze()  # the collector need not scan again and again what was imported
    meter = meter_of(device)
    bench = load_bench(request, device, meter)
    bench.run()
    return Report(
        device=device_name(device),
        kind=meter.kind,
        baseline_bytes=meter.baseline_bytes,
        peaks=tuple(bench.peaks),
        notes=tuple(bench.notes),
    )


def load_bench(request: Request, device: torch.device, meter: Meter) -> Bench:
    """Load the model in this process, for the phases to be run on it."""
    facts = device_facts(device)
    config = resolve(request.config, facts, context_length=request.folder.context_length).config
    meter.begin()
    # Random weights are drawn where they will stay: on one core of a CPU, those of 8 billion take minutes.
    with device if config.initialize == "random" and device.type == "cuda" else nullcontext():
        llm = load_llm(config, request.folder, device, trainable=request.trainable)
    return Bench(request, config, llm, meter)


class Bench:
    """Run the phases on one loaded model, and collect what they take."""

    def __init__(self, request: Request, config: Config, llm: LLM, meter: Meter) -> None:
        self._request, self._config, self._meter = request, config, meter
        self.llm = llm
        self.peaks: list[PhasePeak] = [meter.peak("load")]
        self.notes: list[str] = []
        self._vocabulary = int(llm.model.get_input_embeddings().weight.shape[0])

    def run(self) -> None:
        """Run the phases that were asked for, all but loading."""
        for phase in self._request.phases:
            if phase == "train":
                self._train()
            elif phase != "load":
                self._meter.begin()
                self._evaluate() if phase == "evaluate" else self._generate()
                self.peaks.append(self._meter.peak(phase))

    def _train(self) -> None:
        """Run the run's own loop, ended before its first checkpoint."""
        request, config, llm = self._request, self._config, self.llm
        size = len(request.step_lengths[0])
        num_rows = (request.num_steps + _OVERFLOWS + 1) * size  # more than are run, so that no epoch ends
        lengths = in_order_of_steps(request.step_lengths, num_rows=num_rows, seed=config.random_seed)
        rows = random_rows(lengths, vocabulary=self._vocabulary, supervised=True, seed=config.random_seed)
        with tempfile.TemporaryDirectory() as folder:
            stepper = _Stepper(self._meter, request.num_steps)
            job = build_job(
                config,
                self._trainer(size),
                llm,
                rows,
                length=RunLength(num_rows=num_rows, schedule=BatchSchedule.constant(size), total_samples=num_rows),
                cutter=ByRows(max_rows=request.batch_size),
                pad_id=_PAD_ID,
                evaluate=None,
                store=CheckpointStore(Path(folder)),
                observer=stepper,
            )
            self._meter.begin()
            with suppress(_EnoughSteps):
                Loop(job, TrainState()).run(threading.Event())
            self.peaks += stepper.peaks
            if stepper.num_overflows:
                self.notes.append(
                    f"{format_count(stepper.num_overflows, 'step')} left out: fp16 gradients overflowed, so no update"
                )

    def _trainer(self, size: int) -> FinetuneTrainer:
        return self._config.finetune_trainer.model_copy(
            update={
                "batch_size": self._request.batch_size,
                "gradient_accumulation_steps": -(-size // self._request.batch_size),
                "effective_batch_size": size,
                "max_batch_size": None,
                "learning_rate_scheduler": LearningRateScheduler(),
                "noise_scale_every": None,
                **dict.fromkeys(WAYS_TO_MOVE),
            }
        )

    def _evaluate(self) -> None:
        llm = self.llm
        rows = self._rows(supervised=True)
        score_rows(
            llm.model,
            rows,
            pad_id=_PAD_ID,
            batches=RowsAtOnce(len(rows), on_smaller=_refuse),
            device=llm.device,
            precision=llm.precision,
            objective=llm.objective,
            packed=llm.packed,
        )

    def _generate(self) -> None:
        """Generate the most new tokens: the end is a token that no vocabulary has."""
        llm, config = self.llm, self._config
        rows = self._rows(supervised=False)
        generation = config.generation.model_copy(update={"eos_token_id": None})
        settings = generation_settings(generation, pad_id=_PAD_ID, end_ids=[self._vocabulary])
        base = base_model(llm.model)
        is_slots = not SlotsEngine.why_not(base.config, settings, type(base))
        pass_tokens = usual_pass_tokens(is_packed=llm.packed is not None, is_cuda=llm.device.type == "cuda")
        engine: Engine = (SlotsEngine if is_slots else StaticEngine)(
            llm.model,
            settings=settings,
            room=FixedRoom(len(rows), prefill_tokens=pass_tokens),
            on_smaller=_refuse,
            seed=config.random_seed,
            device=llm.device,
            precision=llm.precision,
            packed=llm.packed,
            is_misled=False,  # the passes that check it would be measured, too
        )
        respond_to(engine, rows)

    def _rows(self, *, supervised: bool) -> TokenRows:
        lengths = [self._request.sequence_length] * self._request.batch_size
        return random_rows(lengths, vocabulary=self._vocabulary, supervised=supervised, seed=self._config.random_seed)


def _refuse(smaller: Smaller) -> None:
    """Raise BrimError: fewer rows together would be another measurement."""
    raise _ran_out(f"{smaller.before:,} rows of {smaller.longest:,} tokens, in {smaller.doing}")


def _ran_out(message: str) -> BrimError:
    return BrimError(
        what=f"the device ran out of memory: {message}",
        fix="a smaller --batch-size or --sequence-length; or --layers 1, which runs a few layers and extrapolates",
    )


class _EnoughSteps(Exception):
    """End the loop after the steps that were asked for, before it writes a checkpoint."""


class _Stepper:
    """Take the peaks between the loop's steps."""

    def __init__(self, meter: Meter, num_steps: int) -> None:
        self._meter, self._num_steps = meter, num_steps
        self._overflowed = False
        self.peaks: list[PhasePeak] = []
        self.num_overflows = 0

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None: ...

    def write(self, record: Record) -> None:
        if record.get("event") == "oom":
            # A retry would measure another step.
            raise _ran_out(f"{record['message']}, in step {len(self.peaks) + 1}")
        if record.get("event") == "overflow":
            self._overflowed = True
        elif record.get("split") == "train" and self._overflowed:
            self._overflowed = False
            self.num_overflows += 1
            self._meter.begin()
        elif record.get("split") == "train":
            self.peaks.append(self._meter.peak("train", len(self.peaks) + 1))
            if len(self.peaks) == self._num_steps:
                raise _EnoughSteps
            self._meter.begin()

    def close(self) -> None: ...


_TOKENS = 8


_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 0,
}


@contextmanager
def tiny(request: Request) -> Iterator[Request]:
    """Yield a request for the same phases, one step of each, on a Llama of 20,000 random weights."""
    _import_architecture(request)
    with TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(_LLAMA), encoding="utf-8")
        folder = replace(
            request.folder, path=Path(name), name=name, config=_LLAMA, context_length=64, has_weights=False
        )
        yield replace(
            request,
            config=_on_any_model(request.config),
            folder=folder,
            batch_size=1,
            sequence_length=_TOKENS,
            step_lengths=((_TOKENS,),),
            num_steps=1,
        )


def _import_architecture(request: Request) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = AutoConfig.from_pretrained(request.folder.name, trust_remote_code=request.config.trust_remote_code)
    _ = AutoModelForCausalLM._model_mapping.get(type(architecture), None)


def _on_any_model(config: Config) -> Config:
    adapter = config.adapter
    if adapter is not None:
        adapter = adapter.model_copy(update={"target_modules": "all-linear", "pretrained_adapter_weights": None})
    generation = config.generation.model_copy(update={"max_new_tokens": 2})
    return config.model_copy(
        update={"initialize": "random", "quantization": None, "adapter": adapter, "generation": generation}
    )


def random_rows(lengths: Sequence[int], *, vocabulary: int, supervised: bool, seed: int) -> TokenRows:
    """Draw one row for each length. supervised: the loss counts all tokens; else none, so that the rows are prompts."""
    generator = np.random.default_rng(seed)
    return TokenRows.from_rows(
        TokenRow(
            key=number,
            input_ids=generator.integers(0, vocabulary, length).astype(np.int32),
            supervised=np.full(length, supervised),
        )
        for number, length in enumerate(lengths)
    )


def in_order_of_steps(steps: Sequence[Sequence[int]], *, num_rows: int, seed: int) -> list[int]:
    """Return the length of each of `num_rows` rows, such that the loop's step k takes rows of the k-th lengths.

    Steps after the last one given are like it. All steps have the same number of rows, and `num_rows` is a multiple.
    """
    size = len(steps[0])
    lengths = [0] * num_rows
    for number in range(num_rows // size):
        _, positions = rows_of_step(num_rows=num_rows, seed=seed, consumed_samples=number * size, size=size)
        for position, length in zip(positions, steps[min(number, len(steps) - 1)], strict=True):
            lengths[int(position)] = length
    return lengths


class Meter(Protocol):
    """Read the memory of one device."""

    kind: str  # cpu or cuda
    baseline_bytes: int  # before anything was put there

    def begin(self) -> None:
        """Forget the peak: what is allocated from now on counts."""

    def peak(self, phase: Phase, step: int | None = None) -> PhasePeak:
        """Return the most since `begin`, and what is there now."""


def meter_of(device: torch.device) -> Meter:
    """Return the device's meter. Raises BrimError where its memory cannot be measured."""
    if device.type == "cuda":
        return CudaMeter(device)
    if device.type == "cpu":
        return ResidentMeter()
    raise BrimError(
        what=f"memory cannot be measured on a device of the kind {device.type}",
        expected="a CUDA device, or a CPU under Linux",
        fix="leave out --measure: a prediction needs no device",
    )


class CudaMeter:
    """Count the bytes that PyTorch's allocator has allocated and reserved, and those of the card that it does not hold.

    The last is read as the card's used memory less PyTorch's reserved, so it counts other processes, too.
    """

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.zeros((), device=device)  # makes the context
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        self.baseline_bytes = self._outside_bytes()

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self, phase: Phase, step: int | None = None) -> PhasePeak:
        torch.cuda.synchronize(self._device)
        reserved, outside = torch.cuda.max_memory_reserved(self._device), self._outside_bytes()
        return PhasePeak(
            phase=phase,
            step=step,
            allocated_bytes=torch.cuda.max_memory_allocated(self._device),
            reserved_bytes=reserved,
            outside_bytes=outside,
            total_bytes=reserved + outside,
            end_bytes=torch.cuda.memory_allocated(self._device),
            baseline_bytes=self.baseline_bytes,
        )

    def _outside_bytes(self) -> int:
        free, whole = torch.cuda.mem_get_info(self._device)
        return whole - free - torch.cuda.memory_reserved(self._device)


class ResidentMeter:
    """Read this process's resident set; freed memory is returned before each phase, so that it counts once."""

    kind = "cpu"

    def __init__(self) -> None:
        if not Path("/proc/self/clear_refs").exists():
            raise BrimError(
                what="memory cannot be measured on this machine's CPU",
                expected="Linux, with /proc/self/status and /proc/self/clear_refs",
                fix="leave out --measure: a prediction needs no device; or measure on a CUDA device",
            )
        self._most = ResidentPeak()
        free_caches()
        self.baseline_bytes = _resident_bytes()

    def begin(self) -> None:
        self._most.begin()

    def peak(self, phase: Phase, step: int | None = None) -> PhasePeak:
        most, before = self._most.peak_bytes(), self.baseline_bytes
        free_caches()
        return PhasePeak(phase=phase, step=step, total_bytes=most, end_bytes=_resident_bytes(), baseline_bytes=before)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
