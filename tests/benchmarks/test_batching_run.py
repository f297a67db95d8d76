"""What is kept of a run that did not end well."""

from __future__ import annotations

from benchmarks.batching_run import last_words

STDERR = """a warning
Traceback (most recent call last):
  File "/home/someone/x.py", line 1, in <module>
    raise OutOfMemoryError
brim.errors.OutOfMemoryError: step 1: row 18 ran out of memory
  fix: shorter rows
"""


def test_the_error_is_kept_without_the_paths_that_lead_to_it():
    assert last_words(STDERR) == "brim.errors.OutOfMemoryError: step 1: row 18 ran out of memory fix: shorter rows"


def test_a_process_that_was_killed_has_its_last_line():
    assert last_words("loading\nKilled\n") == "Killed"
    assert last_words("") == ""
