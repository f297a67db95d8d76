"""Time the same rows through brim and its peers, on models of random weights.

Figures are real tokens a second, without padding; the share of the card's matrix speed that the arithmetic of these
tokens has (no checkpointing counted); and peak bytes allocated. What is judged is that losses agree, not the speed.
"""

from __future__ import annotations

import importlib.util
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.batching_peers import OF_WAY, Way, kernels
from benchmarks.gpu.cases import Case, Figures, Options, Skip, free, require_liger
from benchmarks.gpu.subject import (
    DATA,
    LEARNING_RATE,
    SEED,
    SIZES,
    Sizes,
    Subject,
    drawn_rows,
    in_order,
    packing,
    token_costs,
)
from benchmarks.inference_peers import respond
from benchmarks.peers import PeerSettings, as_dataset, common_arguments
from brim.batching import BatchSchedule, by_costs
from brim.data.tokens import TokenRow, TokenRows
from brim.infer.engines import FixedRoom, SlotsEngine, VllmEngine, respond_to, usual_pass_tokens
from brim.models import LLM
from brim.models.kernels import layer_kernels
from brim.models.loss import base_model
from brim.train import Loop, MicroBatchPass, Record, RunLength, build_job
from brim.train.checkpoints import CheckpointStore, TrainState

_FLOPS_OF_LORA = 4  # per weight and token: forward, and backward to the activations alone
_PEERS: Sequence[Way] = ("fixed", "group_by_length", "padding_free")


def cases(options: Options) -> Iterator[Case]:
    """Yield brim's cases before its peers', those with Liger's kernels last: they stay in the model."""
    matrix = [0.0]
    yield Case(name="matrix products", run=partial(_matrix_speed, options, matrix))
    for name in SIZES:
        subject = Subject(name, options)
        subject.matrix_flops = matrix[0]
        yield from _of_subject(subject)
        vars(subject).clear()
        free()


def _of_subject(subject: Subject) -> Iterator[Case]:
    large = subject.name == "llama-3.1-8b"
    for data in DATA:
        for packed in (False, True):
            yield Case(
                name=f"{subject.name}, {data}, brim, {'packed' if packed else 'padded'}",
                run=partial(_brim, subject, data, packed=packed),
                passes=lambda found: found["losses_apart"] <= found["tolerance"],
                expects="the losses of padded rows, step by step",
                needs_s=40 if large else 20,
            )
    if large:
        name = f"{subject.name}, 2 × 4,096 full rows, brim, packed"
        yield Case(name=name, run=partial(_full_rows, subject), needs_s=40)
    name = f"{subject.name}, tokens a second over tokens of a micro-batch"
    yield Case(name=name, run=partial(_saturation, subject), needs_s=30)
    yield Case(
        name=f"{subject.name}, generation",
        run=partial(_generation, subject),
        passes=lambda found: found["all_tokens_written"],
        expects="as many tokens as asked for; the goal is 3 times transformers' generate",
        needs_s=40,
    )
    for data in DATA:
        yield Case(
            name=f"{subject.name}, {data}, brim, packed, Liger's kernels",
            run=partial(_with_liger, subject, data),
            passes=lambda found: found["losses_apart"] <= found["tolerance"],
            expects="the losses of padded rows, step by step",
            needs_s=40 if large else 20,
        )
    for data in DATA:
        for way in _PEERS:
            yield Case(
                name=f"{subject.name}, {data}, TRL, {way}",
                run=partial(_trl, subject, data, way),
                passes=lambda found: found["losses_apart"] is None or found["losses_apart"] <= found["tolerance"],
                expects="brim's losses, step by step, where the rows come in the same order",
                needs_s=40 if large else 20,
            )
    if not large:
        yield Case(name=f"{subject.name}, generation, vLLM", run=partial(_vllm, subject), needs_s=120)


def _matrix_speed(options: Options, matrix: list[float]) -> Figures:
    """Multiply square matrices in the dtype that models compute in."""
    size, dtype = (8192, torch.bfloat16) if options.is_cuda else (256, torch.float32)
    one, other = (torch.randn(size, size, device=options.device, dtype=dtype) for _ in range(2))
    seconds = _seconds(lambda: one @ other, options, times=20)
    matrix[0] = 2 * size**3 / seconds
    return {"tflop_per_s": matrix[0] / 1e12}


def _seconds(work: Callable[[], object], options: Options, *, times: int) -> float:
    """Return the seconds of one call, after three that do not count."""
    for _ in range(3):
        work()
    started = _now(options)
    for _ in range(times):
        work()
    return (_now(options) - started) / times


def _now(options: Options) -> float:
    """Wait for the device, and read the clock."""
    if options.is_cuda:
        torch.cuda.synchronize(options.device)
    return time.perf_counter()


# brim


class _Enough(Exception):
    """End the loop after the last step, before it writes a checkpoint."""


class _Steps:
    """Take the time of the loop's steps."""

    def __init__(self, options: Options, num_steps: int) -> None:
        self._options, self._num_steps = options, num_steps
        self.times = [_now(options)]  # at the beginning, and after each step
        self.losses: list[float] = []
        self.num_micro_batches = self.num_out_of_memory = 0

    def start(self, *, first_step: int, total_steps: int | None, total_samples: int) -> None: ...

    def write(self, record: Record) -> None:
        self.num_out_of_memory += record.get("event") == "oom"
        if record.get("split") != "train":
            return
        self.times.append(_now(self._options))
        self.losses.append(record["loss"])
        self.num_micro_batches += record["num_micro_batches"]
        if len(self.losses) == self._num_steps:
            raise _Enough

    def close(self) -> None: ...


def _brim(subject: Subject, data: str, *, packed: bool) -> Figures:
    steps, figures = _trained(subject, subject.lengths(data), subject.sizes.effective_rows, packed=packed)
    reference = subject.losses.setdefault(data, steps.losses)
    return {**figures, **_agreement(steps.losses, reference, 1e-2 if subject.options.is_cuda else 1e-5)}


def _with_liger(subject: Subject, data: str) -> Figures:
    """Train with Liger's kernels, which stay in the model."""
    require_liger(subject.options)
    config, llm = subject.again()
    kernels = layer_kernels(config.having("model_parameters.kernels", "liger"), lambda: base_model(llm.model).config)
    assert kernels is not None, "the configuration trains"
    kernels.use(llm.model)
    return _brim(subject, data, packed=True)


def _full_rows(subject: Subject) -> Figures:
    """Steps of two rows of 4,096 tokens; where both together do not fit, the loop divides them."""
    length, most = (32, 2) if subject.options.small else (4096, 6)
    _, figures = _trained(subject, [length] * (2 * most), 2, packed=True, cap_tokens=2 * length)
    return {**figures, "published_tokens_per_s": 12_473}


def _trained(
    subject: Subject, lengths: Sequence[int], effective_rows: int, *, packed: bool, cap_tokens: int | None = None
) -> tuple[_Steps, Figures]:
    """Run the run's own loop, under a cap in tokens."""
    options, sizes = subject.options, subject.sizes
    config, llm = subject.again()
    rows, num_steps = drawn_rows(lengths, llm), len(lengths) // effective_rows
    steps = _Steps(options, num_steps)
    length = RunLength(num_rows=len(rows), schedule=BatchSchedule.constant(effective_rows), total_samples=len(rows))
    with tempfile.TemporaryDirectory() as folder:
        job = build_job(
            config,
            config.finetune_trainer,
            packing(llm) if packed else llm,
            rows,
            length=length,
            cutter=by_costs(token_costs(packed=packed), cap_bytes=cap_tokens or sizes.cap_tokens),
            pad_id=0,
            evaluate=None,
            store=CheckpointStore(Path(folder)),
            observer=steps,
        )
        with suppress(_Enough):
            Loop(job, TrainState()).run(threading.Event())
    timed = [len(row.input_ids) for row in in_order(rows, effective_rows)[effective_rows:]]
    figures = _speed(subject, timed, steps.times[-1] - steps.times[1])
    counts = {"num_micro_batches": steps.num_micro_batches, "num_out_of_memory": steps.num_out_of_memory}
    return steps, {**figures, **counts}


def _speed(subject: Subject, lengths: Sequence[int], seconds: float) -> Figures:
    """lengths: tokens of each row of the steps whose time is taken."""
    options = subject.options
    flops = sum(length * flops_per_token(subject.loaded[1].model, length) for length in lengths)
    peak_bytes = torch.cuda.max_memory_allocated(options.device) if options.is_cuda else None
    return {
        "tokens_per_s": sum(lengths) / seconds,
        "share_of_matrix_speed": flops / seconds / subject.matrix_flops if subject.matrix_flops else None,
        "tokens": sum(lengths),
        "seconds": seconds,
        "peak_bytes": peak_bytes,
    }


def flops_per_token(model: nn.Module, length: int) -> float:
    """Return the arithmetic of training an adapter: of each weight that multiplies, and of causal attention.

    The input's embedding multiplies nothing; one that is tied does so as the head.
    """
    architecture = base_model(model).config
    embedding = base_model(model).get_input_embeddings().weight
    frozen = sum(weight.numel() for weight in model.parameters() if not weight.requires_grad)
    frozen -= 0 if architecture.tie_word_embeddings else embedding.numel()
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    # Scores and sums over half of the keys in the mean, 2 operations each, once forward and twice backward.
    attention = 6 * length * architecture.hidden_size * architecture.num_hidden_layers
    return float(_FLOPS_OF_LORA * frozen + 6 * trained + attention)


def _agreement(losses: Sequence[float], reference: Sequence[float], tolerance: float) -> Figures:
    apart = max(abs(one / other - 1) for one, other in zip(losses, reference, strict=True))
    return {"losses_apart": apart, "tolerance": tolerance, "losses": list(losses)}


def _saturation(subject: Subject) -> Figures:
    """Time forward and backward passes of packed rows, until memory runs out."""
    _, llm = subject.again()
    llm = packing(llm)
    llm.model.train()
    run_pass = MicroBatchPass(llm=llm, pad_id=0, scaler=torch.amp.GradScaler(llm.device.type, enabled=False))
    curve: dict[str, float | str] = {}
    for tokens in subject.sizes.saturation:
        rows = list(drawn_rows([min(tokens, 512)] * max(tokens // 512, 1), llm))
        try:
            work = partial(run_pass, rows, tokens, step=0)
            curve[f"{tokens:,}"] = tokens / _seconds(work, subject.options, times=3)
        except torch.OutOfMemoryError:
            curve[f"{tokens:,}"] = "out of memory"
            break
    subject.again()  # without gradients
    return {"tokens_per_s": curve}


# Generation


def _generation(subject: Subject) -> Figures:
    """Write from prompts of several lengths; texts may differ by rounding, and nothing ends them early."""
    _, llm = subject.again()
    model: Any = llm.model
    model.eval()
    prompts, settings, end = _prompts(subject)
    engine_settings = {**settings, "eos_token_id": [end]}
    pass_tokens = usual_pass_tokens(is_packed=llm.packed is not None, is_cuda=subject.options.is_cuda)
    room = FixedRoom(len(prompts), prefill_tokens=pass_tokens)
    seconds, texts = {}, {}
    with model.disable_adapter():
        for name in ("brim", "transformers"):
            for _ in range(2):  # the first is not timed
                started = _now(subject.options)
                if name == "brim":
                    engine = SlotsEngine(
                        model, settings=engine_settings, room=room, seed=SEED, device=llm.device,
                        precision=llm.precision, is_misled=False, packed=llm.packed,
                    )  # fmt: skip
                    texts[name] = [response.token_ids for response in respond_to(engine, prompts)]
                else:
                    ids = [row.input_ids.tolist() for row in prompts]
                    peers = {**settings, "eos_token_id": end}
                    texts[name] = respond("by_length", model, ids, batch_rows=len(ids), settings=peers)
                seconds[name] = _now(subject.options) - started
    tokens = len(prompts) * settings["max_new_tokens"]
    return {
        "tokens_per_s": tokens / seconds["brim"],
        "times_generate": seconds["transformers"] / seconds["brim"],
        "equal_texts": sum(map(list.__eq__, texts["brim"], texts["transformers"])),
        "all_tokens_written": all(sum(map(len, each)) == tokens for each in texts.values()),
    }


def _prompts(subject: Subject) -> tuple[TokenRows, dict[str, Any], int]:
    """Return prompts, settings of greedy generation, and an end that no vocabulary has."""
    llm, sizes = subject.loaded[1], subject.sizes
    lengths = subject.lengths("alpaca-like")[: sizes.prompts]
    rows = [replace(row, supervised=np.zeros(len(row.input_ids), dtype=np.bool_)) for row in drawn_rows(lengths, llm)]
    settings = {"max_new_tokens": sizes.new_tokens, "do_sample": False, "num_beams": 1, "pad_token_id": 0}
    return TokenRows.from_rows(rows), settings, int(llm.model.get_input_embeddings().weight.shape[0])


def _vllm(subject: Subject) -> Figures:
    if not subject.options.is_cuda or importlib.util.find_spec("vllm") is None:
        raise Skip("vLLM is not installed" if subject.options.is_cuda else "vLLM needs a CUDA device")
    prompts, settings, end = _prompts(subject)
    llm = subject.loaded[1]
    with tempfile.TemporaryDirectory() as folder:
        base_model(llm.model.merge_and_unload()).save_pretrained(folder)  # the last case of this model
        engine = VllmEngine(
            folder=folder, precision=llm.precision, device=llm.device, memory_share=0.6, seed=SEED,
            settings={**settings, "eos_token_id": [end]},
        )  # fmt: skip
        started = _now(subject.options)
        texts = respond_to(engine, prompts)
        seconds = _now(subject.options) - started
    tokens = sum(len(response.token_ids) for response in texts)
    return {"tokens_per_s_with_start": tokens / seconds, "tokens": tokens, "seconds": seconds}


# TRL


def _trl(subject: Subject, data: str, way: Way) -> Figures:
    """Train on the same rows, in micro-batches of as many rows as stay under the same cap in tokens."""
    if importlib.util.find_spec("trl") is None:
        raise Skip("TRL is not installed")
    options, sizes = subject.options, subject.sizes
    _, llm = subject.again()
    lengths = subject.lengths(data)
    rows = in_order(drawn_rows(lengths, llm), sizes.effective_rows)
    micro_rows = rows_under_cap([len(row.input_ids) for row in rows], way, sizes)
    times, losses, order = _trl_steps(llm, rows, way, micro_rows, options, sizes)
    figures = {
        **_speed(subject, order[sizes.effective_rows : len(rows)], times[-1] - times[1]),
        "micro_batch_rows": micro_rows,
    }
    figures["liger"] = kernels()["liger-kernel"] if options.is_cuda else None
    if way == "group_by_length" or data not in subject.losses:
        return {**figures, "losses_apart": None, "losses": losses}
    return {**figures, **_agreement(losses, subject.losses[data], 2e-2 if options.is_cuda else 1e-4)}


def rows_under_cap(lengths: Sequence[int], way: Way, sizes: Sizes) -> int:
    """Return the most rows of a micro-batch, a power of two, with which none of these is over the cap.

    lengths: in the order of training, but for rows that are grouped by length: of them, the longest may meet.
    """
    ordered = sorted(lengths, reverse=True) if way == "group_by_length" else lengths
    best, number = 1, 2
    while number <= sizes.effective_rows:
        batches = [ordered[at : at + number] for at in range(0, len(ordered), number)]
        tokens = (sum(batch) if way == "padding_free" else len(batch) * max(batch) for batch in batches)
        if max(tokens) > sizes.cap_tokens:
            break
        best, number = number, 2 * number
    return best


def _trl_steps(
    llm: LLM, rows: Sequence[TokenRow], way: Way, micro_rows: int, options: Options, sizes: Sizes
) -> tuple[list[float], list[float], list[int]]:
    """Return the times at the beginning and after each step, each step's loss, and the rows' tokens in their order."""
    from transformers.trainer_callback import PrinterCallback, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    times, order = [_now(options)], list[int]()

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *given: Any, **named: Any) -> None:
            times.append(_now(options))

    settings = PeerSettings(learning_rate=LEARNING_RATE, schedule="constant", max_grad_norm=1.0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            **common_arguments(settings, micro_rows, folder),
            "gradient_accumulation_steps": sizes.effective_rows // micro_rows,
            "max_length": None,
            "dataset_kwargs": {"skip_prepare_dataset": True},
            **OF_WAY[way],
        }
        if options.is_cuda:
            arguments |= {"use_cpu": False, "bf16": True, "use_liger_kernel": kernels()["liger-kernel"] is not None}
        trainer = SFTTrainer(
            model=llm.model, args=SFTConfig(**arguments), train_dataset=as_dataset(rows), processing_class=_tokenizer()
        )
        collate = trainer.data_collator

        def noting(examples: Sequence[Mapping[str, Any]]) -> Any:
            order.extend(len(example["input_ids"]) for example in examples)
            return collate(examples)

        trainer.data_collator = noting
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Clock())
        trainer.train()
        trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)  # the model's own forward again
    return times, [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry], order


def _tokenizer() -> Any:
    """Return one that knows padding and end: the rows are tokens already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
