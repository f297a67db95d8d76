"""Freed blocks of the C library go back to the system."""

import subprocess
import sys

import pytest

CODE = """
import re
import numpy as np
from brim.memory import map_large_blocks

def resident():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmRSS:\\s*(\\d+)", status.read())[1]) * 1024

def block():
    return np.ones(2**21, dtype=np.uint8)

if {call}:
    assert map_large_blocks()
del (first := [block()])[:]  # by glibc's own rule blocks of this size come from the heap from now on
before = resident()
blocks = [block() for _ in range(40)]
kept = blocks[1::2]
del blocks
print(round((resident() - before) / 2**20))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
@pytest.mark.parametrize(("call", "least", "most"), [(False, 75, 90), (True, 35, 50)], ids=["by itself", "as told"])
def test_every_other_block_is_given_back(call, least, most):
    """Of 40 blocks of 2 MiB half live on, between those that are freed."""
    run = subprocess.run([sys.executable, "-c", CODE.replace("{call}", str(call))], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert least <= int(run.stdout) <= most
