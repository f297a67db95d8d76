"""Make what lies in this folder: a base model, a run, one that is stopped, predictions, and their cache."""

import json
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
os.chdir(HERE)  # so that every path in a file is relative
os.environ.update(BRIM_CACHE_DIR="cache", HF_HUB_CACHE="hub", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")

import pandas as pd  # noqa: E402
import torch  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

import brim  # noqa: E402

SOUNDS = {"cow": " moo", "cat": " meow", "dog": " bark", "duck": " quack"}
WHOSE = ["the", "a", "my", "one"]
COMMIT = "59795c4" + 33 * "0"  # of the base model: only its form matters
STOPPED_AFTER = 56  # of 64 steps
DONE: list[int] = []  # rows of the prediction that is interrupted


def make_hub(cache: Path) -> None:
    """Write the base model as one that was downloaded, so that the runs name it and no path."""
    model = cache / "models--made-by-59795c4--sounds"
    snapshot = model / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    make_base(snapshot)


def make_base(folder: Path) -> None:
    """Write a Llama of 24,000 random weights that can be taught, with a tokenizer of bytes and no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<|end|>", "<|pad|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|pad|>"])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|pad|>"})
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.4,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_rows(path: Path) -> None:
    """Write 24 rows to train on, 4 to validate on and 12 to test: sixteen questions, all among the first."""
    lines = []
    for number in range(40):
        animal = list(SOUNDS)[number % 4]
        question = f"{WHOSE[number // 4 % 4]} {animal} says"
        split = 0 if number < 24 else 1 if number < 28 else 2
        lines.append(json.dumps({"question": question, "answer": SOUNDS[animal], "split": split}))
    path.write_text("\n".join(lines) + "\n")


class CtrlC:
    """An observer that interrupts this process after a step."""

    def start(self, **_: object) -> None: ...

    def write(self, record: dict[str, object]) -> None:
        if record["step"] == STOPPED_AFTER and "loss" in record:
            os.kill(os.getpid(), signal.SIGINT)

    def close(self) -> None: ...


def ctrl_c(num_rows: int) -> None:
    """Interrupt a prediction once 16 of its rows are done."""
    DONE.append(num_rows)
    if sum(DONE) >= 16:
        raise KeyboardInterrupt


def forget_machine(run: Path) -> None:
    """Remove what names the machine: the host in the name of TensorBoard's file, and the kernel."""
    shutil.rmtree(run / "tensorboard")
    path = run / "environment.json"
    environment = json.loads(path.read_text())
    path.write_text(json.dumps({**environment, "platform": "Linux-x86_64"}, indent=1) + "\n")


def main() -> None:
    """Make all but this file, README.md and config.yaml."""
    for made in ("hub", "run", "stopped", "cache", ".half.jsonl.job", ".whole.jsonl.job"):
        shutil.rmtree(made, ignore_errors=True)
    for name in ("rows.jsonl", "evaluated.json", "whole.jsonl", "whole.jsonl.summary.json"):
        Path(name).unlink(missing_ok=True)
    make_hub(Path("hub"))
    make_rows(Path("rows.jsonl"))
    rows = pd.read_json("rows.jsonl", lines=True)  # given the file, the runs would hold its place
    brim.Model("config.yaml").train(rows, output_directory="run")
    with suppress(brim.BrimError):
        brim.Model("config.yaml").train(rows, output_directory="stopped", observer=CtrlC())
    run = brim.Model.load("run")
    figures = run.evaluate(rows, split="test").metrics
    Path("evaluated.json").write_text(json.dumps(figures, indent=1) + "\n")
    run.predict(rows, output="whole.jsonl")
    with suppress(brim.BrimError):
        run.predict(rows, output="half.jsonl", batch_size=8, on_batch=ctrl_c)
    for folder in ("run", "stopped"):
        forget_machine(Path(folder))


main()
