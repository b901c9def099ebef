"""What speed costs in quality, on the demo: ``python -m tests.benchmarks.quality --what time fractions sort``.

Heads start blank (:func:`~tests.benchmarks.demo_training.make_module`), else as ``configs/demo.yaml`` has them.

- ``time``: the published step (:mod:`tests.benchmarks.reference_step`) against the project's defaults as
  ``configs/demo.yaml`` trains: processor time of training until insertion − deletion is within 1 % of the lower of the
  two bests. Same head, data in the same order, learning rate and its schedule; the published step keeps its own sort,
  fractions, classes and temperatures. Each schedule ends with ``--steps`` or ``--seconds``, whichever is first.
- ``fractions``: 2, 4, 8, 16 sampled fractions, each for ``--seconds`` of processor time.
- ``sort``: the default sort against the published one, ``--steps`` each, all else equal; paired bootstrap interval.

Evaluation (`aha` protocol, ``--pictures`` of the validation set, for ``sort`` of the test set) is not counted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from aha.evaluation.bootstrap import bootstrap_means
from tests.benchmarks.demo_training import make_module, ours, published, train

SORTS = ("quantile_sinkhorn", "gumbel_sinkhorn")
Tell = Callable[[int, int], Callable[[float], object]]  # run i of n: where the share done goes


def compare_time(options: argparse.Namespace, tell: Tell) -> dict[str, dict[str, Any]]:
    """Time to the same quality; the project's step is looked at ten times as often."""
    runs = {}
    for i, (step, every) in enumerate(((published, options.every), (ours, options.every / 10))):
        limits = dict(steps=options.steps, seconds=options.seconds, every=every)
        module = make_module()
        runs[step.__name__] = train(module, step(module), tell(i, 2), options.pictures, **limits)
    best = {name: max(value for _, value in run.history) for name, run in runs.items()}
    level = 0.99 * min(best.values())
    rows = {}
    for name, run in runs.items():
        reached = next(spent for spent, value in run.history if value >= level)
        rows[name] = {"steps": run.steps, "CPU s": run.seconds, "best": best[name], "level": level, "reached": reached}
    base = rows["ours"]["reached"]  # 0 where the untrained head is there already: then nothing was compared
    return rows | {"published / ours": {"reached": rows["published"]["reached"] / base if base else None}}


def compare_fractions(options: argparse.Namespace, tell: Tell) -> dict[str, dict[str, Any]]:
    """Sampled fractions at equal time."""
    rows = {}
    for i, count in enumerate((2, 4, 8, 16)):
        module = make_module(num_fractions=count)
        run = train(module, ours(module), tell(i, 4), options.pictures, seconds=options.seconds)
        rows[f"{count} fractions"] = {"steps": run.steps, "CPU s": run.seconds} | interval(run.values)
    return rows


def compare_sort(options: argparse.Namespace, tell: Tell) -> dict[str, dict[str, Any]]:
    """The default sort against the published one at equal steps, on test pictures, with the paired difference."""
    runs = {}
    for i, method in enumerate(SORTS):
        module = make_module(method=method)
        runs[method] = train(module, ours(module), tell(i, 2), options.pictures, steps=options.steps, split="test")
    rows = {name: {"steps": run.steps, "CPU s": run.seconds} | interval(run.values) for name, run in runs.items()}
    return rows | {"difference": interval(runs[SORTS[0]].values - runs[SORTS[1]].values)}


def interval(values: Tensor) -> dict[str, float]:
    """Mean of insertion − deletion, or of a paired difference, with its 95 % bootstrap interval."""
    means = bootstrap_means(values[:, None].numpy())
    return {"ins − del": float(means.value[0]), "low": float(means.low[0]), "high": float(means.high[0])}


COMPARISONS = {"time": compare_time, "fractions": compare_fractions, "sort": compare_sort}


def main(arguments: list[str] | None = None) -> None:
    """Run what is asked for; print a table each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=COMPARISONS, default=list(COMPARISONS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of processor time, training a run")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two looks at the published step")
    parser.add_argument("--pictures", type=int, default=256, help="to evaluate on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    console, records = Console(), {}
    for what in options.what:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(what, total=1.0)
            tell: Tell = lambda i, n, b=bar, t=task: lambda done: b.update(t, completed=(i + done) / n)  # noqa: E731
            records[what] = rows = COMPARISONS[what](options, tell)
        heads = list(dict.fromkeys(head for row in rows.values() for head in row))
        table = Table(what, *heads)
        for name, row in rows.items():
            cells = (row.get(head, "") for head in heads)
            table.add_row(name, *(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells))
        console.print(table)
        if options.output:
            options.output.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
