"""Take one measurement in a process of its own: `python -m brim.workflows.measure FOLDER`."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

from brim.errors import BrimError, Problem
from brim.workflows.measure.messages import Request


def main(folder: Path) -> None:
    request = Request.loads((folder / "request.json").read_text(encoding="utf-8"))
    import torch

    from brim.workflows.measure.work import run

    warnings.simplefilter("ignore")  # nobody reads this process's terminal
    try:
        report = run(request)
    except BrimError as error:
        told = {"exit_code": error.exit_code, "problems": [asdict(problem) for problem in error.problems]}
    except torch.OutOfMemoryError as error:
        problem = Problem(
            what=f"the device ran out of memory: {str(error).splitlines()[0]}",
            fix="a smaller --batch-size or --sequence-length; or --layers 1, which runs a few layers and extrapolates",
        )
        told = {"exit_code": 1, "problems": [asdict(problem)]}
    else:
        (folder / "report.json").write_text(report.dumps(), encoding="utf-8")
        return
    (folder / "error.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
