"""Advice on a data set: what tends to spoil fine-tuning, found in its texts and lengths. None of it stops a run."""

from brim.data.advice.advise import advise, eos_text
from brim.data.advice.facts import Watcher
from brim.data.advice.finding import Finding, in_order

__all__ = ["Finding", "Watcher", "advise", "eos_text", "in_order"]
