"""An event of a run in one line, for people."""

from __future__ import annotations

from brim.train.observer import Record
from brim.units import format_bytes


def event_line(record: Record) -> str | None:
    """None: not worth a line."""
    text = _text(record)
    return None if text is None else f"step {record['step']:,}  {text}"


def _text(record: Record) -> str | None:
    event = record["event"]
    if event in ("checkpoint", "point"):
        return None
    if event == "schedule":
        return f"effective batch: {record['before']:,} -> {record['effective_batch_size']:,} rows ({record['reason']})"
    if event == "oom":
        return _out_of_memory(record)
    if event == "replay":
        return f"begun anew, in {_count(record['num_micro_batches'], 'micro-batch', 'micro-batches')}"
    if event == "cap":
        return f"limit of a micro-batch: {_amount(record, 'before')} -> {_amount(record, 'after')}"
    return str(event)


def _out_of_memory(record: Record) -> str:
    """Of a micro-batch, of rows without gradients, or of something that has no rows."""
    where = f"memory ran out: {record['where']}"
    if "rows" not in record:
        return f"{where}; tried once more"
    text = f"{where}, {_count(len(record['rows']), 'row', 'rows')} of up to {record['padded_length']:,} tokens"
    if "rows_at_once" in record:
        return f"{text}; from now on {record['rows_at_once']:,} together"
    if "cap_bytes" in record:
        return f"{text}; from now on in batches of up to {format_bytes(record['cap_bytes'])}"
    predicted = record["predicted_bytes"]
    return text if predicted is None else f"{text} (predicted: {format_bytes(predicted)})"


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"


def _amount(record: Record, name: str) -> str:
    number = record[name]
    return format_bytes(number) if record["unit"] == "bytes" else f"{number:,} {record['unit']}"
