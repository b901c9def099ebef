"""Freed memory stays with the process: the kernel has no pages to fill anew."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from aha.cli.memory import keep_freed_memory
print(keep_freed_memory())
def touch():
    for size in (2**25, 2**24, 2**23, 2**25):  # 128 MiB, …
        torch.ones(size)
for _ in range(5):
    touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
@pytest.mark.parametrize("chosen", [False, True])
def test_freed_blocks_are_kept_unless_the_user_chose(chosen) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUN"))}
    environment |= {"MALLOC_MMAP_THRESHOLD_": "1000000"} if chosen else {}
    run = subprocess.run([sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, check=True)
    told, faults = run.stdout.split()
    assert told == str(not chosen)
    assert int(faults) < 100 if not chosen else int(faults) > 10 * 176  # of 2 MiB pages at least
