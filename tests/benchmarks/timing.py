"""Fair timing on a busy machine: the sides take turns, and processor time stands beside wall time.

With ``--device cuda`` the clocks wait for the device, and wall time is what counts; nobody has yet run that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

Times = dict[str, list[tuple[float, float]]]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Command line with the options that all benchmarks share."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu or cuda")
    return options


def step_parser(doc: str | None) -> argparse.ArgumentParser:
    """The same with what a training step is measured at."""
    options = parser(doc)
    options.add_argument("--classifier", default="vit_tiny_patch16_224")
    options.add_argument("--size", type=int, default=224)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--grid", type=int, default=28)
    return options


def alternate(sides: dict[str, Callable[[], object]], rounds: int, *, warm_up: bool = True) -> Times:
    """Run every side in turn, ``rounds`` times: seconds of wall and of processor time of each run."""
    if warm_up:
        for run in sides.values():
            run()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    times: Times = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            wall, processor = time.perf_counter(), time.process_time()
            run()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - wall, time.process_time() - processor))
    return times


def report(times: Times, *, over: str) -> dict[str, float]:
    """Print milliseconds and their ratio to the side ``over``; returns the ratio of median processor times by side."""
    columns = [("wall", 0, statistics.median), ("wall min", 0, min), ("cpu", 1, statistics.median), ("cpu min", 1, min)]
    width = max(map(len, times))
    print(" " * width + "".join(f"{name + ' ms':>13s}{'×':>8s}" for name, _, _ in columns))
    ratios = {}
    for name in times:
        line = f"{name:{width}s}"
        for title, place, middle in columns:
            here, base = (middle([run[place] for run in times[side]]) for side in (name, over))
            line += f"{1e3 * here:13.1f}{here / base:8.3f}"
            if title == "cpu":
                ratios[name] = here / base
        print(line)
    return ratios


def peak_above_idle(module: str, arguments: Sequence[str]) -> float:
    """MiB that ``python -m module …`` says (by :func:`measure_peak`) it took at its peak; a process of its own."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - our own module
    return json.loads(done.stdout.strip().splitlines()[-1])["peak_mib"]


def measure_peak(run: Callable[[], object]) -> None:
    """Print the peak memory during ``run`` above what is held before, in MiB: CUDA's, or this process's (Linux)."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        idle = torch.cuda.memory_allocated()
        run()
        print(json.dumps({"peak_mib": (torch.cuda.max_memory_allocated() - idle) / 2**20}))
        return
    torch.zeros(1)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    idle = _status("VmRSS")
    run()
    print(json.dumps({"peak_mib": (_status("VmHWM") - idle) / 1024}))


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))
