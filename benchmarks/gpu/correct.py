"""Check that what brim computes on this device is right: attention of packed rows, losses, texts, replays, waits."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.gpu.attention import attention_cases
from benchmarks.gpu.cases import Case, Figures, Options, Skip, require_liger
from benchmarks.gpu.subject import LORA, SEED, changed, drawn_rows, packing, random_llm, token_costs
from benchmarks.inference_peers import generate
from brim.batching import GradientStep, by_costs
from brim.data.tokens import TokenRow, TokenRows, pack
from brim.infer.engines import FixedRoom, SlotsEngine, StaticEngine, respond_to
from brim.models import LLM, precision
from brim.models.loss import LogitHead, NextToken, logit_head
from brim.models.packing import passing
from brim.train import MicroBatchPass


def cases(options: Options) -> Iterator[Case]:
    """Yield every check; the suite's tests, which take longest, last."""
    yield from attention_cases(options)
    yield from _packed_cases(options)
    yield from _adapter_cases(options)
    yield Case(
        name="engines against transformers' generate, greedy, fp32",
        run=partial(_texts, options),
        passes=lambda found: all(found["equal"][name] == found["rows"] for name in found["equal"]),
        expects="the same tokens, row by row",
    )
    for packed in (False, True):
        yield Case(
            name=f"{_layout(packed)} step that runs out of memory",
            run=partial(_replay, options, packed=packed),
            passes=lambda found: found["num_out_of_memory"] > 0 and found["gradient"] <= 1e-5 and found["loss"] <= 1e-5,
            expects="it is repeated, with the loss and gradient of a step that did not, to 1e-5 in fp32",
        )
        yield Case(
            name=f"waits and kernels of a {_layout(packed)} micro-batch",
            run=partial(_waits, options, packed=packed),
            passes=partial(waits_at_most, 0, options.is_cuda),
            expects="the host never waits for the device",
        )
    yield from _suite_cases(options)


def _layout(packed: bool) -> str:
    return "packed" if packed else "padded"


# Packed rows against padded ones

_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 40},
}
_LENGTHS = (90, 130, 1, 47, 200, 64, 11)


def _rows(llm: LLM, options: Options) -> TokenRows:
    """Draw rows; few where all is small, since a CPU makes each shape in 16 bits ready anew."""
    return drawn_rows((60, 1, 47) if options.small else _LENGTHS, llm)


def architecture(family: str, options: Options, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a small model, with heads of 64 in any size."""
    width = 128 if options.small else 512
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": width // 64, "head_dim": 64}
    depth = {"num_hidden_layers": 2 if options.small else 4, "num_key_value_heads": width // 128}
    tokens = {"vocab_size": 500, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    others = {"max_position_embeddings": 2048, "tie_word_embeddings": False}
    return {"model_type": family, **sizes, **depth, **tokens, **others, **_FAMILIES[family], **changes}


def _packed_cases(options: Options) -> Iterator[Case]:
    for family, kind in product(_FAMILIES, ("fp32", "bf16-true", "fp16-mixed")):
        yield Case(
            name=f"packed against padded rows, {family}, {kind}",
            run=partial(_packed_against_padded, options, family, kind),
            passes=partial(_is_as_near, kind),
            expects="packed rows are as near to fp32 as padded ones (in fp32 1e-5 apart), and no row sees another",
        )


def _is_as_near(kind: str, found: Figures) -> bool:
    if found["leaked"] or not found["changed"]:
        return False
    if kind == "fp32":
        return bool(max(found["packed_gradient"], found["packed_loss"]) <= 1e-5)
    # A loss may be near by chance.
    is_loss = found["packed_loss"] <= 2 * found["padded_loss"] + 1e-3
    return bool(is_loss and found["packed_gradient"] <= 1.5 * found["padded_gradient"])


def _packed_against_padded(options: Options, family: str, kind: str) -> Figures:
    """Return relative errors of loss and gradient against padded rows in fp32, of the same weights."""
    exact = _loaded(options, architecture(family, options), {"precision": "fp32"})
    with torch.no_grad():
        for weight in exact.model.parameters():
            weight.copy_(weight.bfloat16())
    rows = _rows(exact, options)
    expected = gradient_of(exact, list(rows))
    low = exact if kind == "fp32" else _in_precision(exact, kind)
    errors = {
        name: apart(gradient_of(llm, list(rows)), expected) for name, llm in (("padded", low), ("packed", packing(low)))
    }
    figures = {f"{name}_{which}": error[which] for name, error in errors.items() for which in ("loss", "gradient")}
    return {**figures, **_seen_by_others(packing(low), list(rows))}


def _in_precision(llm: LLM, kind: str) -> LLM:
    given = precision(cast(Any, kind))
    model = copy.deepcopy(cast(Any, llm.model)).to(given.weights_dtype(frozen=False))
    return _with_model(replace(llm, precision=given), model)


def _with_model(llm: LLM, model: Any) -> LLM:
    head = logit_head(model)
    return replace(llm, model=model, objective=NextToken(head=head if isinstance(head, LogitHead) else None))


def _seen_by_others(llm: LLM, rows: Sequence[TokenRow]) -> Figures:
    """Change one row's tokens: its own loss must change, and that of no other row, not by a bit."""

    def losses(given: Sequence[TokenRow]) -> Tensor:
        batch = pack(given, pad_id=0).to(llm.device)
        with torch.no_grad(), passing(llm.packed, batch.packed), llm.precision.autocast(llm.device, keeps_copies=False):
            return llm.objective.scores(llm.model, batch).loss

    before, after = losses(rows), losses([changed(rows[0]), *rows[1:]])
    apart = (before - after).abs()
    return {"changed": float(apart[0]), "leaked": float(apart[1:].max())}


def _loaded(options: Options, config: Mapping[str, Any], settings: Mapping[str, Any]) -> LLM:
    trainer = {"type": "finetune", "chunked_loss": True}
    with tempfile.TemporaryDirectory() as folder:
        return random_llm(config, Path(folder), options.device, {"trainer": trainer, **settings})[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """Hold the loss of some rows, and its gradient as one vector."""

    loss: float
    vector: Tensor  # fp64


def gradient_of(llm: LLM, rows: Sequence[TokenRow]) -> Gradient:
    """Let brim's own pass go over the rows, all together, in training mode."""
    llm.model.train()
    llm.model.zero_grad()
    loss, scaler = _pass(llm)(rows, _supervised(rows), step=0), _scaler(llm)
    scale = scaler.get_scale() if llm.precision.scales_loss else 1.0
    gradient = Gradient(loss=float(loss), vector=_vector(llm) / scale)
    llm.model.zero_grad()
    return gradient


def _pass(llm: LLM) -> MicroBatchPass:
    return MicroBatchPass(llm=llm, pad_id=0, scaler=_scaler(llm))


def _scaler(llm: LLM) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(llm.device.type, init_scale=2.0**8, enabled=llm.precision.scales_loss)


def _supervised(rows: Iterable[TokenRow]) -> int:
    return sum(int(row.supervised[1:].sum()) for row in rows)  # nothing comes before a row's first token


def _vector(llm: LLM) -> Tensor:
    gradients = [p.grad.flatten() for p in llm.model.parameters() if p.grad is not None]
    return torch.cat([each.double() for each in gradients])


def apart(found: Gradient, expected: Gradient) -> dict[str, float]:
    """Return the relative differences."""
    return {
        "loss": abs(found.loss / expected.loss - 1),
        "gradient": float((found.vector - expected.vector).norm() / expected.vector.norm()),
    }


# Adapters by a function of brim's own, and other kernels, where there are such

_FUNCTION = "brim.models.adapter_function"


def _adapter_cases(options: Options) -> Iterator[Case]:
    tolerances = {"fp32": 1e-5, "bf16-true": 2e-2}
    for kind, tolerance in tolerances.items():
        for name, run in (
            ("adapter function against PEFT's", _adapter_function),
            ("Liger's kernels against torch's", _liger),
        ):
            yield Case(
                name=f"{name}, {kind}",
                run=partial(run, options, kind),
                passes=lambda found, tolerance=tolerance: max(found["loss"], found["gradient"]) <= tolerance,  # type: ignore[misc]
                expects=f"one loss and gradient, to {tolerance:g}",
            )


def _adapter_function(options: Options, kind: str) -> Figures:
    if importlib.util.find_spec(_FUNCTION) is None:
        raise Skip("not there: this brim has PEFT's layers alone")
    import peft

    llm = _loaded(options, architecture("llama", options), {"precision": kind})
    settings = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    llm = _with_model(llm, peft.get_peft_model(llm.model, settings))
    _draw_adapters(llm)
    rows = list(_rows(llm, options))
    expected = gradient_of(llm, rows)
    importlib.import_module(_FUNCTION).use_adapter_function(llm.model)
    return apart(gradient_of(llm, rows), expected)


def _draw_adapters(llm: LLM) -> None:
    """Half of an adapter's weights are 0 in the beginning, and so would be half of its gradient."""
    with torch.no_grad():
        for name, weight in llm.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.02)


def _liger(options: Options, kind: str) -> Figures:
    require_liger(options)
    found = {}
    for kernels in ("torch", "liger"):
        settings = {"precision": kind, "adapter": dict(LORA), "model_parameters": {"kernels": kernels}}
        llm = _loaded(options, architecture("llama", options), settings)
        _draw_adapters(llm)
        found[kernels] = gradient_of(llm, list(_rows(llm, options)))
    return apart(found["liger"], found["torch"])


# Engines


def _texts(options: Options) -> Figures:
    """Count the rows for which brim's engines write what transformers writes for each row alone."""
    llm = _loaded(options, architecture("llama", options, initializer_range=0.2), {"precision": "fp32"})
    model = llm.model.eval()
    lengths = np.random.default_rng(SEED).integers(2, 40, 8 if options.small else 24)
    prompts = TokenRows.from_rows(
        replace(row, supervised=np.zeros(len(row.input_ids), dtype=np.bool_))
        for row in drawn_rows(lengths.tolist(), llm)
    )
    end = 0
    settings = {"max_new_tokens": 6 if options.small else 32, "do_sample": False, "num_beams": 1, "pad_token_id": 1}
    peers = {**settings, "eos_token_id": end}
    expected = [next(iter(generate(model, [row.input_ids.tolist()], peers))) for row in prompts]
    equal = {}
    for kind, packed in ((SlotsEngine, None), (SlotsEngine, packing(llm).packed), (StaticEngine, None)):
        engine = kind(
            model, room=FixedRoom(5, prefill_tokens=64), settings={**settings, "eos_token_id": [end]}, seed=SEED,
            device=options.device, precision=llm.precision, packed=packed,
        )  # fmt: skip
        texts = [response.token_ids for response in respond_to(engine, prompts)]
        equal[engine.name if packed is None else f"{engine.name}, packed"] = sum(
            one == other for one, other in zip(texts, expected, strict=True)
        )
    return {"rows": len(prompts), "tokens": sum(map(len, expected)), "equal": equal}


# Memory that runs out


def _replay(options: Options, *, packed: bool) -> Figures:
    """Compare a step that runs out of memory with one that does not; on a CPU, where nothing does, it is pretended."""
    llm = _loaded(options, architecture("llama", options), {"precision": "fp32"})
    llm = packing(llm) if packed else llm
    rows = list(drawn_rows([40, 90, 64, 7, 130, 80] * (1 if options.small else 8), llm))
    lengths = [len(row.input_ids) for row in rows]
    run_pass = _pass(llm)
    events: list[Mapping[str, Any]] = []
    most_tokens = sum(lengths)

    def backward(positions: NDArray[np.intp]) -> Tensor:
        chosen = [rows[position] for position in positions.tolist()]
        if sum(len(row.input_ids) for row in chosen) > most_tokens:
            raise torch.OutOfMemoryError("as if memory had run out")
        return run_pass(chosen, _supervised(rows), step=0)

    def step() -> Gradient:
        # Room for all rows in one micro-batch, whatever the padding.
        cutter = by_costs(token_costs(packed=packed), cap_bytes=2 * len(rows) * max(lengths))
        parameters = list(llm.model.parameters())
        outcome = GradientStep(cutter=cutter, parameters=parameters, backward=backward, on_event=events.append).run(
            lengths
        )
        return Gradient(loss=outcome.loss, vector=_vector(llm))

    llm.model.train()
    step()  # cuBLAS's workspaces
    if options.is_cuda:
        torch.cuda.reset_peak_memory_stats(options.device)
        before_bytes = torch.cuda.memory_allocated(options.device)
    expected = step()
    assert not events, "the step that should not have run out of memory did"
    added_bytes = torch.cuda.max_memory_allocated(options.device) - before_bytes if options.is_cuda else 0
    llm.model.zero_grad()
    most_tokens = sum(lengths) if options.is_cuda else sum(lengths) // 2
    with _room_for(added_bytes * 6 // 10) if options.is_cuda else nullcontext():
        found = step()
    counts = Counter(event["event"] for event in events)
    replays = [event["num_micro_batches"] for event in events if event["event"] == "replay"]
    return {**apart(found, expected), "num_out_of_memory": counts["oom"], "micro_batches": replays}


@contextmanager
def _room_for(num_bytes: int) -> Iterator[None]:
    """Leave so many bytes beside what is allocated."""
    torch.cuda.empty_cache()
    allowed_bytes = torch.cuda.memory_reserved() + num_bytes
    torch.cuda.set_per_process_memory_fraction(allowed_bytes / torch.cuda.mem_get_info()[1])
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# Waits and kernels

# The last of them is seen without a device, too.
_WAITS = ("streams_waited_for", "copies_to_host", "values_read")
# Operators after which the host knows values of a tensor, or a shape that depends on them.
VALUES_READ = frozenset(
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "bincount", "repeat_interleave"),
        *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
    )
)
_PASSES = 3


def _waits(options: Options, *, packed: bool) -> Figures:
    """Count by PyTorch's profiler; on a CPU, what would wait for a device and the operators are counted."""
    settings = {"precision": "bf16-true", "adapter": dict(LORA)}
    llm = _loaded(options, architecture("llama", options), settings)
    llm = packing(llm) if packed else llm
    rows, run_pass = list(_rows(llm, options)), _pass(llm)
    llm.model.train()
    run_pass(rows, 1, step=0)
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if options.is_cuda else [])]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(_PASSES):
            run_pass(rows, 1, step=0)
    return counted(Counter(event.name for event in profile.events()))


def waits_at_most(most: float, is_cuda: bool, found: Figures) -> bool:
    """Judge the figures; a profiler that saw no kernel on a CUDA device saw no waits, either."""
    is_seen = found["launches"] > 0 or not is_cuda
    return bool(is_seen and max(found[name] for name in _WAITS) <= most)


def counted(names: Mapping[str, int]) -> Figures:
    """Return figures of one micro-batch. names: how often the profiler saw each event in all passes."""

    def count(matches: Callable[[str], bool]) -> float:
        return sum(number for name, number in names.items() if matches(name)) / _PASSES

    return {
        "streams_waited_for": count(lambda name: name in ("cudaStreamSynchronize", "cudaEventSynchronize")),
        "copies_to_host": count(lambda name: name.startswith("Memcpy DtoH")),
        "values_read": count(lambda name: name in VALUES_READ),
        "launches": count(lambda name: name.startswith(("cudaLaunchKernel", "cuLaunchKernel"))),
        "operators": count(lambda name: name.startswith("aten::")),
    }


# The suite's tests

_ROOT = Path(__file__).parents[2]


def _suite_cases(options: Options) -> Iterator[Case]:
    for file in sorted((_ROOT / "tests" / "gpu").glob("test_*.py")):
        yield Case(
            name=f"suite: {file.name}",
            run=partial(_suite, options, file),
            passes=lambda found: found["passed"] > 0 and not found["not_passed"],
            expects="all of its tests pass",
            needs_s=60,
        )


def _suite(options: Options, file: Path) -> Figures:
    if not options.is_cuda:
        raise Skip("its tests need a CUDA device")
    missing = [name for name in ("pytest", "hypothesis", "filelock") if importlib.util.find_spec(name) is None]
    if missing:
        raise Skip(f"not installed: {', '.join(missing)}")
    command = [sys.executable, "-m", "pytest", str(file), "-q", "-rfE", "-p", "no:cacheprovider"]
    command += ["-p", "_hypothesis_pytestplugin"]  # of the plugins that are installed, the one that the suite needs
    command += ["-o", "filterwarnings=default", "-o", "addopts=--import-mode=importlib", "--tb=line"]
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    try:
        done = subprocess.run(
            command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False,
            timeout=options.left_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Skip(f"not over after {error.timeout:.0f} s") from None
    return suite_figures(done.stdout or done.stderr)


def suite_figures(output: str) -> Figures:
    """Return the counts of pytest's last line, and the tests that did not pass."""
    last = output.strip().splitlines()[-1] if output.strip() else ""
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)s?\b", last)}
    found = re.findall(r"^(?:FAILED|ERROR) \S*?([\w-]+\.py\S*)", output, re.MULTILINE)
    broken = found or [last] * bool(not counts or counts.keys() & {"failed", "error"})
    return {"passed": counts.get("passed", 0), "skipped": counts.get("skipped", 0), "not_passed": broken}
