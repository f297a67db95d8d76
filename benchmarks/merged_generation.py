"""Measure what merging an adapter saves while responses are generated, and after how many tokens it pays.

    python -m benchmarks.merged_generation

Greedy generation by brim's own engine with a Llama of random weights and an adapter of rank 16 on all linear layers,
one CPU thread. Unmerged and merged runs alternate within one process; times are the processor's, figures are medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.report import print_table, write_report
from brim.data.tokens import TokenRow, TokenRows
from brim.infer.engines import FixedRoom, Response, SlotsEngine, respond_to
from brim.infer.metrics import Divergence, Runner
from brim.models import PassingMerge, precision
from brim.models.adapter_function import use_adapter_function

SIZES = {"10M": (256, 768, 6), "40M": (512, 1792, 8), "100M": (1024, 3072, 6)}  # hidden, intermediate, layers
VOCABULARY, PROMPT_TOKENS, NEW_TOKENS = 8000, 32, 24
CPU = torch.device("cpu")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16-true"], default=["fp32"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repetitions", type=int, default=5)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    figures = []
    for size in given.size:
        for kind in given.precision:
            model = _model(size, kind)
            costs_s = [_cost_s(model, kind) for _ in range(given.repetitions + 1)][1:]
            for rows in given.rows:
                found = _measured(model, kind, rows, given.repetitions)
                pays_from = median(costs_s) / found["saved_s"] if found["saved_s"] > 0 else None
                figures.append({"size": size, "precision": kind, "rows": rows, **found, "pays_from_tokens": pays_from})
    lines = [
        [
            f"{each['size']}, {each['precision']}, {each['rows']}",
            f"{each['ratio']:.2f}",
            f"{each['same_texts']:.0%}",
            "never" if each["pays_from_tokens"] is None else f"{each['pays_from_tokens']:,.0f}",
        ]
        for each in figures
    ]
    print_table("merged against unmerged", ["size, precision, rows", "time, ×", "same texts", "tokens to pay"], lines)
    write_report("merged_generation", figures={"figures": figures}, num_threads=1)


def _model(size: str, kind: str) -> Any:
    hidden, intermediate, layers = SIZES[size]
    torch.manual_seed(0)
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64, "vocab_size": VOCABULARY}
    config = LlamaConfig(hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, **heads)
    base = LlamaForCausalLM(config).to(torch.float32 if kind == "fp32" else torch.bfloat16)
    model = peft.get_peft_model(base, peft.LoraConfig(r=16, target_modules="all-linear")).eval()
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = 0.02 * torch.randn(weight.shape)
    use_adapter_function(model)
    return model


def _prompts(rows: int, *, supervised: bool = False) -> TokenRows:
    drawn = np.random.default_rng(0).integers(5, VOCABULARY, (rows, PROMPT_TOKENS), dtype=np.int32)
    every = np.full(PROMPT_TOKENS, supervised)
    return TokenRows.from_rows([TokenRow(key=key, input_ids=ids, supervised=every) for key, ids in enumerate(drawn)])


def _cost_s(model: Any, kind: str) -> float:
    """Compare as a prediction does before it merges, and merge."""
    merge, how, rows = PassingMerge(model), Runner(pad_id=0, batch_rows=1, device=CPU), _prompts(4, supervised=True)
    started = time.process_time()
    before = list(how.logits(model, rows, precision(kind)))  # type: ignore[arg-type]  # one of its names
    how.adapter_kl(model, rows, precision(kind), before=before)  # type: ignore[arg-type]
    with merge.tried():
        Divergence.between(before, how.logits(model, rows, precision(kind)))  # type: ignore[arg-type]
    with merge.done(keeps=True):
        return time.process_time() - started


def _measured(model: Any, kind: str, rows: int, repetitions: int) -> dict[str, Any]:
    merge, pairs = PassingMerge(model), []
    _generated(model, kind, rows)
    for _ in range(repetitions):
        apart_s, texts = _generated(model, kind, rows)
        with merge.done(keeps=True):
            merged_s, others = _generated(model, kind, rows)
        pairs.append((apart_s, merged_s))
    return {
        "ratio": median(merged_s / apart_s for apart_s, merged_s in pairs),
        "saved_s": median(apart_s - merged_s for apart_s, merged_s in pairs) / (rows * NEW_TOKENS),
        "same_texts": sum(one == other for one, other in zip(texts, others, strict=True)) / rows,
    }


def _generated(model: Any, kind: str, rows: int) -> tuple[float, list[Response]]:
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": [VOCABULARY]}
    engine = SlotsEngine(
        model, settings=settings, room=FixedRoom(rows, prefill_tokens=512), seed=0, device=CPU,
        precision=precision(kind), is_misled=False,  # type: ignore[arg-type]
    )  # fmt: skip
    started = time.process_time()
    texts = respond_to(engine, _prompts(rows))
    return time.process_time() - started, texts


if __name__ == "__main__":
    main()
