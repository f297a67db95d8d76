"""Make the base model of the demo: pre-train it with brim on the training modules of the standard library.

    PYTHONPATH=examples python -m stdlib_code.pretrain [FOLDER]

Data, run folder and checkpoints go to FOLDER (results/pretraining); run again, it continues there. The finished model
goes to examples/stdlib_code/base-model, in bf16, with its card. It takes about twenty minutes on two cores that have
bf16 arithmetic, twice as long on others (there, set precision to fp32).
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from brim import EvaluateResult, Model, TrainResult
from stdlib_code import dataset, tokenizer

HERE = Path(__file__).parent
BASE_MODEL = HERE / "base-model"
CONTEXT_LENGTH = 1024
VOCABULARY_SIZE = 4096

ARCHITECTURE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LENGTH,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}

TEXT_FEATURES: dict[str, Any] = {
    "input_features": [{"name": "prompt", "type": "text"}],
    "output_features": [{"name": "completion", "type": "text"}],
}

CONFIG: dict[str, Any] = {
    **TEXT_FEATURES,
    "initialize": "random",
    "precision": "bf16-mixed",
    "trainer": {
        "type": "finetune",
        "epochs": 4,
        "effective_batch_size": 8,
        "batch_size": 4,
        "eval_batch_size": 8,
        "learning_rate": 0.0015,
        "learning_rate_scheduler": {"decay": "cosine", "warmup_fraction": 0.02, "eta_min": 0.00005},
        "optimizer": {"type": "adamw", "betas": [0.9, 0.95], "weight_decay": 0.1},
        "gradient_clipping": {"clipglobalnorm": 1.0},
    },
    "preprocessing": {
        "split": {"type": "fixed", "column": "split"},
        "global_max_sequence_length": 768,
    },
}


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "results/pretraining")
    modules = dataset.stdlib_modules()
    rows = dataset.pretraining_rows(modules)
    data, start = folder / "pretraining.jsonl", folder / "random"
    dataset.write_jsonl(rows, data)
    _write_start(start, rows)
    model = Model({**CONFIG, "base_model": str(start), "dataset": str(data)})
    result = model.train(output_directory=folder / "run", resume=True)
    _write_base_model(folder / "run" / "model")
    held_out = _evaluate_held_out(modules)
    card = _card(rows, result, held_out, metrics=folder / "run" / "metrics.jsonl")
    (BASE_MODEL / "README.md").write_text(card, encoding="utf-8")
    print(f"{BASE_MODEL}: loss on held-out modules {held_out.metrics['loss']:.4f}")


def _write_start(folder: Path, rows: Sequence[dict[str, str | int]]) -> None:
    """A model folder without weights: architecture and tokenizer."""
    learned = tokenizer.train(
        (str(row["completion"]) for row in rows if row["split"] == dataset.TRAIN), vocabulary_size=VOCABULARY_SIZE
    )
    tokenizer.save(learned, folder, context_length=CONTEXT_LENGTH)
    (folder / "config.json").write_text(json.dumps(ARCHITECTURE, indent=2) + "\n", encoding="utf-8")


def _write_base_model(trained: Path) -> None:
    """The trained model in bf16, with its tokenizer."""
    AutoModelForCausalLM.from_pretrained(trained, dtype=torch.bfloat16).save_pretrained(BASE_MODEL)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(trained / name, BASE_MODEL / name)


def _evaluate_held_out(modules: Sequence[dataset.Module]) -> EvaluateResult:
    """The shipped weights on the text of the modules that they have not seen."""
    config = {**TEXT_FEATURES, "base_model": str(BASE_MODEL), "preprocessing": CONFIG["preprocessing"]}
    held_out = [module for module in modules if module.split != dataset.TRAIN]
    texts = [text for module in held_out for text in dataset.pieces(module, max_characters=1600)]
    return Model(config).evaluate({"prompt": [""] * len(texts), "completion": texts})


def _card(rows: Sequence[dict[str, str | int]], result: TrainResult, held_out: EvaluateResult, *, metrics: Path) -> str:
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if record.get("split") == "train" and "learning_rate" in record]
    template = (HERE / "model_card.md").read_text(encoding="utf-8")
    return template.format(
        parameters=sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(BASE_MODEL).parameters()),
        layers=ARCHITECTURE["num_hidden_layers"],
        hidden=ARCHITECTURE["hidden_size"],
        vocabulary=VOCABULARY_SIZE,
        context=CONTEXT_LENGTH,
        python=platform.python_version(),
        rows=result.num_rows["train"],
        characters=sum(len(str(row["completion"])) for row in rows if row["split"] == dataset.TRAIN),
        steps=steps[-1]["step"],
        epochs=steps[-1]["num_samples"] / result.num_rows["train"],
        tokens=steps[-1]["num_tokens"],
        minutes=sum(step["seconds"] for step in steps) / 60,
        validation_loss=result.metrics["validation"]["loss"],
        held_out_loss=held_out.metrics["loss"],
        perplexity=held_out.metrics["perplexity"],
        low=held_out.loss_interval.low,
        high=held_out.loss_interval.high,
        held_out_pieces=held_out.metrics["num_rows"],
    )


if __name__ == "__main__":
    main()
