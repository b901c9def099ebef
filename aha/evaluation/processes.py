"""One process or many: started by torchrun, or here with ``processes=N``."""

from __future__ import annotations

import builtins
import os
import re
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(days=7)  # ranks wait for the slowest; a dead rank is noticed by whoever started it


def launch(function: Callable[..., None], *args: Any, processes: int = 1) -> None:
    """Call ``function(*args, rank, world)`` in every process.

    Under torchrun (``RANK`` is set) this process is one of them; otherwise ``processes`` are started, and if one
    fails the others are ended and its error is raised. CPU threads are shared out among the processes of a machine.

    Args:
        function: importable, with arguments that can be pickled if there are several processes.
        args: its first arguments.
        processes: how many to start.

    Raises:
        ValueError: fewer than one process.
    """
    if processes < 1:
        msg = f"processes must be at least 1, got {processes}."
        raise ValueError(msg)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        _share_threads(int(os.environ.get("LOCAL_WORLD_SIZE", world)))
        dist.init_process_group("gloo", timeout=PATIENCE)
        _run(function, args, rank, world)
    elif processes == 1:
        function(*args, 0, 1)
    else:
        with tempfile.TemporaryDirectory() as folder:
            meeting = Path(folder, "meeting").as_uri()
            # A fork server imports everything once; it has no threads and no CUDA context that a fork would break.
            torch.multiprocessing.set_forkserver_preload([function.__module__])
            try:
                torch.multiprocessing.start_processes(
                    _start, (function, args, processes, meeting), nprocs=processes, start_method="forkserver"
                )
            except torch.multiprocessing.ProcessRaisedException as error:
                _raise_expected(error)
                raise


def wait_for_all() -> None:
    """Return when every process has come here."""
    if dist.is_initialized():
        dist.barrier()


def local_rank(rank: int) -> int:
    """Place of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", rank))


def _raise_expected(error: Exception) -> None:
    """Raise again what a user can act on, without another process's traceback before it."""
    last = [
        re.match(r"(ValueError|FileNotFoundError|ImportError|ConnectionError|OSError): (.*)", line)
        for line in str(error).splitlines()
    ]
    found = [match for match in last if match]
    if found:
        raise getattr(builtins, found[-1][1])(found[-1][2]) from error


def _start(rank: int, function: Callable[..., None], args: tuple, world: int, meeting: str) -> None:
    _share_threads(world)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=PATIENCE)
    _run(function, args, rank, world)


def _run(function: Callable[..., None], args: tuple, rank: int, world: int) -> None:
    try:
        function(*args, rank, world)
    finally:
        dist.destroy_process_group()


def _share_threads(local_world: int) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world))
