"""Freed memory stays with the process, for long runs on a CPU."""

from __future__ import annotations

import ctypes
import os
import platform

import torch

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # parameters of mallopt, by glibc's malloc.h
LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc to keep large freed blocks; whether it was told.

    It hands blocks beyond 32 MiB back to the kernel at once, which fills them with zeros when they are asked for again:
    at every layer of every step, in a convolutional network. The process then holds on to its peak. Nothing is done on
    machines with a CUDA device, without glibc, and where the environment sets ``MALLOC_…`` or ``GLIBC_TUNABLES``.
    """
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if chosen or torch.cuda.is_available() or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(MMAP_MAX, 0)) and bool(mallopt(TRIM_THRESHOLD, LARGEST))
