"""What a tried resumption may have shown, made by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from brim.workflows.verify_resume import Check, Difference, ResumeProof
from brim.workflows.verify_resume.comparison import Promise

_COMPARED = {
    "rows": "4 steps",
    "batch sizes": "4 steps",
    "micro-batches": "4 steps",
    "learning rates": "4 steps",
    "losses": "4 steps",
    "weights": "8 tensors",
    "optimizer": "24 tensors",
    "random states": "1 tensor",
    "counters": "141 values",
}
DIFFERENCE = Difference(
    where="0.exp_avg[7]", undisturbed="0.25", disturbed="0", num=1_200, max_abs=0.5, relative=math.inf
)
PROOF = ResumeProof(
    run=Path("results/demo"),
    device="cpu",
    num_processes=1,
    precision="fp32",
    checkpoint_step=10,
    start_step=10,
    num_steps=4,
    effective_batch_sizes=(4, 4, 8, 8),
    stopped_after=12,
    killed_in=13,
    killed_where="between its micro-batches",
    promise=Promise(states="bits", figures="bits", loss_tolerance=0.0, same_cut=True, why="on a CPU, with one plan"),
    checks=tuple(
        Check(name=name, compared=compared, promise="bits", tolerance=0.0, difference=None)
        for name, compared in _COMPARED.items()
    ),
    own_log="has the same figures for 4 of these steps",
    seconds=12.0,
    folder=None,
)


def differing(proof: ResumeProof, name: str, **changes: object) -> ResumeProof:
    """The proof with a difference in one of its checks. changes: of the check."""
    checks = (
        replace(check, **{"difference": DIFFERENCE, **changes}) if check.name == name else check
        for check in proof.checks
    )
    return replace(proof, checks=tuple(checks))
