"""Write the page of measured figures from benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


_INTRODUCTION = """\
# Figures

<!-- Written by `make docs` from benchmarks/results; changes here are lost. -->

Each figure comes from a file in [benchmarks/results](../benchmarks/results), which names its machine, versions, command
and date. Timings are ratios of commands that ran in turn on the same machine, medians of several rounds. Everything
here ran on two CPU cores: **nothing has run on a GPU yet**.

| what | figure | command, date |
| --- | --- | --- |
"""


def figures_page() -> str:
    """Return the page as Markdown: a row for each figure."""
    lines = []
    for name, rows in _ROWS.items():
        result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for what, figure in rows(result):
            lines.append(f"| {what} | {figure} | {_made_by(name, result)} |\n")
    return _INTRODUCTION + "".join(lines)


def _made_by(name: str, result: Mapping[str, Any]) -> str:
    if name == "faults":
        return f"`make faults`, {max(each['date'] for each in result['faults'].values())}"
    return f"`{result['command']}`, {result['date']}"


_Rows = Iterator[tuple[str, str]]


def _losses(result: Mapping[str, Any]) -> _Rows:
    found = result["comparisons"]
    ours = [each for each in found if each["against"] == "brim, micro-batch 1"]
    for method, title in (("lora", "LoRA"), ("full", "full training")):
        largest = max(e["largest_relative_difference"] for e in ours if e["scenario"].startswith(method))
        what = f"losses of an epoch at effective batch 32, {title}: micro-batches of 4 and 32 rows against 1 (fp32)"
        yield what, f"{largest:.1e}, the largest relative difference of any step"
    peers = [e for e in found if e["verdict"] == "equal" and e not in ours]
    largest = max(each["largest_relative_difference"] for each in peers)
    yield "… against transformers' `Trainer` and TRL's `SFTTrainer`, with equal learning rates", f"{largest:.1e}"


def _batching(result: Mapping[str, Any]) -> _Rows:
    peers = {each["name"]: each for each in result["contenders"]}
    named = {
        "fixed": "the micro-batch that a hand search found",
        "packing": "packing",
        "padding_free": "padding-free",
        "auto_find": "`auto_find_batch_size`",
    }
    ratios = ", ".join(f"{peers[name]['brim_is_faster']:.2f}× ({words})" for name, words in named.items())
    what = f"an epoch of {result['num_rows']} rows at effective batch 32, nothing tuned, against TRL's `SFTTrainer`"
    yield (
        what,
        f"faster by {ratios}; padding {peers['brim']['padding'] - 1:.0%} against {peers['fixed']['padding'] - 1:.0%}",
    )
    seconds = ", ".join(f"{each['seconds_with_caches']:.1f} s" for each in result["planning"])
    yield "planning a million rows at effective batch 32 and 256, model traced before", seconds


def _search(result: Mapping[str, Any]) -> _Rows:
    contenders = result["contenders"]
    own = contenders["brim predict"]
    yield (
        f"finding the largest batch under a real memory limit, {result['cases']} random models: out of memory, probes",
        f"{own['out_of_memory']['sum']} and {own['probes']['sum']} in all (accelerate "
        f"{contenders['accelerate']['out_of_memory']['sum']:,} and {contenders['accelerate']['probes']['sum']:,}, "
        f"Lightning {contenders['Lightning power']['out_of_memory']['sum']} and "
        f"{contenders['Lightning power']['probes']['sum']}); {own['cases_at_98_percent']} within 2% of the largest, "
        f"{own['cases_within_one_row']} within one row",
    )


def _dealing(result: Mapping[str, Any]) -> _Rows:
    what = "effective batches dealt among ranks, a made-up law of time: share of the ideal, one rank's time ÷ ranks"
    for rows in ("padded", "packed"):
        found = [each for each in result["dealt"] if each["rows"] == rows and each["most_tokens"] == 2048]
        yield (
            f"{what}, {rows}",
            "; ".join(
                f"{each['effective_batch_size']} rows on {each['ranks']} {each['of_ideal']:.0%} "
                f"(in lockstep {each['of_ideal_in_lockstep']:.0%}), dealt in {1000 * each['deal_s']:.1f} ms"
                for each in found
                if (each["effective_batch_size"], each["ranks"]) in ((32, 4), (128, 8), (512, 32))
            ),
        )
        what = "…"


def _inference(result: Mapping[str, Any]) -> _Rows:
    peers = {each["name"]: each for each in result["speed"]["speed"]}
    named = {
        "static": "the best of three batch sizes by hand",
        "by_length": "the same sorted by length",
        "row by row": "row by row",
    }
    ratios = ", ".join(
        f"{peers[name]['brim_is_faster']:.1f}× and {peers[name]['brim_is_faster_in_all']:.1f}× ({words})"
        for name, words in named.items()
    )
    what = f"predicting {result['num_rows']} real prompts (greedy, fp32, equal texts) against transformers' `generate`"
    yield f"{what}: generation alone, and with load, plan and file", f"faster by {ratios}"
    kills = result["kills"]
    yield (
        f"a prediction killed {kills['num_kills']} times at random moments and resumed",
        f"{'the file of an uninterrupted run' if kills['is_equal'] else 'another file'}; at most "
        f"{kills['most_rows_repeated']} rows, a batch, repeated each time",
    )


def _kills(result: Mapping[str, Any]) -> _Rows:
    runs, kills, equal = (
        sum(each[name] for each in result["kinds"]) for name in ("num_runs", "num_kills", "num_equal")
    )
    what = f"runs whose batch moves (ramps, a table, a function, the noise scale), killed {kills} times and resumed"
    yield what, f"{equal} of {runs} equal to the bit: lines, weights, optimizer, random states"


def _schedules(result: Mapping[str, Any]) -> _Rows:
    seconds = sorted(each["seconds"] for each in result["planning"])
    figure = f"{1000 * seconds[len(seconds) // 2]:.1f} ms in the median, {1000 * seconds[-1]:.0f} ms at most"
    yield "planning a schedule over 1e12 tokens", figure


def _ramp(result: Mapping[str, Any]) -> _Rows:
    what = "peak memory of the phases of a ramp from 8 to 512 rows, under a budget that binds"
    yield what, f"within {result['resident_spread']:.1%} (resident), {result['tensor_spread']:.0%} (tensors alone)"


def _noise(result: Mapping[str, Any]) -> _Rows:
    what = "the gradient's noise scale, measured while training, over that of gradients taken row by row"
    cost = result["cost"][0]["measured"]
    yield what, f"{result['accuracy'][0]['noise_scale']:.2f}; a measured step takes {cost:.1f} times a plain one"


def _public(result: Mapping[str, Any]) -> _Rows:
    for each in result["goals"]:
        yield f"prediction beside public runs on A100s: {each['what']} ({each['rows']} runs)", each["reached"]


def _known(result: Mapping[str, Any]) -> _Rows:
    agree = sum(each["agrees"] for each in result["figures"])
    what = "prediction beside figures that people know, such as LitGPT's and torchtune's tables"
    yield (
        what,
        f"{agree} of {len(result['figures'])} agree; [the others are explained](memory.md#figures-that-people-know)",
    )


def _cards(result: Mapping[str, Any]) -> _Rows:
    what = f"answers of `brim memory --compare` against `--device`, {result['num_pairs']} models, ways and cards"
    yield what, f"{result['num_unequal']} unequal"


def _cpu(result: Mapping[str, Any]) -> _Rows:
    before, after = (
        f"{error['median']:.2%} in the median, {error['largest']:.2%} at most"
        for error in (result["error"], result["error_calibrated"])
    )
    yield (
        f"prediction beside this CPU's resident memory, {result['shapes']} shapes",
        f"{before}; after one probe {after}",
    )


def _memory_time(result: Mapping[str, Any]) -> _Rows:
    for key, words in (("first_s", "in a process"), ("command_s", "the command, most of it imports")):
        seconds = [each[key] for each in result["timings"]]
        yield f"time of a prediction for Llama-2-7B and 70B, {words}", f"{min(seconds):.1f} to {max(seconds):.1f} s"


def _loop(result: Mapping[str, Any]) -> _Rows:
    cases = ", ".join(f"{each['wall_ratio'] - 1:.1%} ({each['case']})" for each in result["cases"][:3])
    yield "cost of the loop over a bare PyTorch loop, with logs and progress bar, of steps of about a second", cases


def _startup(result: Mapping[str, Any]) -> _Rows:
    seconds = ", ".join(f"`{each['command']}` {each['median_s']:.2f} s" for each in result["commands"][1:])
    yield "start-up, without torch", seconds


def _faults(result: Mapping[str, Any]) -> _Rows:
    rows = [row for kind in result["faults"].values() for row in kind["rows"].values()]
    passed, failed = (sum(row[name] for row in rows) for name in ("passed", "failed"))
    what = "kills, full disks, damaged files, NaN, bad and hostile input: trials in which brim kept its promise"
    yield what, f"{passed:,} of {passed + failed:,} ([what a run survives](reliability.md))"


def _quantized(result: Mapping[str, Any]) -> _Rows:
    losses = "; ".join(f"{e['base']} {e['loss_before']:.3f} → {e['loss_after']:.3f}" for e in result["runs"])
    yield "QLoRA on the demo's base, 200 rows: test loss", losses


def _flips(result: Mapping[str, Any]) -> _Rows:
    rates = ", ".join(
        f"{each['rate']:.0%} ({each['precision']})" for each in result["engines"] if each["engine"] == "slots"
    )
    yield "greedy texts that differ from those of rows alone, by rounding", rates


def _compared(result: Mapping[str, Any]) -> _Rows:
    base = result["summaries"][0]
    shown = ", ".join(
        f"{each['name']} {each['differences']['validation']['mean']:+.4f}"
        for each in result["summaries"][1:]
        if "validation" in each["differences"]
    )
    what = f"batch schedules on equal tokens, {len(result['seeds'])} seeds: validation loss beside {base['name']}"
    yield what, f"{base['losses']['validation']['mean']:.4f}; {shown}"


_ROWS: dict[str, Callable[[Mapping[str, Any]], _Rows]] = {
    "memory_public": _public,
    "memory_known": _known,
    "memory_cards": _cards,
    "memory_cpu": _cpu,
    "memory_time": _memory_time,
    "loss_equality": _losses,
    "batching": _batching,
    "batching_search": _search,
    "dealing": _dealing,
    "inference": _inference,
    "schedule_kills": _kills,
    "faults": _faults,
    "schedules": _schedules,
    "ramp_memory": _ramp,
    "noise_scale": _noise,
    "batch_schedules": _compared,
    "quantized_bases": _quantized,
    "flip_rate": _flips,
    "loop_overhead": _loop,
    "startup": _startup,
}
