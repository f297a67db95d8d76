"""The napkin as it is printed."""

import io

from rich.console import Console
from tests.report.hand_made import GIB

from brim.memory.closed_form import Line, Napkin
from brim.report import napkin_table
from brim.report.memory import distance

LINES = (
    Line(
        name="weights", category="weights", formula="7 parameters × 2 B", num_bytes=14 * GIB, moments=("loss", "update")
    ),
    Line(name="gradients", category="gradients", formula="7 × 4 B", num_bytes=GIB, moments=("update",)),
    Line(name="logits", category="logits_and_loss", formula="8 × 4 B", num_bytes=3 * GIB, moments=("loss",)),
)
NAPKIN = Napkin(lines=LINES, notes=("newcomer is not known",), moments={"loss": 17 * GIB, "update": 15 * GIB})


def test_lines_moments_and_the_distance(prediction):
    stream = io.StringIO()
    Console(file=stream, width=100).print(napkin_table(NAPKIN, prediction))
    assert [line.rstrip() for line in stream.getvalue().splitlines()] == [
        "on a napkin",
        "",
        "             GiB  how",
        "weights    14.00  7 parameters × 2 B",
        "gradients   1.00  7 × 4 B",
        "logits      3.00  8 × 4 B",
        "",
        "what is there when         GiB  lines",
        "the loss is computed     17.00  weights, logits",
        "the weights are updated  15.00  weights, gradients",
        "",
        "newcomer is not known",
        "the napkin says 17.00 GiB, when the loss is computed; the trace 18.00 GiB allocated: -5.6%",
    ]


def test_the_distance_is_that_of_the_largest_moment(prediction):
    assert distance(NAPKIN, prediction).endswith("-5.6%")
