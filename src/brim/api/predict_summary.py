"""What a prediction consists of and what it took: its summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from brim.api.prediction_blocks import Counts
from brim.data import Ledger
from brim.train.run_folder import package_versions


def summary_of(counts: Counts, ledger: Ledger, sittings: Sequence[Mapping[str, Any]], *, device: str) -> dict[str, Any]:
    """For the summary file. sittings: what each process that was at the prediction noted when it began and ended."""
    begins = [line for line in sittings if line["event"] == "begins"]
    ends = [line for line in sittings if line["event"] == "ends"]
    killed = [begin for begin, end in zip(begins, ends, strict=False) if end.get("killed")]
    seconds = sum(end["seconds"] for end in ends)
    at_most = [begin["about"].get("rows_at_once") for begin in killed]
    return {
        "num_rows": counts.num_rows,
        "num_prompt_tokens": counts.num_prompt_tokens,
        "num_response_tokens": counts.num_response_tokens,
        "finish_reasons": dict(sorted(counts.finish_reasons.items())),
        "seconds": seconds,
        "rows_per_s": counts.num_rows / seconds if seconds else None,
        "response_tokens_per_s": counts.num_response_tokens / seconds if seconds else None,
        "num_resumed": max(len(begins) - 1, 0),
        "num_killed": len(killed),
        "num_rows_repeated_at_most": None if None in at_most else sum(at_most),
        **({"category": counts.labels.record()} if counts.labels.labels else {}),
        "cut_or_left_out": dict(sorted(Counter(entry.event for entry in ledger).items())),
        "generation": dict(begins[-1]["about"]) | dict(ends[-1].get("about", {})) if ends else {},
        "device": device,
        "versions": package_versions(),
    }
