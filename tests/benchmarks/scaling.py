"""Cost by regions, fractions and batch, memory by fractions and chunk size: ``python -m tests.benchmarks.scaling``.

Writes a plot to ``--output``. A straight line through the measured points is drawn with each. The sort is shown apart,
since it alone depends on the number of regions; the other points are whole steps, up to the head's gradients.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
import torch

from aha.classifier import FrozenClassifier
from aha.explainer import AmortizedExplainer
from aha.objective import AHAObjective, Draw
from aha.softsort import prefix_masks
from tests.benchmarks.timing import alternate, measure_peak, parser, peak_above_idle

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402


def step(
    explainer: AmortizedExplainer, *, batch: int, fractions: int, grid: int, chunk_size: int | None = None
) -> None:
    """Forward and backward of one training step."""
    images = torch.rand(batch, 3, *explainer.classifier.image_size)
    output = explainer.encode(images)
    targets = output.logits.argmax(-1)
    draw = Draw(grid, (0, 0), "mean", (torch.arange(fractions) + 0.5) / fractions)
    objective = AHAObjective(num_fractions=fractions, chunk_size=chunk_size)
    maps = explainer.decode(output, images, targets)
    objective(explainer.classifier, images, maps, targets, draw, temperature=0.3).loss.backward()


def sort(regions: int) -> None:
    """Forward and backward of the soft sort, batch 16, 16 fractions."""
    scores = torch.randn(16, regions, requires_grad=True)
    prefix_masks(scores, (torch.arange(16) + 0.5) / 16, temperature=0.3).square().sum().backward()


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and draw."""
    options = parser(__doc__)
    options.add_argument("--classifier", default="test_vit")
    options.add_argument("--size", type=int, default=64)
    options.add_argument("--batches", type=int, nargs="+", default=[2, 4, 8, 16])
    options.add_argument("--fractions", type=int, nargs="+", default=[4, 8, 16, 32])
    options.add_argument("--grids", type=int, nargs="+", default=[14, 28, 40, 56])
    options.add_argument("--output", type=Path, default=Path("scaling.png"))
    options.add_argument("--chunks", type=int, nargs="+", default=[4, 8, 16, 32])
    options.add_argument("--memory_of", type=int, nargs=2, help="peak memory, in this process: fractions, chunk size")
    parsed = options.parse_args(arguments)
    torch.set_num_threads(parsed.threads)
    torch.manual_seed(0)
    classifier = FrozenClassifier.from_timm(parsed.classifier, pretrained=False, image_size=parsed.size)
    explainer = AmortizedExplainer(classifier)
    fixed = dict(batch=parsed.batches[0], fractions=parsed.fractions[0], grid=min(parsed.size // 4, 28))
    if parsed.memory_of:
        fractions, chunk = parsed.memory_of
        step(explainer, **fixed | {"batch": 1})  # what is loaded once is no part of it
        measure_peak(lambda: step(explainer, **fixed | {"fractions": fractions, "chunk_size": chunk}))
        return
    curves = {
        "regions (sort alone)": _milliseconds(parsed, {g * g: lambda g=g: sort(g * g) for g in parsed.grids}),
        "fractions": _milliseconds(
            parsed, {k: lambda k=k: step(explainer, **fixed | {"fractions": k}) for k in parsed.fractions}
        ),
        "batch": _milliseconds(
            parsed, {b: lambda b=b: step(explainer, **fixed | {"batch": b}) for b in parsed.batches}
        ),
    }
    same = [f"--{k}={getattr(parsed, k)}" for k in ("classifier", "size", "threads")]
    same += ["--batches", str(parsed.batches[-1]), "--memory_of"]
    most, least = max(parsed.fractions), min(parsed.chunks)
    by_fractions = {k: peak_above_idle(__spec__.name, [*same, str(k), str(least)]) for k in parsed.fractions}
    by_chunk = {c: peak_above_idle(__spec__.name, [*same, str(most), str(c)]) for c in parsed.chunks}
    panels = {name: (points, "ms") for name, points in curves.items()}
    panels |= {f"fractions, in chunks of {least}": (by_fractions, "MiB")}
    panels |= {f"chunk size, {most} fractions": (by_chunk, "MiB")}
    _draw(parsed.output, panels)


def _milliseconds(parsed: argparse.Namespace, sides: dict[int, Callable[[], None]]) -> dict[int, float]:
    times = alternate({str(size): run for size, run in sides.items()}, parsed.rounds)
    return {size: 1e3 * statistics.median(cpu for _, cpu in times[str(size)]) for size in sides}


def _draw(output: Path, panels: dict[str, tuple[dict[int, float], str]]) -> None:
    figure, axes = plt.subplots(1, len(panels), figsize=(3.2 * len(panels), 3), layout="constrained")
    for axis, (name, (points, unit)) in zip(axes, panels.items(), strict=True):
        x, y = np.array(list(points)), np.array(list(points.values()))
        slope, start = np.polyfit(x, y, 1)
        off = float(np.abs(slope * x + start - y).max() / y.max())
        line = ", ".join(f"{size}: {value:.1f}" for size, value in points.items())
        print(f"{name:28s}{unit:4s} {line}; off a straight line by at most {off:.1%} of the largest")
        axis.plot(x, y, "o", x, slope * x + start, "-")
        axis.set(xlabel=name, ylabel=unit, ylim=(0, None), xlim=(0, None))
    figure.savefig(output, dpi=120)
    plt.close(figure)
    print(f"plot: {output}")


if __name__ == "__main__":
    main()
