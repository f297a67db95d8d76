"""Check brim on the GPU at hand, without network: `python -m benchmarks.gpu correct | memory | speed`.

Each part ends within nine minutes with a verdict, and with exit status 1 where something failed; docs/gpu.md says what
its figures mean. They are written to benchmarks/results/gpu_PART.json after every case.

    python -m benchmarks.gpu correct --small --device cpu     # the same cases at toy sizes: a test of the script
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import transformers

from benchmarks.gpu import correct, memory, speed
from benchmarks.gpu.cases import Case, Options, run_cases
from benchmarks.report import RESULTS

PARTS: Mapping[str, Callable[[Options], Iterator[Case]]] = {
    "correct": correct.cases,
    "memory": memory.cases,
    "speed": speed.cases,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Check brim on the GPU at hand.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--budget-s", type=float, default=430, help="seconds; what they no longer hold is skipped")
    parser.add_argument("--small", action="store_true", help="toy sizes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the JSON goes")
    given = parser.parse_args(arguments)
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no CUDA device is at hand; --small --device cpu tries the script")
    transformers.logging.set_verbosity_error()
    options = Options.of(**vars(given), arguments=sys.argv[1:] if arguments is None else arguments)
    return 0 if run_cases(PARTS[given.part](options), options) else 1


if __name__ == "__main__":
    sys.exit(main())
