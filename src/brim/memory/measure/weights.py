"""Random weights on disk, for what can only be loaded from there: a quantised base model.

`python -m brim.memory.measure.weights FOLDER` writes those of FOLDER's config.json beside it, in bf16.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch


def write_random_weights(folder: Path) -> None:
    """Write model.safetensors beside config.json. The values do not matter: only their number and sizes do."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    architecture = AutoConfig.from_pretrained(folder)
    AutoModelForCausalLM.from_config(architecture, dtype=torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    write_random_weights(Path(sys.argv[1]))
