"""Does brim still do the same? `make same` compares this checkout with the commit before, to the bit.

`python -m tools.same [COMMIT …]` records what the checkout does, and each commit in a worktree of its own, and names
the first differences: losses, plan, predictions and evaluation of the demo on fewer rows, `brim memory` of three
models, and `brim check`. What else decides is held fast: one thread, a memory budget, a fresh cache, clocks that tick
by themselves and a process of a fixed size, since memory and measured seconds choose how a batch is divided.
`--twice` records each of them two times, to see that one equals itself. Exit status 1: there is a difference.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
NUM_ROWS = 96
SETTINGS = (f"preprocessing.sample_size={NUM_ROWS}", "trainer.effective_batch_size=16", "memory.budget=6GiB")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
ARCHITECTURES: Mapping[str, Mapping[str, object]] = {
    "llama": LLAMA,
    "qwen2": {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_attention_heads": 16,
              "num_key_value_heads": 2, "vocab_size": 151_936},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
             "n_positions": 1024, "vocab_size": 50_257},
}  # fmt: skip
MEMORY = (
    "--sequence-length 1024 --batch-size 4 --device t4",
    "--sequence-length 1024 --batch-size 4 --device a100-80gb trainer.enable_gradient_checkpointing=false",
    "--phase generate --batch-size 8 --sequence-length 512 --device rtx-4090 adapter=null",
)

# The clocks of the process tick a millisecond a look, and its memory is what is written here, so that nothing is chosen
# by how busy the machine is, or by which modules happened to be loaded.
_START = """
import itertools, pathlib, runpy, sys, time
memory = {
    "/proc/self/statm": "500000 120000 40000 1 0 100000 0",
    "/proc/self/status": "VmHWM:\\t480000 kB\\nVmRSS:\\t480000 kB\\nRssAnon:\\t320000 kB\\nRssFile:\\t160000 kB",
}
read = pathlib.Path.read_text
pathlib.Path.read_text = lambda path, *a, **k: memory[str(path)] if str(path) in memory else read(path, *a, **k)
ticks = itertools.count()
time.perf_counter = lambda: next(ticks) / 1000
time.perf_counter_ns = lambda: next(ticks) * 1_000_000
sys.argv = ["brim", *sys.argv[1:]]
runpy.run_module("brim", run_name="__main__")
"""
# What may differ between two runs that do the same: times, memory that was measured, folders, versions of brim.
_FREE_KEYS = re.compile(
    r"seconds|_s$|per_s|peak_bytes|measured|held_bytes|cpu|time|left_bytes|host|date|started|pid|rss"
)
_NO_TEXT = re.compile(r"\d+(\.\d+)? ?(s|ms|min|h|MiB|GiB|MB|GB)\b|\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?|brim \S+,")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.same", description=__doc__)
    parser.add_argument("commits", nargs="*", help="to compare the checkout with; default: the commit before HEAD")
    parser.add_argument("--twice", action="store_true", help="record each two times")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="brim-same-") as name:
        work = Path(name)
        _make_inputs(work)
        recorded: list[tuple[str, Mapping[str, str]]] = []
        for title, tree in [("the checkout", ROOT), *((commit, None) for commit in asked.commits or ["HEAD~1"])]:
            with _tree(title, tree, work) as source:
                for turn in range(1 + asked.twice):
                    print(f"recording {title}{', again' if turn else ''}", flush=True)
                    recorded.append((title, record(source, work)))
    first, *others = recorded
    return max((_compare(first, other) for other in others), default=0)


def _make_inputs(work: Path) -> None:
    """Write the rows and the architectures, once for all that are compared."""
    subprocess.run(
        [sys.executable, "-c", "import demo, sys; demo.OUTPUT = demo.Path(sys.argv[1]); demo._write_data()", str(work)],
        cwd=ROOT / "examples",
        check=True,
        stdout=subprocess.DEVNULL,
    )
    for name, architecture in ARCHITECTURES.items():
        (work / name).mkdir()
        (work / name / "config.json").write_text(json.dumps(architecture), encoding="utf-8")


@contextmanager
def _tree(commit: str, tree: Path | None, work: Path) -> Iterator[Path]:
    """Yield the folder of the source: the checkout's own, or a worktree of the commit."""
    if tree is not None:
        yield tree
        return
    folder = work / "tree"
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(folder), commit], cwd=ROOT, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(folder)], cwd=ROOT, check=True)


def record(tree: Path, work: Path) -> dict[str, str]:
    """Run the source in the tree, and return a text for each thing that is looked at."""
    run, rows, predictions = work / "run", work / "rows.jsonl", work / "predictions.jsonl"
    cache = work / "cache"
    for path in (run, cache):
        shutil.rmtree(path, ignore_errors=True)
    for path in work.glob("predictions*"):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
    rows.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "BRIM_CACHE_DIR": str(cache),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
    }

    def brim(*arguments: str | Path) -> str:
        command = [sys.executable, "-W", "ignore", "-c", _START, *map(str, arguments)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        return f"exit status {done.returncode}\n{_plain(done.stdout, work)}" + (
            f"\n{_plain(done.stderr, work)}" if done.returncode else ""
        )

    config = ROOT / "examples" / "stdlib_code" / "config.yaml"
    data, test = work / "train.jsonl", work / "to_predict.jsonl"
    found = {"check": brim("check", config, "--dataset", data, *SETTINGS)}
    found["plan"] = brim("plan", config, "--dataset", data, *SETTINGS, "--json")
    found["train"] = brim("train", config, "--dataset", data, "--output-directory", run, *SETTINGS).splitlines()[0]
    for file in ("metrics.jsonl", "plan.json", "config.yaml"):
        found[file] = _plain((run / file).read_text(encoding="utf-8"), work) if (run / file).exists() else "missing"
    found["predict"] = brim(
        "predict", run, "--dataset", test, "--output", predictions, "memory.budget=6GiB"
    ).splitlines()[0]
    found["predictions"] = predictions.read_text(encoding="utf-8") if predictions.exists() else "missing"
    found["evaluate"] = brim("evaluate", run, "--split", "train", "--rows", rows, "--json", "memory.budget=6GiB")
    found["rows"] = rows.read_text(encoding="utf-8") if rows.exists() else "missing"
    for name in ARCHITECTURES:
        settings = work / f"{name}.yaml"
        settings.write_text(
            f"model_type: llm\nbase_model: {work / name}\nadapter: {{type: lora}}\n"
            "input_features: [{name: text, type: text}]\noutput_features: [{name: answer, type: text}]\n"
            "trainer: {type: finetune}\n",
            encoding="utf-8",
        )
        for question in MEMORY:
            found[f"memory of {name} {question}"] = brim("memory", settings, *question.split(), "--json")
    return found


def _plain(text: str, work: Path) -> str:
    """Return the text without what may differ: the folder, and figures that depend on a clock or on free memory."""
    lines = []
    for line in text.replace(str(work), "WORK").splitlines():
        try:
            content = json.loads(line)
        except ValueError:
            lines.append(_NO_TEXT.sub("~", line))
        else:
            lines.append(json.dumps(_without_free(content), ensure_ascii=False))
    whole = "\n".join(lines)
    try:
        return json.dumps(_without_free(json.loads(text.replace(str(work), "WORK"))), indent=1, ensure_ascii=False)
    except ValueError:
        return whole


def _without_free(content: object) -> object:
    if isinstance(content, dict):
        return {key: _without_free(value) for key, value in content.items() if not _FREE_KEYS.search(key)}
    if isinstance(content, list):
        return [_without_free(each) for each in content]
    return _NO_TEXT.sub("~", content) if isinstance(content, str) else content


def _compare(first: tuple[str, Mapping[str, str]], other: tuple[str, Mapping[str, str]]) -> int:
    """Print what differs; 1 if anything does."""
    different = [name for name in first[1] if first[1][name] != other[1].get(name)]
    print(f"{first[0]} and {other[0]}: {len(first[1]) - len(different)} of {len(first[1])} alike")
    for name in different:
        print(f"\n{name}:")
        lines = difflib.unified_diff(
            other[1].get(name, "").splitlines(), first[1][name].splitlines(), other[0], first[0], lineterm="", n=1
        )
        print("\n".join(line[:400] for line in list(lines)[:30]))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
